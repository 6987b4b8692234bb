"""Numbers as events carry them: counters, attempts, versions, totals, any of which may be malformed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from noetl_grpc.core.canonical import Json
from noetl_grpc.core.rules import Rules
from noetl_grpc.errors import EventMalformed

#: A log in which every event is malformed must not become an answer that is mostly warnings.
WARNINGS_MAX = 1000


@dataclass(frozen=True, slots=True)
class FoldWarning:
    """Something an event holds that the fold had to pass over."""

    event_id: int
    path: str
    problem: str


def all_warnings(noted: Iterable[FoldWarning], left_out: int) -> list[FoldWarning]:
    """What was noted, and then how much is not listed."""
    more = [FoldWarning(0, "", f"{left_out} more warnings are not listed")] if left_out else []
    return [*noted, *more]


class Numbers:
    """Reads numbers by one rule set and keeps the warnings."""

    def __init__(self, rules: Rules) -> None:
        self._malformed_is_absent = rules.malformed_is_absent
        self.warnings: list[FoldWarning] = []
        self.warnings_left_out = 0

    def counter(self, event_id: int | None, path: str, value: Json, current: int) -> int:
        """The value as an integer; one that is falsy or absent leaves the current count."""
        return current if value is None else self.first(event_id, ((path, value),), current)

    def first(self, event_id: int | None, candidates: Iterable[tuple[str, Json]], default: int) -> int:
        """The first truthy candidate (path, value) as an integer, else the default."""
        for path, value in candidates:
            if value is None:
                continue
            try:
                number = int(value)
            except (TypeError, ValueError, OverflowError):
                self.malformed(event_id, path, value, matters=bool(value))
                continue
            if value:
                return number
        return default

    def attempt(self, event_id: int | None, value: Json) -> int:
        try:
            return int(value)
        except (TypeError, ValueError, OverflowError):
            self.malformed(event_id, "meta.attempt", value)
            return 1

    def total(self, event_id: int | None, collection_size: Json, total: Json) -> Json:
        """The first truthy of the two, raw; it must be readable as an integer all the same."""
        if self._malformed_is_absent:
            collection_size = self._readable(event_id, "meta.collection_size", collection_size)
            total = self._readable(event_id, "meta.total", total)
            return collection_size or total
        chosen = collection_size or total
        return self._readable(event_id, "meta.collection_size" if collection_size else "meta.total", chosen)

    def malformed(self, event_id: int | None, path: str, value: Json, *, matters: bool = True) -> None:
        """Note a value that is no integer. `matters` is false where the strict rules never look at it."""
        self.problem(event_id, path, f"is not an integer: {repr(value)[:80]}", matters=matters)

    def problem(self, event_id: int | None, path: str, problem: str, *, matters: bool = True) -> None:
        if not self._malformed_is_absent:
            if matters:
                raise EventMalformed(
                    f"{path} of event {event_id} {problem}", event_id=event_id or 0, path=path
                )
        elif len(self.warnings) < WARNINGS_MAX:
            self.warnings.append(FoldWarning(event_id or 0, path, problem))
        else:
            self.warnings_left_out += 1

    def _readable(self, event_id: int | None, path: str, value: Json) -> Json:
        if value is None or value.__class__ is int:
            return value
        try:
            int(value)
        except (TypeError, ValueError, OverflowError):
            self.malformed(event_id, path, value)
            return None
        return value
