"""Altering a table that others are writing to.

A statement that waits for a lock makes everybody who comes later wait behind it. So it waits briefly, gives
up, lets the writers through and tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import asyncpg

from noetl_grpc.storage.queries import queries
from noetl_grpc.storage.script import LOCK_TIMEOUT_MS, STATEMENT_TIMEOUT_MS

_POLL_SECONDS: Final = 1.0
#: While somebody's long transaction is in the way a try can hardly succeed: it comes after so many looks.
_LOOKS_PER_TRY: Final = 10
_TRY_AGAIN: Final = (
    asyncpg.LockNotAvailableError,
    asyncpg.QueryCanceledError,
    asyncpg.DeadlockDetectedError,
)


class LockedOut(Exception):
    """Somebody's transaction kept the table locked for as long as we were ready to wait."""


async def with_short_locks(
    conn: asyncpg.Connection,
    sql: str,
    *,
    table: str | None,
    patience_seconds: float,
    say: Callable[[str], None],
) -> None:
    """Run statements in one transaction that never makes writers of `table` wait for long.

    Without a table nothing is in use yet and only the waits for a lock are bounded. It is one message to the
    server: were COMMIT a second one, a client that froze in between would hold the locks.
    """
    limits = f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}"
    if table:
        limits += f"; SET LOCAL statement_timeout = {STATEMENT_TIMEOUT_MS}"
    clock = asyncio.get_running_loop().time
    deadline = clock() + patience_seconds
    while True:
        try:
            await conn.execute(f"{limits};\n{sql}")
        except _TRY_AGAIN as error:
            reason = str(error)
        else:
            return
        for _ in range(_LOOKS_PER_TRY):
            holders = await conn.fetch(queries["old_holders"], table)
            if holders:
                reason = "locked by " + ", ".join(
                    f"process {row['pid']} ({row['application_name']}) for {row['age_seconds']:.0f} s"
                    for row in holders
                )
            if clock() >= deadline:
                raise LockedOut(reason)
            say(f"{table or 'the schema'}: {reason}; trying again")
            await asyncio.sleep(_POLL_SECONDS)
            if not holders:
                break
