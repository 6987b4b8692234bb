import asyncio
from typing import Any

import pytest

from noetl_grpc.workers.projector import Progress, Projector


class Forgetful:
    """Fetches as nats-py does on Python 3.11 when a cancellation and the end of the wait come together."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()

    async def fetch(self, batch: int, timeout: float) -> Any:
        self.is_asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise TimeoutError from None


async def test_a_cancellation_that_the_broker_forgets_still_ends_the_projector() -> None:
    subscription: Any = Forgetful()
    nobody: Any = None
    projector = Projector(nobody, progress=Progress())
    task = asyncio.create_task(projector.run_once(subscription))
    await subscription.is_asked.wait()

    task.cancel()

    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await task
