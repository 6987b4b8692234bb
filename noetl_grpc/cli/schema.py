"""`migrate`: bring the databases' schema up to date, print it, or compare with it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NoReturn

import asyncpg
import orjson
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
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
        if verify:
            _end(_differences(run_loop(_verify_all(urls))), as_json)
        else:
            _end(_reports(run_loop(_migrate_all(urls))), as_json)
    except DatabaseUnavailable as error:
        typer.echo(f"noetl-grpc: {error}", err=True)
        raise typer.Exit(3) from None


@dataclass(frozen=True, slots=True)
class _Answer:
    """What was found in every database, for machines and for people, and whether it is well."""

    databases: list[dict[str, Any]]
    lines: list[str]
    is_well: bool


def _end(answer: _Answer, as_json: bool) -> NoReturn:
    if as_json:
        document = {"ok": answer.is_well, "databases": answer.databases}
        typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    else:
        for line in answer.lines:
            typer.echo(line)
    raise typer.Exit(0 if answer.is_well else 1)


async def _migrate_all(urls: Sequence[str]) -> list[schema.Report]:
    reports = []
    for url in urls:
        async with _connected(url) as conn:
            reports.append(await schema.migrate(conn, progress=lambda text: typer.echo(text, err=True)))
    return reports


async def _verify_all(urls: Sequence[str]) -> list[list[schema.Drift]]:
    found = []
    for url in urls:
        async with _connected(url) as conn:
            found.append(await schema.verify(conn))
    return found


def _reports(reports: list[schema.Report]) -> _Answer:
    lines = []
    for number, report in enumerate(reports):
        lines.append(f"database {number}: {len(report.applied)} changes applied")
        lines += [f"  {title}" for title in report.applied]
        for missing in report.missing:
            lines.append(f"\n-- {'required' if missing.required else 'optional'}, not done: {missing}")
            if missing.sql is not None:
                lines.append(f"-- let its owner run:\n{missing.sql}")
        lines += [f"\n-- {blocked}" for blocked in report.partitions.blocked]
    databases = [
        {
            "applied": report.applied,
            "missing": [asdict(missing) for missing in report.missing],
            "blocked": [str(blocked) for blocked in report.partitions.blocked],
        }
        for report in reports
    ]
    return _Answer(databases, lines, all(report.is_usable for report in reports))


def _differences(found: list[list[schema.Drift]]) -> _Answer:
    lines = []
    for number, drifts in enumerate(found):
        lines.append(f"database {number}: {f'{len(drifts)} differences' if drifts else 'as expected'}")
        lines += [f"  {'required' if drift.required else 'optional'}: {drift}" for drift in drifts]
    databases = [{"differences": [asdict(drift) for drift in drifts]} for drifts in found]
    return _Answer(databases, lines, not any(found))


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[asyncpg.Connection]:
    with translate_errors():
        conn = await asyncpg.connect(url, timeout=10, server_settings={"timezone": "UTC"})
        try:
            yield conn
        finally:
            await conn.close()
