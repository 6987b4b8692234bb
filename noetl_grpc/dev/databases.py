"""Databases on a server of ours."""

from __future__ import annotations

import asyncpg

from noetl_grpc.dev.postgres import Postgres
from noetl_grpc.storage import migrate


async def create_database(postgres: Postgres, name: str) -> str:
    """A database of that name, made and migrated as needed; its URL."""
    conn = await asyncpg.connect(postgres.url())
    try:
        if not await conn.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", name):
            await conn.execute(f'CREATE DATABASE "{name}"')
    finally:
        await conn.close()
    url = postgres.url(name)
    conn = await asyncpg.connect(url)
    try:
        await migrate.migrate(conn)
    finally:
        await conn.close()
    return url
