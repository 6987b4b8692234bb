"""`tailer`: where the way from the log to the broker stands, and how to mend what the broker lost."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from noetl_grpc.cli import form
from noetl_grpc.cli.progress import LOOK_SECONDS, bar, counted
from noetl_grpc.cli.remote import Session, command
from noetl_grpc.cli.words import parse_time
from noetl_grpc.client.operations import TailerMode, TailerShardStatus

app = typer.Typer(help="The way of committed events to the broker.", no_args_is_help=True)

Shards = tuple[TailerShardStatus, ...]


@command(app)
async def status(
    session: Session,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Stay until all is published, with a bar. Exits with 1 if the tailer is off."
        ),
    ] = False,
) -> None:
    """Where the tailer stands, shard by shard.

    Example: noetl-grpc tailer status --watch
    """
    shards = await session.client.operations.tailer_status()
    if watch:
        shards = await _until_level(session, shards)
    if session.as_json:
        (session.line if watch else session.document)(_document(session, shards))
    else:
        _show(session, shards)
    if watch and any(one.mode is TailerMode.DISABLED for one in shards):
        session.no()


async def _until_level(session: Session, shards: Shards) -> Shards:
    """The first status with nothing left to publish; as JSON those before it are lines too."""
    most = 0
    with bar(session.aside) as shown:
        task = shown.add_task("publishing", total=None)
        while any(map(_is_behind, shards)):
            lag = sum(one.lag_events for one in shards)
            # Writers go on meanwhile, so there may come more.
            most = max(most, lag)
            shown.update(task, completed=most - lag, total=most)
            if session.as_json:
                session.line(_document(session, shards))
            await asyncio.sleep(LOOK_SECONDS)
            shards = await session.client.operations.tailer_status()
    return shards


def _is_behind(shard: TailerShardStatus) -> bool:
    # While there is an error the lag may be unknown.
    return shard.mode is not TailerMode.DISABLED and bool(shard.lag_events or shard.last_error)


def _document(session: Session, shards: Shards) -> dict[str, Any]:
    return {"shards": [session.plain(shard) for shard in shards]}


def _show(session: Session, shards: Shards) -> None:
    now = datetime.now(UTC)
    session.table(
        ("shard", "mode", "leader", "lag", "lag time", "in flight", "parked", "published"),
        (
            (
                str(one.shard),
                one.mode.value.lower(),
                "here" if one.leader else "–",
                form.count(one.lag_events, "event"),
                form.span(one.lag_seconds),
                f"{one.in_flight:,}",
                f"[red]{one.parked:,}[/red]" if one.parked else "0",
                form.ago(one.last_published_at, now),
            )
            for one in shards
        ),
    )
    for one in shards:
        if one.last_error:
            session.say(f"[red]shard {one.shard}: {form.short(one.last_error, 200)}[/red]")


@command(app)
async def reconcile(
    session: Session,
    since: Annotated[
        str, typer.Option(help="From this time on, such as 2026-05-01T12:00:00Z; default all that is kept.")
    ] = "",
    until: Annotated[str, typer.Option(help="Up to this time; default now.")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only compare; exits with 1 if something is missing.")
    ] = False,
) -> None:
    """Compare the log with the stream, and publish again what the broker lost.

    Example: noetl-grpc tailer reconcile --dry-run
    """
    work = session.client.operations.reconcile_stream(
        since=parse_time(since, option="--since") if since else None,
        until=parse_time(until, option="--until") if until else None,
        dry_run=dry_run,
    )
    text = "comparing the log with the stream" if dry_run else "comparing, and publishing again"
    found = await counted(session, work, text, counter="noetl_event_stream_republished_total")
    if session.as_json:
        session.document(found)
    else:
        session.say(
            f"{form.count(found.checked, 'event')} compared, {found.missing:,} missing,"
            f" {found.republished:,} published again"
        )
    if found.missing > found.republished:
        session.no()
