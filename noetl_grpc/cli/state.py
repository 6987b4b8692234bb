"""How a replayed state and its steps look on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from noetl_grpc.cli import form
from noetl_grpc.cli.remote import Session
from noetl_grpc.client.events import EventEnvelope
from noetl_grpc.client.state import ReplayedState

T = TypeVar("T")

#: Of each kind; a state may have thousands of commands.
SHOWN_MAX = 20
BAR_CHARACTERS = 24


@dataclass(slots=True)
class Step:
    """One node of the playbook as its events tell."""

    name: str
    began: datetime
    ended: datetime
    events: int
    last_type: str
    failures: int

    def word(self, *, is_over: bool) -> str:
        """How it went, as far as its last event tells."""
        last = self.last_type.replace("_", ".").rpartition(".")[2]
        if last in ("failed", "error", "abandoned"):
            return "FAILED"
        if last in ("completed", "exit", "done", "closed", "committed"):
            return "COMPLETED"
        if last == "cancelled":
            return "CANCELLED"
        return "" if is_over else "RUNNING"


def add_to_steps(steps: dict[str, Step], events: Iterable[EventEnvelope]) -> None:
    """Let the steps know of more events, in the order of their ids."""
    for event in events:
        at = event.event_time or event.created_at
        if not event.node_name or at is None:
            continue
        kind = event.event_type or ""
        step = steps.setdefault(event.node_name, Step(event.node_name, at, at, 0, kind, 0))
        step.began, step.ended = min(step.began, at), max(step.ended, at)
        step.events += 1
        step.last_type = kind
        step.failures += "failed" in kind or "error" in kind


def timeline(steps: Iterable[Step], *, is_over: bool, width: int = BAR_CHARACTERS) -> RenderableType:
    """When each step ran, against the whole execution."""
    ordered = sorted(steps, key=lambda step: step.began)
    if not ordered:
        return Text("no steps", style="dim")
    start = ordered[0].began
    whole = max((max(step.ended for step in ordered) - start).total_seconds(), 1e-6)
    table = Table("step", "", "began", "took", "events", "", box=None, pad_edge=False, header_style="dim")
    for step in ordered:
        begins = (step.began - start).total_seconds()
        took = (step.ended - step.began).total_seconds()
        left = min(width - 1, int(begins / whole * width))
        bar = " " * left + "━" * max(1, round(took / whole * (width - left)))
        retried = f" [yellow]{form.count(step.failures, 'failure')}[/yellow]" if step.failures else ""
        table.add_row(
            form.short(step.name, 28),
            form.state(step.word(is_over=is_over)),
            f"+{form.span(begins)}",
            form.span(took),
            f"{step.events:,}{retried}",
            Text(bar[:width], style="cyan"),
        )
    return table


def render_state(state: ReplayedState, steps: Iterable[Step] | None = None) -> RenderableType:
    """All that there is to see of a state."""
    parts: list[RenderableType] = [_heading(state)]
    if steps is not None:
        status = state.execution.status if state.execution else ""
        parts += ["", timeline(steps, is_over=status in ("COMPLETED", "FAILED", "CANCELLED"))]
    parts += [part for surface in (_stages, _loops, _commands, _frames, _objects) for part in surface(state)]
    parts += [
        Text.from_markup(
            f"[yellow]event {one.event_id}, {form.short(one.path)}: {form.short(one.problem, 80)}"
        )
        for one in state.warnings[:SHOWN_MAX]
    ]
    seeded = f", from the snapshot at {state.seed.version}" if state.seed else ""
    parts += ["", Text(f"{state.checksum.algorithm} {state.checksum.value}{seeded}", style="dim")]
    return Group(*parts)


def show_state(session: Session, state: ReplayedState, steps: Iterable[Step] | None = None) -> None:
    """Print it."""
    session.console.print(render_state(state, steps))


def _heading(state: ReplayedState) -> Text:
    status = state.execution.status if state.execution else "UNKNOWN"
    last = f", last {state.last_event_type} ({state.last_event_id})" if state.last_event_id else ""
    at = (
        f" at {form.short(state.execution.last_node_name)}"
        if state.execution and state.execution.last_node_name
        else ""
    )
    cut = "" if state.complete else f"  [yellow]cut short after event {state.next_after_event_id}[/yellow]"
    return Text.from_markup(
        f"[bold]execution {state.execution_id}[/bold]  {form.state(status)}{at}  "
        f"[dim]{form.count(state.event_count, 'event')}{last}[/dim]{cut}"
    )


def _surface(title: str, columns: Iterable[str], rows: Sequence[tuple[str, ...]]) -> list[RenderableType]:
    if not rows:
        return []
    table = Table(*columns, box=None, pad_edge=False, header_style="dim")
    for row in rows[:SHOWN_MAX]:
        table.add_row(*row)
    more: list[RenderableType] = []
    if len(rows) > SHOWN_MAX:
        more = [Text(f"… and {len(rows) - SHOWN_MAX:,} more; --json shows all", style="dim")]
    return ["", Text(title, style="bold"), table, *more]


def _in_order(surface: Mapping[str, T]) -> list[T]:
    """By the ids, of which most grow with time."""
    return [surface[key] for key in sorted(surface, key=lambda key: (len(key), key))]


def _stages(state: ReplayedState) -> list[RenderableType]:
    rows = [
        (
            one.stage_id,
            form.state(one.status),
            form.short(one.step_name, 28),
            f"{one.frame_count:,}",
            f"{one.row_count:,}",
            f"[red]{one.failed_count:,}[/red]" if one.failed_count else "0",
        )
        for one in _in_order(state.stages)
    ]
    return _surface("stages", ("stage", "", "step", "frames", "rows", "failed"), rows)


def _loops(state: ReplayedState) -> list[RenderableType]:
    rows = [
        (
            form.short(one.loop_id, 28),
            form.short(one.step_name, 28),
            f"{one.done:,} of {one.total_json or '?'}",
            f"[red]{one.failed:,} failed[/red]" if one.failed else "",
            "completed" if one.completed else "",
        )
        for one in _in_order(state.loops)
    ]
    return _surface("loops", ("loop", "step", "done", "", ""), rows)


def _commands(state: ReplayedState) -> list[RenderableType]:
    rows = [
        (
            form.short(one.command_id, 28),
            form.state(one.status),
            form.short(one.worker_id or "–", 24),
            form.short(one.frame_id or "–", 20),
        )
        for one in _in_order(state.commands)
    ]
    return _surface("commands", ("command", "", "worker", "frame"), rows)


def _frames(state: ReplayedState) -> list[RenderableType]:
    rows = [
        (
            form.short(one.frame_id, 28),
            form.state(one.status),
            one.stage_id or "–",
            f"{one.row_count:,}",
            f"{one.attempts:,}",
        )
        for one in _in_order(state.frames)
    ]
    return _surface("frames", ("frame", "", "stage", "rows", "attempts"), rows)


def _objects(state: ReplayedState) -> list[RenderableType]:
    rows = [
        (
            form.short(one.object_key, 32),
            form.state(one.status),
            str(one.version),
            form.short(one.attributes_json, 60),
        )
        for one in _in_order(state.business_objects)
    ]
    return _surface("business objects", ("object", "", "version", "attributes"), rows)
