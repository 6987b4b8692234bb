"""How many calls may run at a time. What is too much is refused at once, so that what was let in gets done.

A call counts from its headers to its end, also while its caller takes its time to send the message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from noetl_grpc.errors import Overloaded

#: Public calls have room of their own: probes answer while everything else is full, and nobody without a token
#: takes room from those who have one.
PUBLIC_CALLS_MAX = 1000


class Lane:
    """Room for a number of calls."""

    def __init__(self, what: str, limit: int) -> None:
        self._what = what
        self._limit = limit
        self._count = 0

    def enter(self) -> None:
        """Count the running task's call in until the task ends; refuses one too many."""
        if self._count >= self._limit:
            raise Overloaded(
                f"{self._limit} {self._what} are being served, which is the limit; try again later",
                metadata={"limit": self._limit},
            )
        task = asyncio.current_task()
        assert task is not None
        self._count += 1
        task.add_done_callback(self._leave)

    def _leave(self, task: asyncio.Task[Any]) -> None:
        self._count -= 1


class Lanes:
    """Which room a method's calls take."""

    def __init__(self, *, calls_max: int, streams_max: int, streams: Collection[str]) -> None:
        self.public = Lane("public calls", PUBLIC_CALLS_MAX)
        self._calls = Lane("calls", calls_max)
        self._streams = Lane("streams", streams_max)
        self._stream_methods = frozenset(streams)

    def of(self, method: str) -> Lane:
        """Streams live long, so they are counted apart: they must not leave calls without room, nor the reverse."""
        return self._streams if method in self._stream_methods else self._calls
