"""Rules that fields of requests share: texts the database can store, ids, leases."""

from __future__ import annotations

from datetime import timedelta

from noetl_grpc.errors import InvalidRequest

LEASE_DEFAULT = timedelta(seconds=30)
LEASE_MIN = timedelta(seconds=1)
LEASE_MAX = timedelta(hours=1)


def positive_id(value: int, field: str) -> int:
    """An id, which is above 0."""
    if value <= 0:
        raise InvalidRequest(field, "must be above 0")
    return value


def text(value: str, field: str, *, characters_max: int | None = None) -> str:
    """A text that may be empty; PostgreSQL stores every character but NUL."""
    if "\0" in value:
        raise InvalidRequest(field, "must not contain a NUL character")
    if characters_max is not None and len(value) > characters_max:
        raise InvalidRequest(field, f"must have at most {characters_max} characters")
    return value


def required_text(value: str, field: str, *, characters_max: int | None = None) -> str:
    """A text that must say something."""
    if not value.strip():
        raise InvalidRequest(field, "is required")
    return text(value, field, characters_max=characters_max)


def count(value: int, field: str) -> int:
    """A number of things."""
    if value < 0:
        raise InvalidRequest(field, "must not be negative")
    return value


def lease(*, seconds: int, nanos: int, field: str = "lease") -> timedelta:
    """How long a lease lasts; 0 asks for the default."""
    microseconds = seconds * 1_000_000 + nanos // 1000
    if seconds == 0 and nanos == 0:
        return LEASE_DEFAULT
    if not LEASE_MIN // _MICROSECOND <= microseconds <= LEASE_MAX // _MICROSECOND:
        raise InvalidRequest(field, "must be between 1 s and 1 h, or 0 for 30 s")
    return timedelta(microseconds=microseconds)


_MICROSECOND = timedelta(microseconds=1)
