"""`outbox`: how much waits, what is dead, and how it comes back."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from noetl_grpc.cli import form
from noetl_grpc.cli.remote import Session, command, refuse
from noetl_grpc.cli.words import parse_time
from noetl_grpc.client.outbox import DeadOutboxFilter

app = typer.Typer(help="Outgoing messages: what waits, what is dead.", no_args_is_help=True)

_ErrorContains = Annotated[str, typer.Option(help="Only rows whose last error contains this text.")]
_Subject = Annotated[str, typer.Option(help="Only rows with this subject.")]
_Execution = Annotated[int | None, typer.Option(help="Only rows of this execution.", min=1)]
_DeadBefore = Annotated[str, typer.Option(help="Only rows that died before, such as 2026-05-01T12:00:00Z.")]
_Ids = Annotated[list[int] | None, typer.Option("--id", help="Only this row; repeat it for more.", min=1)]
_Shard = Annotated[int | None, typer.Option(help="Only rows of this shard.", min=0, max=9999)]


@command(app)
async def pending(session: Session) -> None:
    """How many rows could be claimed now.

    Example: noetl-grpc outbox pending
    """
    number = await session.client.outbox.count_pending()
    if session.as_json:
        session.document({"pending": number})
        return
    session.say(f"{number:,}")


@command(app)
async def stats(session: Session) -> None:
    """Undelivered rows by situation.

    Example: noetl-grpc outbox stats --json
    """
    found = await session.client.outbox.stats()
    if session.as_json:
        session.document(found)
        return
    age = "" if found.oldest_pending_age is None else f"the oldest for {form.span(found.oldest_pending_age)}"
    session.table(
        ("state", "rows", ""),
        (
            ("pending", f"{found.pending:,}", f"due now {age}".strip()),
            ("delayed", f"{found.delayed:,}", "to be tried later"),
            ("in flight", f"{found.in_flight:,}", "held by a publisher"),
            ("expired", f"{found.expired:,}", "held too long; due again"),
            (
                "dead",
                f"[red]{found.dead:,}[/red]" if found.dead else "0",
                "out of attempts; see `outbox dead`" if found.dead else "",
            ),
        ),
    )


@command(app)
async def dead(
    session: Session,
    error_contains: _ErrorContains = "",
    subject: _Subject = "",
    execution: _Execution = None,
    dead_before: _DeadBefore = "",
    ids: _Ids = None,
    shard: _Shard = None,
    limit: Annotated[int, typer.Option(help="At most this many; 0 is all.", min=0)] = 50,
    payload: Annotated[bool, typer.Option("--payload", help="Also show the bodies.")] = False,
) -> None:
    """List rows that are out of attempts, with their last error.

    Example: noetl-grpc outbox dead --error-contains timeout
    """
    wanted = _filter(error_contains, subject, execution, dead_before, ids, shard)
    found = []
    async for row in session.client.outbox.dead_rows(wanted, include_payload=payload):
        if session.as_json:
            session.line(row)
        found.append(row)
        if limit and len(found) >= limit:
            break
    if session.as_json:
        return
    if not found:
        session.say("no dead rows")
        return
    now = datetime.now(UTC)
    session.table(
        ("outbox_id", "shard", "execution", "subject", "attempts", "dead since", "last error"),
        (
            (
                str(one.row.outbox_id),
                str(one.row.shard),
                str(one.row.execution_id or "–"),
                form.short(one.row.subject or "–", 30),
                str(one.row.attempts),
                form.ago(one.dead_at, now),
                form.short(one.last_error, 50),
            )
            for one in found
        ),
    )
    if payload:
        for one in found:
            session.console.print(
                f"{one.row.outbox_id}: {one.row.payload_json}", markup=False, soft_wrap=True
            )


@command(app)
async def requeue(
    session: Session,
    error_contains: _ErrorContains = "",
    subject: _Subject = "",
    execution: _Execution = None,
    dead_before: _DeadBefore = "",
    ids: _Ids = None,
    shard: _Shard = None,
    all_rows: Annotated[bool, typer.Option("--all", help="Every dead row.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
) -> None:
    """Make dead rows due again, with fresh attempts.

    Example: noetl-grpc outbox requeue --error-contains timeout --dry-run
    """
    wanted = _filter(error_contains, subject, execution, dead_before, ids, shard)
    if wanted == DeadOutboxFilter() and not all_rows:
        refuse("say which rows, such as --error-contains TEXT, or --all")
    number = await session.client.outbox.requeue_dead(wanted, dry_run=dry_run, all=all_rows)
    if session.as_json:
        session.document({"requeued": number, "dry_run": dry_run})
        return
    session.say(f"{form.count(number, 'row')} {'would be' if dry_run else ''} requeued".replace("  ", " "))


def _filter(
    error_contains: str,
    subject: str,
    execution: int | None,
    dead_before: str,
    ids: list[int] | None,
    shard: int | None,
) -> DeadOutboxFilter:
    return DeadOutboxFilter(
        error_contains=error_contains,
        subject=subject,
        execution_id=execution,
        dead_before=parse_time(dead_before, option="--dead-before") if dead_before else None,
        outbox_ids=tuple(ids or ()),
        shard=shard,
    )
