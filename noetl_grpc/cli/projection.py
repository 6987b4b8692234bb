"""`projection`: the read model, its upkeep, and events that could not be stored."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Annotated

import typer

from noetl_grpc.cli import form
from noetl_grpc.cli.progress import bar, counted
from noetl_grpc.cli.remote import Session, command, refuse
from noetl_grpc.cli.state import show_state
from noetl_grpc.cli.words import parse_id
from noetl_grpc.client.projection import (
    AdvancedProjection,
    EventKey,
    FailedAdvance,
    ProjectionCheck,
    ProjectionVerification,
    Purged,
    PurgePolicy,
)

app = typer.Typer(help="Snapshots of executions, their upkeep, and parked events.", no_args_is_help=True)

_Ids = Annotated[list[int], typer.Argument(help="Executions.", min=1)]
_SomeIds = Annotated[list[int] | None, typer.Argument(help="Executions; default all.", min=1)]
_Id = Annotated[int, typer.Argument(help="An execution.", min=1)]
_Tenant = Annotated[str, typer.Option(help="The tenant; default `default`.")]
_Organization = Annotated[str, typer.Option(help="The organization; default `default`.")]

ADVANCE_AT_ONCE = 100


@command(app)
async def advance(
    session: Session, execution_ids: _Ids, tenant: _Tenant = "", organization: _Organization = ""
) -> None:
    """Fold the new events of executions into their snapshots. Exits with 1 if one could not be.

    Example: noetl-grpc projection advance 4242
    """
    advanced: list[AdvancedProjection] = []
    failed: list[FailedAdvance] = []
    with bar(session.aside) as shown:
        task = shown.add_task("folding", total=len(execution_ids))
        for start in range(0, len(execution_ids), ADVANCE_AT_ONCE):
            part = execution_ids[start : start + ADVANCE_AT_ONCE]
            answer = await session.client.projection.advance(
                part, tenant_id=tenant, organization_id=organization
            )
            advanced += answer.advanced
            failed += answer.failed
            shown.advance(task, len(part))
    if session.as_json:
        session.document({"advanced": session.plain(tuple(advanced)), "failed": session.plain(tuple(failed))})
    else:
        rows = [
            (
                str(one.execution_id),
                f"{one.events:,}",
                str(one.version),
                "yes" if one.changed else "was so already",
            )
            for one in advanced
        ]
        if rows:
            session.table(("execution", "events", "version", "changed"), rows)
        for bad in failed:
            session.say(f"[red]{bad.execution_id}: {bad.reason}[/red] {form.short(bad.detail, 100)}")
    if failed:
        session.no()


@command(app)
async def get(
    session: Session, execution_id: _Id, tenant: _Tenant = "", organization: _Organization = ""
) -> None:
    """Show the saved snapshot of an execution.

    Example: noetl-grpc projection get 4242 --json
    """
    found = await session.client.projection.get(execution_id, tenant_id=tenant, organization_id=organization)
    if session.as_json:
        session.document(found)
        return
    age = form.ago(found.updated_at, datetime.now(UTC))
    session.say(f"[dim]saved {age}, {form.count(found.event_count, 'event')}, up to {found.version}[/dim]")
    show_state(session, found.state)


@command(app)
async def wait(
    session: Session,
    execution_id: _Id,
    event_id: Annotated[int, typer.Argument(help="The event to wait for.", min=1)],
    seconds: Annotated[
        float, typer.Option("--timeout", help="How long to wait, in seconds.", min=0.001)
    ] = 30.0,
    tenant: _Tenant = "",
    organization: _Organization = "",
) -> None:
    """Wait until the snapshot of an execution includes an event. Exits with 1 if it does not in time.

    Example: noetl-grpc projection wait 4242 99 --timeout 5
    """
    with session.aside.status("waiting"):
        found = await session.client.projection.wait_for_projection(
            execution_id, event_id, wait_seconds=seconds, tenant_id=tenant, organization_id=organization
        )
    if session.as_json:
        session.document(found)
    else:
        session.say("included" if found.included else f"not included; the snapshot is at {found.version}")
    if not found.included:
        session.no()


@command(app)
async def verify(
    session: Session,
    execution_ids: _SomeIds = None,
    repair: Annotated[bool, typer.Option("--repair", help="Rewrite what is not the same.")] = False,
    tenant: _Tenant = "",
    organization: _Organization = "",
) -> None:
    """Fold executions from the log and compare with their snapshots. Exits with 1 if one is wrong and stays so.

    Example: noetl-grpc projection verify --repair
    """
    outcomes: Counter[str] = Counter()
    wrong: list[ProjectionVerification] = []
    with bar(session.aside) as shown:
        task = shown.add_task("folding and comparing", total=None)
        async for one in session.client.projection.verify(
            execution_ids or (),
            repair=repair,
            tenant_id=tenant,
            organization_id=organization,
            # Counting them costs the server something, so only where somebody looks.
            on_total=None if shown.disable else lambda total: shown.update(task, total=total),
        ):
            shown.advance(task)
            outcomes[one.outcome.value] += 1
            if one.outcome is not ProjectionCheck.SAME:
                wrong.append(one)
            if session.as_json:
                session.line(one)
    if not session.as_json:
        if wrong:
            session.table(
                ("execution", "found", "snapshot", "log", ""),
                (
                    (
                        str(one.execution_id),
                        form.state(one.outcome.value),
                        one.stored_checksum[:12],
                        one.log_checksum[:12],
                        "[green]repaired[/green]" if one.repaired else "",
                    )
                    for one in wrong
                ),
            )
        said = ", ".join(f"{number:,} {word.lower()}" for word, number in sorted(outcomes.items()))
        session.say(f"{form.count(outcomes.total(), 'execution')} compared{': ' + said if said else ''}")
    if any(not one.repaired for one in wrong):
        session.no()


@command(app)
async def purge(
    session: Session,
    commands_days: Annotated[
        int | None, typer.Option(help="Finished commands older than this; 0 keeps them. Default 7.")
    ] = None,
    runtime_minutes: Annotated[
        int | None, typer.Option(help="Runtimes silent for longer than this; 0 keeps them. Default 60.")
    ] = None,
    events_days: Annotated[
        int | None, typer.Option(help="Partitions whose events are all older than this. Default: kept.")
    ] = None,
    outbox_days: Annotated[
        int | None, typer.Option(help="Published outbox rows older than this. Default: kept.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count and name.")] = False,
) -> None:
    """Delete what is old.

    Example: noetl-grpc projection purge --events-days 90 --outbox-days 7 --dry-run
    """
    policy = PurgePolicy(
        command_retention_days=commands_days,
        runtime_stale_minutes=runtime_minutes,
        event_retention_days=events_days,
        outbox_retention_days=outbox_days,
    )
    found = await _purge(session, policy, dry_run=dry_run)
    if session.as_json:
        session.document(found)
        return
    session.table(
        ("what", "would go" if dry_run else "deleted"),
        (
            ("commands", f"{found.commands_purged:,}"),
            ("runtimes", f"{found.runtime_purged:,}"),
            ("outbox rows", f"{found.outbox_purged:,}"),
            ("event partitions", f"{found.events_purged:,}"),
        ),
    )
    for name in found.event_partitions_dropped:
        session.say(f"  {name}")
    if found.partitions_kept:
        session.table(
            ("kept", "because", ""),
            ((kept.partition, kept.reason, form.short(kept.detail, 60)) for kept in found.partitions_kept),
        )


async def _purge(session: Session, policy: PurgePolicy, *, dry_run: bool) -> Purged:
    purge = session.client.projection.purge
    total = None
    if dry_run or session.aside.is_terminal:
        with session.aside.status("looking for what is old"):
            found = await purge(policy, dry_run=True)
        if dry_run:
            return found
        total = found.commands_purged + found.runtime_purged + found.outbox_purged + found.events_purged
    return await counted(
        session, purge(policy), "deleting what is old", counter="noetl_cleanup_rows_purged_total", total=total
    )


@command(app)
async def dead(
    session: Session,
    limit: Annotated[int, typer.Option(help="At most this many; 0 is all.", min=0)] = 50,
    payload: Annotated[
        bool, typer.Option("--payload", help="Also show the events; they may hold secrets.")
    ] = False,
) -> None:
    """List events that could not be stored or published.

    Example: noetl-grpc projection dead --json
    """
    found = []
    async for event in session.client.projection.dead_events(include_payload=payload):
        if session.as_json:
            session.line(event)
        found.append(event)
        if limit and len(found) >= limit:
            break
    if session.as_json:
        return
    if not found:
        session.say("no parked events")
        return
    now = datetime.now(UTC)
    session.table(
        ("execution", "event", "type", "reason", "tried", "parked", "by", "last error"),
        (
            (
                str(one.execution_id),
                str(one.event_id),
                form.short(one.event_type, 24),
                one.reason,
                str(one.attempts),
                form.ago(one.parked_at, now),
                form.short(one.parked_by, 12),
                form.short(one.last_error, 40),
            )
            for one in found
        ),
    )
    if payload:
        for one in found:
            session.console.print(f"{one.event_id}: {one.payload_json}", markup=False, soft_wrap=True)


@command(app)
async def retry(
    session: Session,
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="[EXECUTION/EVENT]...", help="Events, such as 4242/99.")
    ] = None,
    all_events: Annotated[bool, typer.Option("--all", help="Every parked event.")] = False,
) -> None:
    """Try to store parked events again. Exits with 1 if one stays parked.

    Example: noetl-grpc projection retry --all
    """
    if bool(keys) == all_events:
        refuse("say which events, such as 4242/99, or --all")
    with session.aside.status("storing"):
        found = await session.client.projection.retry_dead(
            [_key(text) for text in keys or ()], all=all_events
        )
    if session.as_json:
        session.document(found)
    else:
        session.say(
            f"{found.stored:,} stored, {found.duplicates:,} were stored already, {len(found.failed):,} stay parked"
        )
        for bad in found.failed:
            session.say(
                f"[red]{bad.execution_id}/{bad.event_id}: {bad.reason}[/red] {form.short(bad.detail, 100)}"
            )
    if found.failed:
        session.no()


def _key(text: str) -> EventKey:
    execution_id, event_id = map(parse_id, text.partition("/")[::2])
    if execution_id is None or event_id is None:
        refuse(f"{text!r} is not EXECUTION/EVENT, such as 4242/99")
    return EventKey(execution_id, event_id)
