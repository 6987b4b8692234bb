"""Work that is finished for callers who are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

FINISH_SECONDS = 5.0


class Chores:
    """Tasks that nobody waits for, kept from being lost; their coroutines answer for their own errors."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, chore: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Begin at once."""
        task = asyncio.create_task(chore)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self) -> None:
        """Wait a little for what was begun."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=FINISH_SECONDS)
