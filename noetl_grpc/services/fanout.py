"""The same question to every shard at once; a shard that is out of reach is an answer, not a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from noetl_grpc.errors import DatabaseUnavailable, Unavailable
from noetl_grpc.storage.pool import Pool, Shards

T = TypeVar("T")


async def ask_every_shard(
    shards: Shards, ask: Callable[[Pool], Awaitable[T]], *, seconds: float | None = None
) -> list[T | Unavailable]:
    """What each shard answers, in shard order. Without an answer in `seconds` it counts as out of reach."""

    async def one(pool: Pool) -> T | Unavailable:
        try:
            async with asyncio.timeout(seconds):
                return await ask(pool)
        except Unavailable as error:
            return error
        except TimeoutError:
            return DatabaseUnavailable(f"shard {pool.name} does not answer; try again later")

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(pool)) for pool in shards.pools]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def all_or_raise(answers: list[T | Unavailable]) -> list[T]:
    """Every answer; the first shard that is out of reach fails the whole."""
    complete: list[T] = []
    for answer in answers:
        if isinstance(answer, Unavailable):
            raise answer
        complete.append(answer)
    return complete
