"""A share of something scarce, handed out in the order of asking; whoever asks for too much at once gets all of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Budget:
    """How much may be in use at one time. Nobody is overtaken, so a large share can't starve behind small ones."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._left = total
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @asynccontextmanager
    async def spend(self, amount: int) -> AsyncIterator[None]:
        """Hold a share for the length of the block, as soon as it is there."""
        share = min(amount, self._total)
        await self._take(share)
        try:
            yield
        finally:
            self._left += share
            self._hand_out()

    async def _take(self, share: int) -> None:
        if not self._waiting and share <= self._left:
            self._left -= share
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, share))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                # It was handed out in the same moment.
                self._left += share
            self._hand_out()
            raise

    def _hand_out(self) -> None:
        while self._waiting:
            turn, share = self._waiting[0]
            if not turn.cancelled():
                if share > self._left:
                    return
                self._left -= share
                turn.set_result(None)
            self._waiting.popleft()
