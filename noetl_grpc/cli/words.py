"""What people type, as values."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import TypeVar

from noetl_grpc.cli.remote import refuse, require_fit

E = TypeVar("E", bound=StrEnum)


def parse_id(text: str) -> int | None:
    """A number, unless it is something else."""
    return require_fit(int(text), "id") if text.isdecimal() else None


def parse_time(text: str, *, option: str) -> datetime:
    """An instant; without a zone it is UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        refuse(f"{option} {text!r} can't be used; expected a time such as 2026-05-01T12:00:00Z")
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def parse_word(words: type[E], text: str, *, option: str) -> E:
    """A member of one of the client's enums, whatever its case."""
    known = {word.value: word for word in words if word.value != "UNSPECIFIED"}
    found = known.get(text.strip().upper().replace("-", "_"))
    if found is None:
        refuse(f"{option} {text!r} can't be used; expected one of {', '.join(known).lower()}")
    return found
