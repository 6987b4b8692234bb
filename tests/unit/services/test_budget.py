from __future__ import annotations

import asyncio

import pytest

from noetl_grpc.services.budget import Budget


class Spender:
    """Holds a share until it is told to let go."""

    def __init__(self, budget: Budget, amount: int) -> None:
        self.holds = asyncio.Event()
        self._let_go = asyncio.Event()
        self.task = asyncio.create_task(self._spend(budget, amount))

    async def _spend(self, budget: Budget, amount: int) -> None:
        async with budget.spend(amount):
            self.holds.set()
            await self._let_go.wait()

    async def finish(self) -> None:
        self._let_go.set()
        await self.task


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_shares_are_given_while_they_last_and_in_the_order_of_asking() -> None:
    budget = Budget(10)
    first, large, small = Spender(budget, 6), Spender(budget, 8), Spender(budget, 1)
    await settle()
    assert [spender.holds.is_set() for spender in (first, large, small)] == [True, False, False]

    await first.finish()
    await settle()

    assert [spender.holds.is_set() for spender in (large, small)] == [True, True]
    await large.finish()
    await small.finish()


async def test_more_than_there_is_gets_all_of_it_alone() -> None:
    budget = Budget(10)
    huge, small = Spender(budget, 99), Spender(budget, 1)
    await settle()
    assert [spender.holds.is_set() for spender in (huge, small)] == [True, False]

    await huge.finish()
    await settle()

    assert small.holds.is_set()
    await small.finish()


async def test_whoever_gives_up_waiting_leaves_his_place_to_the_next() -> None:
    budget = Budget(10)
    first, second, third = Spender(budget, 10), Spender(budget, 10), Spender(budget, 5)
    await settle()

    second.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second.task
    await first.finish()
    await settle()

    assert third.holds.is_set()
    await third.finish()


async def test_a_share_handed_to_somebody_who_is_cancelled_is_not_lost() -> None:
    budget = Budget(1)
    first, second, third = Spender(budget, 1), Spender(budget, 1), Spender(budget, 1)
    await settle()

    first.task.cancel()
    second.task.cancel()
    await asyncio.gather(first.task, second.task, return_exceptions=True)
    await settle()

    assert third.holds.is_set()
    await third.finish()
