"""`demo`: writes realistic executions through the API and shows how they flow to the stream and the read model."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any

import typer
from rich.live import Live

from noetl_grpc.cli import form
from noetl_grpc.cli.remote import Session, command
from noetl_grpc.cli.shell import program
from noetl_grpc.cli.story import TELLERS, Story, stories
from noetl_grpc.client.projection import Waited
from noetl_grpc.client.subscription import Subscription, SubscriptionState
from noetl_grpc.core.snowflake import MACHINE_MAX, Clock, compose

app = typer.Typer()

PATH = "demo/order_events"
#: How long an event may take to the stream and into its snapshot before we say that somebody is missing.
FLOW_SECONDS = 20.0
#: In one call of a load generator.
EXECUTIONS_AT_ONCE = 100


@dataclass(slots=True)
class _Written:
    """What a load generator has done."""

    executions: int = 0
    events: int = 0
    rejected: int = 0


@command(app)
async def demo(
    session: Session,
    rate: Annotated[
        float, typer.Option(help="Go on as a load generator with so many executions per second.", min=0)
    ] = 0.0,
    executions: Annotated[
        int, typer.Option(help="So many executions; 0 is one of each kind, and with --rate no end.", min=0)
    ] = 0,
) -> None:
    """Write sample executions and watch them flow. For a development server; exits with 1 if they get stuck.

    Example: noetl-grpc demo --rate 50
    """
    client = session.client
    subscription = await _live_subscription(session)
    # There is no catalog service to ask, and an event must name an entry: the subscription's own will do.
    telling = stories(
        _ids(),
        catalog_id=subscription.catalog_id,
        parent_id=subscription.subscription_id,
        now=lambda: datetime.now(UTC),
    )
    if rate:
        await _generate(session, telling, rate=rate, executions=executions)
        return
    told = list(islice(telling, executions or len(TELLERS)))
    events = [event for story in told for event in story.events]
    session.aside.print(
        f"writing {len(told)} executions with {len(events)} events, each also as an outbox row"
    )
    stored = await client.projection.project_events(events, enqueue_subject="")
    for bad in stored.rejected:
        session.aside.print(f"[red]refused:[/red] event {bad.event_id}: {bad.reason} {bad.detail}")
    with session.aside.status("waiting for stream, outbox and read model"):
        arrived = await asyncio.gather(
            _until(lambda: _stream_is_level(session)),
            _until(lambda: _outbox_is_empty(session)),
            _snapshots(session, told),
        )
    flow = _Flow(*arrived)
    if session.as_json:
        session.document(_document(told, stored.projected, flow))
    else:
        await _show(session, told, flow)
    if not flow.is_whole:
        session.no()


@dataclass(frozen=True, slots=True)
class _Flow:
    """What arrived where."""

    in_stream: bool
    outbox_empty: bool
    snapshots: list[Waited]

    @property
    def in_read_model(self) -> list[bool]:
        return [waited.included for waited in self.snapshots]

    @property
    def is_whole(self) -> bool:
        return self.in_stream and self.outbox_empty and all(self.in_read_model)


def _document(told: list[Story], stored: int, flow: _Flow) -> dict[str, Any]:
    return {
        "stored": stored,
        "in_stream": flow.in_stream,
        "outbox_empty": flow.outbox_empty,
        "executions": [
            {
                "execution_id": str(story.execution_id),
                "title": story.title,
                "events": len(story.events),
                "in_read_model": included,
            }
            for story, included in zip(told, flow.in_read_model, strict=True)
        ],
    }


async def _show(session: Session, told: list[Story], flow: _Flow) -> None:
    rows = []
    for story, included in zip(told, flow.in_read_model, strict=True):
        status = "UNKNOWN"
        if included:
            state = (await session.client.projection.get(story.execution_id)).state
            status = state.execution.status if state.execution else status
        rows.append((str(story.execution_id), story.title, str(len(story.events)), form.state(status)))
    session.table(("execution", "what it does", "events", "read model"), rows)
    session.say("")
    _say(
        session,
        flow.in_stream,
        "committed events are on the stream noetl_events",
        "the tailer is behind, or off",
    )
    _say(
        session, flow.outbox_empty, "outbox rows are on the stream noetl_outbox", "is publish-outbox running?"
    )
    _say(session, all(flow.in_read_model), "every snapshot has its last event", "is run-projector running?")
    session.say("\nNow try:")
    order = told[min(1, len(told) - 1)]
    middle = order.events[len(order.events) // 2].event_id
    for line in (
        f"replay {order.execution_id}",
        # From nothing: two long ids would not fit on a line of 80 columns.
        f"replay {order.execution_id} --diff 0 {middle}",
        "top",
        "demo --rate 20",
    ):
        session.console.print(f"  {program()} {line}", highlight=False, soft_wrap=True)


def _say(session: Session, is_so: bool, text: str, hint: str) -> None:
    session.say(f"[green]✓[/green] {text}" if is_so else f"[red]✗[/red] not so: {text} ({hint})")


async def _live_subscription(session: Session) -> Subscription:
    found = (await session.client.subscription.register(PATH)).subscription
    if found.state in (SubscriptionState.REGISTERED, SubscriptionState.PAUSED):
        return await session.client.subscription.activate(
            found.subscription_id, actor="demo", reason="the demo needs it"
        )
    return found


def _ids() -> Callable[[], int]:
    machine_id = secrets.randbelow(MACHINE_MAX + 1)
    clock = Clock(0)

    def next_id() -> int:
        nonlocal clock
        clock = clock.next(time.time_ns() // 1_000_000)
        return compose(clock, machine_id=machine_id)

    return next_id


async def _stream_is_level(session: Session) -> bool:
    shards = await session.client.operations.tailer_status()
    return all(shard.lag_events == 0 and shard.mode.value != "DISABLED" for shard in shards)


async def _outbox_is_empty(session: Session) -> bool:
    stats = await session.client.outbox.stats()
    return not (stats.pending or stats.in_flight or stats.expired)


async def _snapshots(session: Session, told: list[Story]) -> list[Waited]:
    return await asyncio.gather(
        *(
            session.client.projection.wait_for_projection(
                story.execution_id, story.events[-1].event_id, wait_seconds=FLOW_SECONDS
            )
            for story in told
        )
    )


async def _until(is_so: Callable[[], Awaitable[bool]]) -> bool:
    """Whether it comes true in time."""
    try:
        async with asyncio.timeout(FLOW_SECONDS):
            while not await is_so():  # noqa: ASYNC110 (another process decides)
                await asyncio.sleep(0.1)
    except TimeoutError:
        return False
    return True


async def _generate(session: Session, telling: Iterator[Story], *, rate: float, executions: int) -> None:
    """Write at the rate that was asked for, or as fast as the server takes it, and say how it goes."""
    written = _Written()
    clock = asyncio.get_running_loop().time
    began = clock()
    try:
        with Live(console=session.aside, refresh_per_second=2, transient=True) as live:
            while not executions or written.executions < executions:
                due = int((clock() - began) * rate) + 1 - written.executions
                if executions:
                    due = min(due, executions - written.executions)
                told = list(islice(telling, max(0, min(due, EXECUTIONS_AT_ONCE))))
                if told:
                    events = [event for story in told for event in story.events]
                    answer = await session.client.projection.project_events(events, enqueue_subject="")
                    written.executions += len(told)
                    written.events += answer.projected
                    written.rejected += len(answer.rejected)
                live.update(_load_line(written, clock() - began))
                await asyncio.sleep(min(0.2, 1 / rate))
    finally:
        # Most end it by Ctrl-C, and want to know too.
        seconds = clock() - began
        if session.as_json:
            session.document({**asdict(written), "seconds": round(seconds, 3)})
        else:
            session.say(_load_line(written, seconds))


def _load_line(written: _Written, seconds: float) -> str:
    refused = f", {written.rejected:,} refused" if written.rejected else ""
    return (
        f"{form.count(written.executions, 'execution')}, {form.count(written.events, 'event')} in {form.span(seconds)}"
        f" ({written.events / max(seconds, 0.001):,.0f} events/s){refused}"
    )
