"""`subscription`: register, move, look at and watch subscriptions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated

import typer

from noetl_grpc.cli import form
from noetl_grpc.cli.remote import Session, command
from noetl_grpc.cli.words import parse_id, parse_word
from noetl_grpc.client.subscription import Subscription, SubscriptionState

app = typer.Typer(help="Long-lived subscriptions and their lifecycle.", no_args_is_help=True)

_Which = Annotated[str, typer.Argument(metavar="ID|PATH", help="A subscription's id, or its catalog path.")]
_Etag = Annotated[str, typer.Option(help="Act only if it is still as when this etag was seen.")]
_Reason = Annotated[str, typer.Option(help="Why; kept in its history.")]
_Actor = Annotated[str, typer.Option(help="Who asks; kept in its history.")]
_RequestId = Annotated[
    str, typer.Option(help="An id of your own; repeating the command with it does nothing more.")
]


@command(app)
async def register(
    session: Session, path: Annotated[str, typer.Argument(help="A catalog path of kind Subscription.")]
) -> None:
    """Register a catalog path; one that lives already is shown.

    Example: noetl-grpc subscription register demo/order_events
    """
    found = await session.client.subscription.register(path)
    if session.as_json:
        session.document(found)
        return
    session.say("registered" if found.created else "was registered already")
    _show(session, [found.subscription])


@command(app)
async def activate(
    session: Session,
    which: _Which,
    etag: _Etag = "",
    reason: _Reason = "",
    actor: _Actor = "",
    request_id: _RequestId = "",
) -> None:
    """Let it take messages.

    Example: noetl-grpc subscription activate demo/order_events --reason "go live"
    """
    await _act(session, session.client.subscription.activate, which, etag, reason, actor, request_id)


@command(app)
async def pause(
    session: Session,
    which: _Which,
    etag: _Etag = "",
    reason: _Reason = "",
    actor: _Actor = "",
    request_id: _RequestId = "",
) -> None:
    """Let it hold still and keep its place.

    Example: noetl-grpc subscription pause demo/order_events
    """
    await _act(session, session.client.subscription.pause, which, etag, reason, actor, request_id)


@command(app)
async def resume(
    session: Session,
    which: _Which,
    etag: _Etag = "",
    reason: _Reason = "",
    actor: _Actor = "",
    request_id: _RequestId = "",
) -> None:
    """Let a paused one go on.

    Example: noetl-grpc subscription resume demo/order_events
    """
    await _act(session, session.client.subscription.resume, which, etag, reason, actor, request_id)


@command(app)
async def drain(
    session: Session,
    which: _Which,
    etag: _Etag = "",
    reason: _Reason = "",
    actor: _Actor = "",
    request_id: _RequestId = "",
) -> None:
    """Let it finish what is in flight and then end.

    Example: noetl-grpc subscription drain demo/order_events
    """
    await _act(session, session.client.subscription.drain, which, etag, reason, actor, request_id)


@command(app)
async def deactivate(
    session: Session,
    which: _Which,
    etag: _Etag = "",
    reason: _Reason = "",
    actor: _Actor = "",
    request_id: _RequestId = "",
) -> None:
    """End it now.

    Example: noetl-grpc subscription deactivate demo/order_events
    """
    await _act(session, session.client.subscription.deactivate, which, etag, reason, actor, request_id)


async def _act(
    session: Session,
    action: Callable[..., Awaitable[Subscription]],
    which: str,
    etag: str,
    reason: str,
    actor: str,
    request_id: str,
) -> None:
    subscription_id = await _find(session, which)
    found = await action(subscription_id, etag=etag, reason=reason, actor=actor, request_id=request_id)
    if session.as_json:
        session.document(found)
        return
    _show(session, [found])


@command(app)
async def get(session: Session, which: _Which) -> None:
    """Show one subscription.

    Example: noetl-grpc subscription get demo/order_events
    """
    found = await session.client.subscription.get(await _find(session, which))
    if session.as_json:
        session.document(found)
        return
    _show(session, [found])


@command(app, "list")
async def show_all(
    session: Session,
    states: Annotated[
        list[str] | None, typer.Option("--state", help="Only this state; repeat it for more.")
    ] = None,
    path_prefix: Annotated[str, typer.Option(help="Only paths that begin with this.")] = "",
    limit: Annotated[int, typer.Option(help="At most this many; 0 is all.", min=0)] = 0,
) -> None:
    """List subscriptions.

    Example: noetl-grpc subscription list --state ACTIVE
    """
    unreachable: set[int] = set()
    wanted = [parse_word(SubscriptionState, word, option="--state") for word in states or ()]
    found: list[Subscription] = []
    async for one in session.client.subscription.list(
        states=wanted, path_prefix=path_prefix, unreachable_shards=unreachable
    ):
        if session.as_json:
            session.line(one)
        found.append(one)
        if limit and len(found) >= limit:
            break
    if not session.as_json:
        _show(session, found) if found else session.say("no subscriptions")
    if unreachable:
        named = ", ".join(map(str, sorted(unreachable)))
        session.aside.print(f"[yellow]incomplete: shards {named} did not answer")
        session.no()


@command(app)
async def events(session: Session, which: _Which) -> None:
    """Show the history of one subscription, oldest first.

    Example: noetl-grpc subscription events demo/order_events
    """
    rows = []
    async for event in session.client.subscription.events(await _find(session, which)):
        if session.as_json:
            session.line(event)
            continue
        rows.append(
            (
                form.moment(event.created_at),
                form.state(event.state.value),
                str(event.event_id),
                form.short(event.actor, 20),
                form.short(event.reason, 40),
            )
        )
    if not session.as_json:
        session.table(("when", "state", "event", "actor", "reason"), rows)


@command(app)
async def watch(
    session: Session,
    which: Annotated[
        str, typer.Argument(metavar="[ID|PREFIX]", help="An id, or the beginning of paths; default all.")
    ] = "",
) -> None:
    """Show every subscription as it is, and then each change as it happens. Ctrl-C ends it.

    Example: noetl-grpc subscription watch demo/
    """
    subscription_id = parse_id(which)
    path_prefix = which if which and subscription_id is None else None
    async for change in session.client.subscription.watch(
        subscription_id=subscription_id, path_prefix=path_prefix
    ):
        if session.as_json:
            session.line(change)
            continue
        one = change.subscription
        session.say(
            f"[dim]{form.moment(one.updated_at)}[/dim]  {form.state(one.state.value)}  {form.short(one.path)}"
            f"  [dim]{one.subscription_id}{'' if change.initial else '  changed'}[/dim]"
        )


async def _find(session: Session, which: str) -> int:
    subscription_id = parse_id(which)
    if subscription_id is not None:
        return subscription_id
    return (await session.client.subscription.find(which)).subscription_id


def _show(session: Session, found: list[Subscription]) -> None:
    now = datetime.now(UTC)
    session.table(
        ("subscription", "path", "state", "since", "runtime"),
        (
            (
                str(one.subscription_id),
                form.short(one.path, 40),
                form.state(one.state.value),
                form.ago(one.updated_at, now),
                _runtime(one, now),
            )
            for one in found
        ),
    )


def _runtime(subscription: Subscription, now: datetime) -> str:
    runtime = subscription.runtime
    if runtime is None:
        return "[dim]none reported[/dim]"
    work = [
        f"{number:,} {word}"
        for number, word in ((runtime.in_flight, "in flight"), (runtime.backlog, "waiting"))
        if number is not None
    ]
    said = ", ".join((form.short(runtime.runtime_id, 20), *work))
    if runtime.alive:
        return f"[green]alive[/green] {said}"
    return f"[red]lost {form.ago(runtime.lease_expires_at, now)}[/red] {said}"
