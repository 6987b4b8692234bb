"""Waiting until somebody waits."""

from __future__ import annotations

import asyncio

import asyncpg


async def waiting_for_lock(conn: asyncpg.Connection) -> None:
    """Return once the server's backend waits for a lock; PostgreSQL tells nobody, so we ask."""
    async with asyncio.timeout(10):
        while not await conn.fetchval(
            """
            SELECT EXISTS (
                SELECT FROM pg_stat_activity
                WHERE datname = current_database() AND application_name = 'noetl_grpc' AND wait_event_type = 'Lock'
            )
            """
        ):
            pass
