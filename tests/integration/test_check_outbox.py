"""`noetl-grpc check outbox` and `check order`, small; and that their books notice what must not be."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest
from noetlpb.v1 import outbox_pb2 as pb

from noetl_grpc.checks import order, outbox
from noetl_grpc.checks._claimers import TOKEN, Books, Holding, check_table
from noetl_grpc.checks.frame import Verdict, silent
from noetl_grpc.server import Server
from tests.conftest import settings_for


@pytest.fixture
async def addresses(database_url: str, start_server: Callable[[Any], Awaitable[Server]]) -> list[str]:
    """Two servers on one database, with the few attempts of the small plans."""
    plan = outbox.PLANS["small"]
    settings = settings_for(database_url, api_token=TOKEN, outbox_attempts_max=plan.attempts_max)
    return [(await start_server(settings)).address for _ in range(2)]


async def test_every_row_ends_published_or_dead_and_is_never_held_twice(
    database_url: str, addresses: list[str]
) -> None:
    verdict = await outbox.run_on(database_url, addresses, size="small", seed=3, progress=silent)

    assert verdict.violations == []
    assert verdict.figures["published"] + verdict.figures["dead"] == outbox.PLANS["small"].rows
    assert verdict.figures["dead"] >= outbox.PLANS["small"].poison
    assert verdict.figures["failures"] > 10
    assert verdict.figures["released"] > 0


async def test_no_row_overtakes_an_older_one_of_its_execution(
    database_url: str, addresses: list[str]
) -> None:
    verdict = await order.run_on(database_url, addresses, size="small", seed=4, progress=silent)

    assert verdict.violations == []
    assert verdict.figures["given_back_with_a_failure"] > 0


def _holding(*outbox_ids: int, seconds: float = 1.0) -> Holding:
    rows = {outbox_id: pb.OutboxRow(outbox_id=outbox_id) for outbox_id in outbox_ids}
    return Holding("t", time.monotonic() + seconds, rows)


def test_the_books_notice_a_row_that_is_held_twice() -> None:
    books = Books(Verdict("x", 1), 3, frozenset())
    books.claimed(_holding(1, 2, seconds=-1))
    books.claimed(_holding(1, 2))
    assert books.verdict.ok

    books.claimed(_holding(2, 3))

    assert books.verdict.violations == ["row 2 was handed out while another claim held it"]


def test_the_books_notice_a_row_that_overtakes() -> None:
    books = Books(Verdict("x", 1), 3, frozenset())
    books.expect_order({1: 7, 2: 7, 3: 7, 4: 8})
    books.claimed(_holding(1, 2, 4))
    books.published.add(1)
    assert books.verdict.ok

    books.claimed(_holding(3))

    assert books.verdict.violations == ["row 3 was handed out before row 2 of the same execution"]


async def test_the_check_notices_rows_that_are_left(database_url: str, conn: asyncpg.Connection) -> None:
    await conn.execute("INSERT INTO noetl.outbox (event_id, payload) VALUES (1, '{}')")
    books = Books(Verdict("x", 1), 3, frozenset({1}))

    await check_table(database_url, books, outbox.PLANS["small"])

    assert len(books.verdict.violations) == 2
