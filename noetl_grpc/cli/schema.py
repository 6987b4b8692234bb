"""`migrate`: bring the databases' schema up to date, print it, or compare with it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated

import asyncpg
import typer

from noetl_grpc.cli.loop import run as run_loop
from noetl_grpc.errors import DatabaseUnavailable, SettingsError
from noetl_grpc.settings import Settings
from noetl_grpc.storage import migrate as schema
from noetl_grpc.storage.pool import translate_errors

app = typer.Typer()


@app.command()
def migrate(
    sql: Annotated[bool, typer.Option("--sql", help="Print the DDL for a DBA and change nothing.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="List what is missing or differs; exit 1 if something does.")
    ] = False,
) -> None:
    """Create or complete the schema of every configured database. Only adds; running it again changes nothing.

    Example: NOETL_DATABASE_URL=postgresql://noetl@db/noetl noetl-grpc migrate
    """
    if sql:
        typer.echo(schema.render_sql())
        return
    settings = Settings.from_env()
    urls = list(dict.fromkeys((settings.cluster, *settings.shards)))
    if not settings.shards:
        raise SettingsError("no database is configured; set NOETL_DATABASE_URL")
    try:
        clean = run_loop(_verify_all(urls) if verify else _migrate_all(urls))
    except DatabaseUnavailable as error:
        typer.echo(f"noetl-grpc: {error}", err=True)
        raise typer.Exit(3) from None
    raise typer.Exit(0 if clean else 1)


async def _migrate_all(urls: Sequence[str]) -> bool:
    is_usable = True
    for number, url in enumerate(urls):
        async with _connected(url) as conn:
            report = await schema.migrate(conn, progress=lambda text: typer.echo(text, err=True))
        typer.echo(f"database {number}: {len(report.applied)} changes applied")
        for title in report.applied:
            typer.echo(f"  {title}")
        for missing in report.missing:
            kind = "required" if missing.required else "optional"
            typer.echo(f"\n-- {kind}, not done: {missing}")
            if missing.sql is not None:
                typer.echo(f"-- let its owner run:\n{missing.sql}")
        for blocked in report.partitions.blocked:
            typer.echo(f"\n-- {blocked}")
        is_usable = is_usable and report.is_usable
    return is_usable


async def _verify_all(urls: Sequence[str]) -> bool:
    is_clean = True
    for number, url in enumerate(urls):
        async with _connected(url) as conn:
            drifts = await schema.verify(conn)
        typer.echo(f"database {number}: {f'{len(drifts)} differences' if drifts else 'as expected'}")
        for drift in drifts:
            typer.echo(f"  {'required' if drift.required else 'optional'}: {drift}")
        is_clean = is_clean and not drifts
    return is_clean


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[asyncpg.Connection]:
    with translate_errors():
        conn = await asyncpg.connect(url, timeout=10, server_settings={"timezone": "UTC"})
        try:
            yield conn
        finally:
            await conn.close()
