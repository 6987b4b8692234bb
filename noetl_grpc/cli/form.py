"""How values read for people: times, spans, states, counts. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from rich.markup import escape

_STATE_COLOURS = {
    "ACTIVE": "green",
    "COMPLETED": "green",
    "CLOSED": "green",
    "SAME": "green",
    "REGISTERED": "cyan",
    "RUNNING": "cyan",
    "CLAIMED": "cyan",
    "OPEN": "cyan",
    "PENDING": "cyan",
    "PAUSED": "yellow",
    "DRAINING": "yellow",
    "STALE": "yellow",
    "MISSING": "yellow",
    "CANCELLED": "yellow",
    "FAILED": "red",
    "DIFFERENT": "red",
    "ABANDONED": "red",
    "DEACTIVATED": "dim",
    "DELETED": "dim",
    "UNKNOWN": "dim",
}


def state(word: str) -> str:
    """A state in its colour."""
    colour = _STATE_COLOURS.get(word)
    return f"[{colour}]{escape(word)}[/{colour}]" if colour else escape(word)


def moment(at: datetime | None) -> str:
    """An instant, to the second, in UTC."""
    return "" if at is None else at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def ago(at: datetime | None, now: datetime) -> str:
    """How long ago something was."""
    return "never" if at is None else f"{span((now - at).total_seconds())} ago"


def span(seconds: float | timedelta) -> str:
    """A span of time in its two largest units."""
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def count(number: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short(text: str | None, characters: int = 60) -> str:
    """A text on one line and not longer than that, safe to print."""
    flat = " ".join((text or "").split())
    return escape(flat if len(flat) <= characters else flat[: characters - 1] + "…")
