"""`replay`: the state of an execution at any point of its history, what changed, and why."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, TypedDict

import typer
from rich.live import Live

from noetl_grpc.cli import form
from noetl_grpc.cli.remote import Session, command, refuse
from noetl_grpc.cli.state import Step, add_to_steps, render_state, show_state
from noetl_grpc.cli.words import parse_id, parse_time, parse_word
from noetl_grpc.client.replay import EVERYTHING, Cutoff
from noetl_grpc.client.state import FoldRules, ReplayedState, ReplayProjection

app = typer.Typer()


@command(app)
async def replay(
    session: Session,
    execution_id: Annotated[int, typer.Argument(metavar="ID", help="The execution.", min=1)],
    as_of: Annotated[
        str, typer.Option(help="Up to this event id or time, inclusive; default everything.")
    ] = "",
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="What changed between two event ids or times."),
    ] = None,
    explain: Annotated[
        str, typer.Option(metavar="POINTER", help="Which events set this value, such as /execution/status.")
    ] = "",
    watch: Annotated[bool, typer.Option("--watch", help="Stay, and show each change as it happens.")] = False,
    projection: Annotated[
        str,
        typer.Option(help="Only one surface: execution, stage, frame, command, business_object or loop."),
    ] = "all",
    rules: Annotated[str, typer.Option(help="union, or python_4_26 for NoETL's own strict rules.")] = "union",
    limit: Annotated[int, typer.Option(help="Fold at most this many events; 0 is all.", min=0)] = 0,
    no_snapshot: Annotated[bool, typer.Option("--no-snapshot", help="Fold from the first event.")] = False,
    canonical: Annotated[
        bool, typer.Option("--canonical", help="Print the exact text whose SHA-256 is the checksum.")
    ] = False,
    tenant: Annotated[str, typer.Option(help="The tenant; default `default`.")] = "",
    organization: Annotated[str, typer.Option(help="The organization; default `default`.")] = "",
) -> None:
    """Show the state of an execution, with a timeline of its steps. Exits with 1 if it has no events.

    Examples: noetl-grpc replay 4242, replay 4242 --as-of 99, replay 4242 --diff 10 99, replay 4242 --watch
    """
    if sum((diff is not None, bool(explain), watch, canonical)) > 1:
        refuse("--diff, --explain, --watch and --canonical exclude each other")
    if watch and as_of:
        refuse("--watch goes on for ever; it can't end --as-of something")
    view = _Replay(
        session,
        execution_id,
        as_of=_cutoff(as_of, "--as-of") if as_of else EVERYTHING,
        projection=parse_word(ReplayProjection, projection, option="--projection"),
        rules=parse_word(FoldRules, rules, option="--rules"),
        limit=limit,
        use_snapshot=not no_snapshot,
        tenant_id=tenant,
        organization_id=organization,
    )
    if diff is not None:
        await view.diff(_cutoff(diff[0], "--diff"), _cutoff(diff[1], "--diff"))
    elif explain:
        await view.explain(explain)
    elif watch:
        await view.watch()
    else:
        await view.state(canonical=canonical)


class _Tenant(TypedDict):
    tenant_id: str
    organization_id: str


class _Replay:
    """One execution and how it is to be folded."""

    def __init__(
        self,
        session: Session,
        execution_id: int,
        *,
        as_of: Cutoff,
        projection: ReplayProjection,
        rules: FoldRules,
        limit: int,
        use_snapshot: bool,
        tenant_id: str,
        organization_id: str,
    ) -> None:
        self._session = session
        self._replay = session.client.replay
        self._execution_id = execution_id
        self._as_of = as_of
        self._projection = projection
        self._rules = rules
        self._limit = limit
        self._use_snapshot = use_snapshot
        self._tenant = _Tenant(tenant_id=tenant_id, organization_id=organization_id)

    async def _folded(self, *, canonical: bool = False) -> ReplayedState:
        return await self._replay.state(
            self._execution_id,
            as_of=self._as_of,
            projection=self._projection,
            rules=self._rules,
            limit=self._limit,
            use_snapshot=self._use_snapshot,
            include_canonical_json=canonical,
            **self._tenant,
        )

    async def state(self, *, canonical: bool) -> None:
        state = await self._folded(canonical=canonical)
        if canonical:
            typer.echo(state.canonical_json, nl=False)
        elif self._session.as_json:
            self._session.document(state)
        elif not state.event_count:
            self._session.say(f"execution {self._execution_id} has no events here")
        else:
            steps: dict[str, Step] = {}
            async for event in self._replay.events(self._execution_id, as_of=self._as_of, **self._tenant):
                add_to_steps(steps, [event])
            show_state(self._session, state, steps.values())
        if not state.event_count:
            self._session.no()

    async def diff(self, before: Cutoff, after: Cutoff) -> None:
        found = await self._replay.diff(
            self._execution_id, before=before, after=after, rules=self._rules, **self._tenant
        )
        if self._session.as_json:
            self._session.document(found)
            return
        if not found.changes:
            self._session.say("nothing changed")
            return
        width = max(20, self._session.console.width - 6)
        for change in found.changes:
            self._session.say(
                f"[bold]{form.short(change.path, 100)}[/bold]  [dim]event {change.event_id}[/dim]"
            )
            if change.before_json is not None:
                self._session.say(f"  [red]- {form.short(change.before_json, width)}[/red]")
            if change.after_json is not None:
                self._session.say(f"  [green]+ {form.short(change.after_json, width)}[/green]")

    async def explain(self, pointer: str) -> None:
        causes = await self._replay.explain(
            self._execution_id, pointer, as_of=self._as_of, rules=self._rules, **self._tenant
        )
        if self._session.as_json:
            self._session.document({"causes": self._session.plain(causes)})
            return
        if not causes:
            self._session.say(f"{form.short(pointer)} never had a value")
            self._session.no()
        self._session.table(
            ("when", "event", "type", "value"),
            (
                (
                    form.moment(one.event_time),
                    str(one.event_id),
                    form.short(one.event_type, 32),
                    form.short(one.value_json, 60) if one.value_json else "[dim]removed[/dim]",
                )
                for one in causes
            ),
        )

    async def watch(self) -> None:
        """Each batch of new events, folded anew; as JSON one state per line."""
        steps: dict[str, Step] = {}
        if self._session.as_json:
            async for state in self._states(steps):
                self._session.line(state)
        elif self._session.console.is_terminal:
            with Live(console=self._session.console, auto_refresh=False) as live:
                async for state in self._states(steps):
                    live.update(render_state(state, steps.values()), refresh=True)
        else:
            async for state in self._states(steps):
                show_state(self._session, state, steps.values())

    async def _states(self, steps: dict[str, Step]) -> AsyncIterator[ReplayedState]:
        """The present, then one state for each change; the pages of a long history are not folded one by one."""
        has_news = True
        async for batch in self._replay.batches(self._execution_id, follow=True, **self._tenant):
            add_to_steps(steps, batch.events)
            has_news = has_news or bool(batch.events)
            if batch.caught_up and has_news:
                has_news = False
                yield await self._folded()


def _cutoff(text: str, option: str) -> Cutoff:
    event_id = parse_id(text)
    if event_id is not None:
        return Cutoff(event_id=event_id)
    return Cutoff(time=parse_time(text, option=option))
