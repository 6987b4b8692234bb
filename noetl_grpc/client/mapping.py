"""Messages to dataclasses and back, by field name.

A dataclass of the client has the fields of its message under the same names; their annotations say the rest
(`X | None` where the field may be absent, `tuple[X, ...]` where it repeats). A test walks every class and message, so
that a field added to a proto can't be forgotten here.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from noetl_grpc.errors import InvalidRequest

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Read = Callable[[Any], Any]

#: A 64-bit id: an int in Python, a text in JSON documents, where other languages would round it.
Id = Annotated[int, "id"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def from_pb(cls: type[T], message: Any) -> T:
    """The dataclass that says what the message says."""
    return cls(**{name: read(message) for name, read in _readers(_any(cls), _any(type(message)))})


def to_pb(value: Any, message_type: type[M]) -> M:
    """The message that says what the dataclass says; a field that is None stays absent."""
    given = (
        (name, write, getattr(value, name)) for name, write in _writers(_any(type(value)), _any(message_type))
    )
    return message_type(**{name: write(item) for name, write, item in given if item is not None})


def to_document(value: Any) -> Any:
    """The value for JSON: ids as texts, times as RFC 3339 in UTC, durations as seconds."""
    return {name: show(getattr(value, name)) for name, show in _showers(_any(type(value)))}


def timestamp(value: datetime, *, field: str) -> Timestamp:
    """An instant, exact to the microsecond."""
    if value.tzinfo is None:
        raise InvalidRequest(field, "must have a time zone")
    since = value - _EPOCH
    return Timestamp(seconds=since.days * 86_400 + since.seconds, nanos=since.microseconds * 1000)


def duration(seconds: float) -> Duration:
    """A span of time, exact to the microsecond."""
    span = timedelta(seconds=seconds)
    return Duration(seconds=span.days * 86_400 + span.seconds, nanos=span.microseconds * 1000)


def enum_prefix(name: str) -> str:
    """`TailerMode` has values such as TAILER_MODE_SNAPSHOT; the client's enum leaves the first part out."""
    return "".join(f"_{letter}" if letter.isupper() else letter.upper() for letter in name).lstrip("_") + "_"


def number_of(value: StrEnum, enum_type: Any) -> int:
    """The number on the wire of a member of one of the client's enums."""
    number: int = enum_type.Value(enum_prefix(enum_type.DESCRIPTOR.name) + value.value)
    return number


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


@cache
def _readers(cls: Any, message_type: Any) -> tuple[tuple[str, Read], ...]:
    descriptor = message_type.DESCRIPTOR
    return tuple(
        (item.name, _field_reader(item.name, _hints(cls)[item.name], descriptor.fields_by_name[item.name]))
        for item in fields(cls)
    )


def _field_reader(name: str, hint: Any, descriptor: Any) -> Read:
    inner = _without_none(hint)
    read = _value_reader(inner, descriptor)
    if inner is not hint:
        return lambda message: read(getattr(message, name)) if message.HasField(name) else None
    if read is _same:
        return lambda message: getattr(message, name)
    return lambda message: read(getattr(message, name))


def _value_reader(hint: Any, descriptor: Any) -> Read:
    origin = get_origin(hint)
    if origin is tuple:
        item = _value_reader(get_args(hint)[0], descriptor)
        return tuple if item is _same else lambda values: tuple([item(value) for value in values])
    if origin in (dict, Mapping):
        value_descriptor = descriptor.message_type.fields_by_name["value"]
        item = _value_reader(get_args(hint)[1], value_descriptor)
        # A map has no order of its own; a document should be the same every time.
        return lambda values: {key: item(values[key]) for key in sorted(values)}
    if hint is datetime:
        return lambda value: _EPOCH + timedelta(seconds=value.seconds, microseconds=value.nanos // 1000)
    if hint is timedelta:
        return lambda value: timedelta(seconds=value.seconds, microseconds=value.nanos // 1000)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _enum_reader(hint, descriptor.enum_type)
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda value: from_pb(hint, value)
    return _same


def _enum_reader(cls: type[StrEnum], enum_type: Any) -> Read:
    prefix = enum_prefix(enum_type.name)
    members = {value.number: cls(value.name.removeprefix(prefix)) for value in enum_type.values}
    # A newer server may know more words than we do; it must not break a client that only passes them on.
    unknown = members[0]
    return lambda number: members.get(number, unknown)


@cache
def _writers(cls: Any, message_type: Any) -> tuple[tuple[str, Read], ...]:
    descriptor = message_type.DESCRIPTOR
    return tuple(
        (
            item.name,
            _value_writer(
                item.name, _without_none(_hints(cls)[item.name]), descriptor.fields_by_name[item.name]
            ),
        )
        for item in fields(cls)
    )


def _value_writer(name: str, hint: Any, descriptor: Any) -> Read:
    if get_origin(hint) is tuple:
        item = _value_writer(name, get_args(hint)[0], descriptor)
        return list if item is _same else lambda values: [item(value) for value in values]
    if hint is datetime:
        return lambda value: timestamp(value, field=name)
    if hint is timedelta:
        return lambda value: duration(value.total_seconds())
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        prefix = enum_prefix(descriptor.enum_type.name)
        return lambda value: prefix + value.value
    if is_dataclass(hint):
        message_type = descriptor.message_type._concrete_class
        return lambda value: to_pb(value, message_type)
    return _same


@cache
def _showers(cls: Any) -> tuple[tuple[str, Read], ...]:
    return tuple((item.name, _shower(_hints(cls)[item.name])) for item in fields(cls))


def _shower(hint: Any) -> Read:
    inner = _without_none(hint)
    if inner is not hint:
        show = _shower(inner)
        return lambda value: None if value is None else show(value)
    if hint is Id:
        return str
    origin = get_origin(hint)
    if origin is tuple:
        item = _shower(get_args(hint)[0])
        return lambda values: [item(value) for value in values]
    if origin in (dict, Mapping):
        item = _shower(get_args(hint)[1])
        return lambda values: {key: item(value) for key, value in values.items()}
    if hint is datetime:
        return lambda value: value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if hint is timedelta:
        return timedelta.total_seconds
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return lambda value: value.value
    return to_document if is_dataclass(hint) else _same


def _same(value: Any) -> Any:
    return value


def _any(cls: type) -> Any:
    """mypy does not take a `type[T]` for hashable."""
    return cls


def _without_none(hint: Any) -> Any:
    """X of `X | None`, else the hint itself."""
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (arg for arg in get_args(hint) if arg is not types.NoneType)
        return inner
    return hint
