"""Ids under a leased machine id, on a real database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from noetl_grpc.core import snowflake
from noetl_grpc.errors import DatabaseUnavailable, Overloaded
from noetl_grpc.storage.ids import AHEAD_MS, LEASE_SECONDS, IdSource
from noetl_grpc.storage.pool import Pool, create_pool

NOW = 1_790_000_000.0


class Hands:
    """A clock and a monotonic clock that the test turns."""

    def __init__(self) -> None:
        self.wall = NOW
        self.monotonic = 100.0

    def source(self, pool: Pool, *, machine_id: int | None = None) -> IdSource:
        return IdSource(
            pool, machine_id=machine_id, clock=lambda: self.wall, monotonic=lambda: self.monotonic
        )


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    opened = await create_pool(database_url, name="0")
    yield opened
    await opened.close()


@pytest.fixture
def hands() -> Hands:
    return Hands()


async def test_processes_side_by_side_get_different_machine_ids(pool: Pool) -> None:
    sources = [IdSource(pool) for _ in range(20)]

    await asyncio.gather(*(source.open() for source in sources))

    assert sorted(source.machine_id for source in sources) == list(range(20))
    assert len({source.next_id() for source in sources for _ in range(100)}) == 2000


async def test_a_machine_id_that_was_given_back_is_used_again_without_repeating_an_id(
    pool: Pool, hands: Hands
) -> None:
    first = hands.source(pool)
    await first.open()
    made = [first.next_id() for _ in range(5000)]
    await first.close()

    hands.wall -= 3600  # a backward clock
    second = hands.source(pool)
    await second.open()

    assert second.machine_id == first.machine_id
    assert second.next_id() > max(made)


async def test_after_a_crash_a_backward_clock_repeats_no_id(pool: Pool, hands: Hands) -> None:
    crashed = hands.source(pool, machine_id=7)
    await crashed.open()
    made = [crashed.next_id() for _ in range(100)]

    hands.wall -= 10
    restarted = hands.source(pool, machine_id=7)
    await restarted.open()

    assert restarted.next_id() > max(made)


async def test_minting_stops_when_the_lease_was_not_renewed(pool: Pool, hands: Hands) -> None:
    source = hands.source(pool)
    await source.open()
    source.next_id()

    hands.monotonic += LEASE_SECONDS
    with pytest.raises(DatabaseUnavailable):
        source.next_id()

    await source.renew()
    source.next_id()


async def test_a_burst_borrows_from_the_future_and_never_past_what_was_written_ahead(
    pool: Pool, hands: Hands
) -> None:
    source = hands.source(pool)
    await source.open()

    made = [source.next_id() for _ in range(10_000)]
    # Most of the sixty million ids are skipped; the bound is what matters.
    source._place = snowflake.Clock(ms=int(NOW * 1000) + AHEAD_MS, sequence=snowflake.SEQUENCE_MAX - 3)
    made += [source.next_id() for _ in range(3)]
    with pytest.raises(Overloaded):
        source.next_id()

    assert snowflake.time_of(made[-1]).timestamp() <= NOW + AHEAD_MS / 1000
    assert made == sorted(set(made))


async def test_a_configured_machine_id_is_taken_over_and_its_old_holder_stops(
    pool: Pool, hands: Hands
) -> None:
    old, new = hands.source(pool, machine_id=3), hands.source(pool, machine_id=3)
    await old.open()
    made = {old.next_id() for _ in range(50)}

    await new.open()
    made_by_both = {old.next_id() for _ in range(50)} | {new.next_id() for _ in range(50)} | made
    await old.renew()

    assert len(made_by_both) == 150
    with pytest.raises(DatabaseUnavailable):
        old.next_id()
    new.next_id()


async def test_a_lost_lease_is_replaced_by_another(pool: Pool, hands: Hands) -> None:
    source = hands.source(pool)
    await source.open()
    async with pool.acquire() as conn:
        await conn.execute("UPDATE noetl.machine_lease SET holder = 'somebody else'")

    await source.renew()

    assert source.machine_id == 1
    source.next_id()
