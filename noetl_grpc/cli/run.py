"""`serve` and `dev`: the server in production, and everything at once on one machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import asyncpg
import orjson
import typer
from rich.console import Console

from noetl_grpc import logs
from noetl_grpc.cli.files import write_atomically
from noetl_grpc.cli.loop import run as run_loop
from noetl_grpc.cli.shell import program
from noetl_grpc.client import NoetlClient
from noetl_grpc.settings import DEV_READY_FILE, Settings

if TYPE_CHECKING:
    from noetl_grpc.server import Server
    from noetl_grpc.spans import Spans

app = typer.Typer()


@app.command()
def serve(
    print_address: Annotated[
        bool, typer.Option("--print-address", help="Print host:port on standard output when ready.")
    ] = False,
) -> None:
    """Serve until SIGTERM. Configured by the environment; see docs/configuration.md.

    Example: NOETL_DATABASE_URL=postgresql://noetl@db/noetl NOETL_INTERNAL_API_TOKEN=… noetl-grpc serve
    """
    from noetl_grpc import server  # the other commands need not load it

    settings = Settings.from_env()
    logs.configure(level=settings.log_level, form=settings.log_format)

    def ready(running: Server) -> None:
        if print_address:
            typer.echo(running.address)

    run_loop(server.run(settings, ready=ready))


@app.command()
def dev(
    port: Annotated[int, typer.Option(help="gRPC port; 0 picks a free one.", min=0, max=65535)] = 50051,
    data_dir: Annotated[Path, typer.Option(help="Where PostgreSQL and NATS keep their data.")] = Path(
        ".noetl"
    ),
    ready_file: Annotated[
        Path | None, typer.Option(help="Write address, token and URLs here as JSON when everything is up.")
    ] = None,
    no_workers: Annotated[
        bool, typer.Option("--no-workers", help="Leave out the outbox publisher and the projector.")
    ] = False,
    catalog: Annotated[
        Path | None, typer.Option(help="Load your own catalog entries (YAML files) from this folder.")
    ] = None,
) -> None:
    """Run PostgreSQL, NATS, the server and its workers on this machine. Ctrl-C ends everything.

    Example: noetl-grpc dev --port 0 --ready-file ready.json
    """
    from noetl_grpc.dev.process import LaunchError

    console = Console(stderr=True)
    logs.configure(level="info", form="auto")
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        typer.echo(f"noetl-grpc: --data-dir {data_dir} can't be used: {error.strerror}", err=True)
        raise typer.Exit(2) from None
    try:
        run_loop(_dev(console, port, data_dir, ready_file, catalog, with_workers=not no_workers))
    except LaunchError as error:
        typer.echo(f"noetl-grpc: {error}", err=True)
        raise typer.Exit(1) from None


async def _dev(
    console: Console,
    port: int,
    data_dir: Path,
    ready_file: Path | None,
    catalog: Path | None,
    *,
    with_workers: bool,
) -> None:
    from noetl_grpc import server

    async with _local_stack(console, data_dir, catalog) as local:
        token = os.environ.get("NOETL_INTERNAL_API_TOKEN", "").strip() or _kept_token(data_dir / "token")
        given = Settings.from_env()
        settings = replace(
            given,
            grpc_host="127.0.0.1",
            grpc_port=port,
            metrics_address=("127.0.0.1", 0),
            database_url=local.database_url,
            shard_urls=(),
            cluster_url="",
            direct_urls=(),
            nats_url=local.nats_url,
            api_token=token,
            drain_seconds=0.0,
            # Nothing written before the tailer is up may be missing from a newcomer's stream.
            event_stream=replace(given.event_stream, enabled=True, backfill=True),
        )
        ready_files = (data_dir / DEV_READY_FILE.name, *([ready_file] if ready_file else []))

        def ready(running: Server) -> None:
            for path in ready_files:
                _write_ready_file(path, running, token, local)
            _greet(console, running, token, data_dir)

        @asynccontextmanager
        async def beside(running: Server) -> AsyncIterator[None]:
            if not with_workers:
                yield
                return
            async with (
                NoetlClient(running.address, token=token) as client,
                _workers(client, local.nats_url, running.spans),
            ):
                yield

        try:
            await server.run(settings, ready=ready, beside=beside)
        finally:
            # The folder's own one says that a server runs; it must not outlive it.
            ready_files[0].unlink(missing_ok=True)
        console.print("stopping PostgreSQL and NATS")


@asynccontextmanager
async def _workers(client: NoetlClient, nats_url: str, spans: Spans | None) -> AsyncIterator[None]:
    """Both workers in this process; started again should one fail."""
    from noetl_grpc.server import background
    from noetl_grpc.workers.projector import run_projector
    from noetl_grpc.workers.publisher import publish_outbox, stream_spec

    spec = stream_spec(retention_seconds=86_400, dedup_seconds=600)
    async with (
        background(
            lambda: publish_outbox(client, nats_url=nats_url, spec=spec, spans=spans), name="publish-outbox"
        ),
        background(lambda: run_projector(client, nats_url=nats_url, spans=spans), name="run-projector"),
    ):
        yield


@dataclass(frozen=True, slots=True)
class _Local:
    database_url: str
    nats_url: str


@asynccontextmanager
async def _local_stack(console: Console, data_dir: Path, catalog: Path | None) -> AsyncIterator[_Local]:
    from noetl_grpc.dev.catalog import SAMPLE_CATALOG, load_catalog
    from noetl_grpc.dev.stack import Stack
    from noetl_grpc.storage import migrate

    console.print(f"starting PostgreSQL and NATS, data in {data_dir}")
    async with Stack(data_dir) as stack:
        relocated_to = stack.postgres.relocated_to
        if relocated_to is not None:
            console.print(
                f"PostgreSQL can't read this folder as an unprivileged user; its data is in {relocated_to}"
            )
        url = stack.postgres.url("noetl")
        await _create_database(stack.postgres.url(), "noetl")
        conn = await asyncpg.connect(url)
        try:
            report = await migrate.migrate(conn)
            if report.applied:
                console.print(f"applied {len(report.applied)} schema changes")
            for directory in (SAMPLE_CATALOG, *([catalog] if catalog else [])):
                loaded = await load_catalog(conn, directory)
                if loaded:
                    console.print(f"loaded into the catalog: {', '.join(loaded)}")
        finally:
            await conn.close()
        yield _Local(database_url=url, nats_url=stack.nats.url)


async def _create_database(admin_url: str, name: str) -> None:
    conn = await asyncpg.connect(admin_url)
    try:
        if not await conn.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", name):
            await conn.execute(f'CREATE DATABASE "{name}"')
    finally:
        await conn.close()


def _kept_token(path: Path) -> str:
    """The token of earlier runs on this data, or a new one."""
    if path.exists():
        return path.read_text().strip()
    token = secrets.token_urlsafe(24)
    write_atomically(path, token + "\n")
    return token


def _write_ready_file(path: Path, running: Server, token: str, local: _Local) -> None:
    document = {
        "address": running.address,
        "token": token,
        "database_url": local.database_url,
        "nats_url": local.nats_url,
        "metrics_url": running.metrics_url,
        "pid": os.getpid(),
    }
    write_atomically(path, orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")


def _greet(console: Console, running: Server, token: str, data_dir: Path) -> None:
    # Elsewhere than in the default folder a command must be told where the server is.
    is_found = data_dir.resolve() == DEV_READY_FILE.parent.resolve()
    where = "" if is_found else f" --address {running.address} --token-file {data_dir / 'token'}"
    console.print(f"\n[bold green]ready[/bold green] on [bold]{running.address}[/bold]")
    console.print(f"token    {token}   (kept in {data_dir / 'token'})", highlight=False)
    console.print(f"metrics  {running.metrics_url}", highlight=False)
    console.print("\nTry in another terminal:")
    for line, what in (
        ("demo", "write samples and watch them flow"),
        ("top", "a live screen; q ends it"),
        ("outbox stats", "what waits to be published"),
    ):
        typed = f"  {program()} {line}{where}"
        console.print(f"{typed:<40} # {what}", highlight=False, soft_wrap=True, markup=False)
    console.print("\nCtrl-C ends everything.")
