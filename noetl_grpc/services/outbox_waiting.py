"""Who waits for due rows of a shard, and the one poll that wakes them.

There is no trigger on the table, because it would cost its writers dear. Waiters hold no connection. One is woken at a
time, and wakes the next when it found something, so that a single row does not set two hundred claims off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable

from noetl_grpc.errors import NoetlError

#: Seconds until the next row above an id is due, None when none waits; and the highest id of a waiting row.
Look = Callable[[int], Awaitable[tuple[float | None, int]]]

POLL_SECONDS = 0.01
#: While wake-ups are in vain (due rows whose execution is blocked) the poll slows down to this.
POLL_SECONDS_MAX = 0.05
#: A look at every waiting row that is expensive is made rarely, so that it takes at most this share of the time.
#: In between only rows above the highest one are looked at, which is where new rows come.
POLL_SHARE = 0.05
FAILURE_SECONDS = 0.5


class Waiter:
    """One claim that waits, at one or several shards."""

    def __init__(self, *, ordered: bool) -> None:
        self.ordered = ordered
        self._woken: asyncio.Future[Waiting] = asyncio.get_running_loop().create_future()

    def wake(self, by: Waiting) -> bool:
        """Wake it, unless it is awake already."""
        if self._woken.done():
            return False
        self._woken.set_result(by)
        return True

    @property
    def woken_by(self) -> Waiting | None:
        """The shard that woke it."""
        return self._woken.result() if self._woken.done() and not self._woken.cancelled() else None

    async def wait(self, at: Iterable[Waiting], *, seconds: float) -> None:
        """Until it is woken or the time is over."""
        for waiting in at:
            waiting.enter(self)
        try:
            await asyncio.wait([self._woken], timeout=seconds)
        except asyncio.CancelledError:
            # A wake-up that came in the same moment belongs to somebody else now.
            if self.woken_by is not None:
                self.woken_by.wake_next(ordered=self.ordered)
            raise
        finally:
            for waiting in at:
                waiting.leave(self)


class Waiting:
    """The waiters of one shard."""

    def __init__(self, look: Look) -> None:
        self._look = look
        #: Insertion order is the order of waking; ordered claims wait apart, because due rows may be blocked for them.
        self._waiters: dict[bool, dict[Waiter, None]] = {False: {}, True: {}}
        self._poll: asyncio.Task[None] | None = None
        self._vain = 0

    def enter(self, waiter: Waiter) -> None:
        """Wake it when there may be something for it."""
        self._waiters[waiter.ordered][waiter] = None
        if self._poll is None or self._poll.done():
            self._poll = asyncio.create_task(self._run(), name="outbox poll")

    def leave(self, waiter: Waiter) -> None:
        """It does not wait any more."""
        self._waiters[waiter.ordered].pop(waiter, None)

    def notify(self) -> None:
        """Rows may have become due by our own doing."""
        self._vain = 0
        self._wake_one_of_each()

    def wake_next(self, *, ordered: bool) -> None:
        """There was something, so there may be more."""
        self._vain = 0
        waiters = self._waiters[ordered]
        while waiters:
            waiter = next(iter(waiters))
            del waiters[waiter]
            if waiter.wake(self):
                return

    def _wake_one_of_each(self) -> None:
        vain = self._vain
        for ordered in (False, True):
            self.wake_next(ordered=ordered)
        self._vain = vain

    async def close(self) -> None:
        """End the poll."""
        if self._poll is not None:
            self._poll.cancel()
            await asyncio.wait([self._poll])

    async def _run(self) -> None:
        highest, due_at, full_look_at = 0, float("inf"), 0.0
        while self._waiters[False] or self._waiters[True]:
            began = time.monotonic()
            everywhere = began >= full_look_at
            try:
                seconds, highest = await self._look(0 if everywhere else highest)
            except NoetlError:
                self._wake_all()
                await asyncio.sleep(FAILURE_SECONDS)
                continue
            now = time.monotonic()
            if everywhere:
                due_at, full_look_at = float("inf"), now + (now - began) / POLL_SHARE
            if seconds is not None:
                due_at = min(due_at, now + seconds)
            if due_at <= now:
                self._wake_one_of_each()
                self._vain += 1
            pause = min(POLL_SECONDS * 2 ** min(max(self._vain - 1, 0), 10), POLL_SECONDS_MAX)
            await asyncio.sleep(min(pause, due_at - now) if due_at > now else pause)

    def _wake_all(self) -> None:
        """Whoever waits learns from its own claim what is wrong."""
        for waiters in self._waiters.values():
            for waiter in list(waiters):
                waiter.wake(self)
