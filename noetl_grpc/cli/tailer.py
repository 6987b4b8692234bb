"""`tailer`: where the way from the log to the broker stands, and how to mend what the broker lost."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from noetl_grpc.cli import form
from noetl_grpc.cli.remote import Session, command
from noetl_grpc.cli.words import parse_time

app = typer.Typer(help="The way of committed events to the broker.", no_args_is_help=True)


@command(app)
async def status(session: Session) -> None:
    """Where the tailer stands, shard by shard.

    Example: noetl-grpc tailer status
    """
    shards = await session.client.operations.tailer_status()
    if session.as_json:
        session.document({"shards": [session.plain(shard) for shard in shards]})
        return
    now = datetime.now(UTC)
    session.table(
        ("shard", "mode", "leader", "lag", "behind", "in flight", "parked", "last published", "last error"),
        (
            (
                str(one.shard),
                one.mode.value.lower(),
                "here" if one.leader else "–",
                f"{one.lag_events:,}",
                form.span(one.lag_seconds),
                f"{one.in_flight:,}",
                f"[red]{one.parked:,}[/red]" if one.parked else "0",
                form.ago(one.last_published_at, now),
                form.short(one.last_error, 40),
            )
            for one in shards
        ),
    )


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
    with session.aside.status("comparing the log with the stream"):
        found = await session.client.operations.reconcile_stream(
            since=parse_time(since, option="--since") if since else None,
            until=parse_time(until, option="--until") if until else None,
            dry_run=dry_run,
        )
    if session.as_json:
        session.document(found)
    else:
        session.say(
            f"{form.count(found.checked, 'event')} compared, {found.missing:,} missing,"
            f" {found.republished:,} published again"
        )
    if found.missing > found.republished:
        session.no()
