"""How things look to people: spans, steps, stories, the screen of `top`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from noetl_grpc.cli import form
from noetl_grpc.cli.gauges import Meter, Reading, render
from noetl_grpc.cli.state import add_to_steps, timeline
from noetl_grpc.cli.story import TELLERS, stories
from noetl_grpc.client.events import EventEnvelope
from noetl_grpc.client.operations import MetricSample, ServerMetrics, TailerMode, TailerShardStatus
from noetl_grpc.client.outbox import OutboxStats
from noetl_grpc.errors import NoetlError, PermissionDenied, Unavailable

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 ms"),
        (0.25, "250 ms"),
        (3, "3.0 s"),
        (59.99, "60.0 s"),
        (61, "1 min 1 s"),
        (3600, "1 h 0 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_spans_read_well(seconds: float, text: str) -> None:
    assert form.span(seconds) == text


def test_markup_in_data_is_not_markup() -> None:
    assert form.short("[red]no[/red]  \n x") == "\\[red]no\\[/red] x"
    assert form.short("a" * 100, 10) == "aaaaaaaaa…"


def test_every_story_can_be_told_for_ever_with_ids_that_only_grow() -> None:
    ids = itertools.count(1)
    told = list(
        itertools.islice(
            stories(lambda: next(ids), catalog_id=7, parent_id=8, now=lambda: NOW), 2 * len(TELLERS)
        )
    )

    assert len({story.execution_id for story in told}) == 2 * len(TELLERS)
    for story in told:
        numbers = [event.event_id for event in story.events]
        assert numbers == sorted(set(numbers))
        assert all(event.execution_id == story.execution_id for event in story.events)
        times = [event.event_time for event in story.events]
        assert times == sorted(times)
        assert times[-1] <= NOW


def _text(renderable: object, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_a_timeline_shows_each_step_against_the_whole() -> None:
    def event(number: int, kind: str, step: str, seconds: float) -> EventEnvelope:
        at = NOW + timedelta(seconds=seconds)
        return EventEnvelope(execution_id=1, event_id=number, event_type=kind, node_name=step, event_time=at)

    steps: dict[str, object] = {}
    add_to_steps(
        steps,  # type: ignore[arg-type]  # an empty dict
        [
            event(1, "step.enter", "load", 0),
            event(2, "command.failed", "load", 1),
            event(3, "command.completed", "load", 2),
            event(4, "step.enter", "save", 2),
        ],
    )

    said = _text(timeline(steps.values(), is_over=False), 100)  # type: ignore[arg-type]

    load, save = said.splitlines()[1:]
    assert "COMPLETED" in load
    assert "1 failure" in load
    assert "RUNNING" in save
    assert "+2.0 s" in save


def _metrics(instance: str, published: float) -> ServerMetrics:
    return ServerMetrics(instance, (MetricSample("noetl_outbox_published_total", {}, published),))


def test_rates_compare_each_process_only_with_itself() -> None:
    meter = Meter()
    meter.note(_metrics("a", 100), 0.0)
    meter.note(_metrics("b", 7000), 0.5)
    assert meter.rate("noetl_outbox_published_total") == 0

    meter.note(_metrics("a", 110), 1.0)
    meter.note(_metrics("b", 7040), 2.5)

    assert meter.rate("noetl_outbox_published_total") == 10 + 20
    assert meter.instances == 2
    meter.note(_metrics("a", 5), 100.0)  # it was started anew, and b is gone
    assert meter.rate("noetl_outbox_published_total") == 0
    assert meter.instances == 1


def _reading(outbox: OutboxStats | NoetlError) -> Reading:
    tailer = TailerShardStatus(0, TailerMode.SNAPSHOT, True, "", 12_345, 61.0, 5, 2, "", NOW)
    return Reading(
        address="127.0.0.1:50051",
        at=NOW,
        info=NoetlError("x", reason="UNIMPLEMENTED"),
        outbox=outbox,
        tailer=(tailer,),
        parked=3,
        metrics=_metrics("a", 1),
        meter=_busy(),
    )


def _busy() -> Meter:
    """Thirty RPCs are called, the last one most often."""
    meter = Meter()
    for seconds in (0, 1):
        labels = [{"grpc_service": "noetlpb.v1.X", "grpc_method": f"Method{n}"} for n in range(30)]
        samples = (
            MetricSample("grpc_server_started_total", label, seconds * n) for n, label in enumerate(labels)
        )
        meter.note(ServerMetrics("a", tuple(samples)), float(seconds))
    return meter


@pytest.mark.parametrize(("columns", "lines", "rpcs"), [(80, 24, 7), (120, 40, 23), (80, 10, 6)])
def test_the_screen_fits_its_terminal_and_shows_what_matters(columns: int, lines: int, rpcs: int) -> None:
    stats = OutboxStats(1_234_567, 2, 3, 4, 5, timedelta(hours=30))

    said = _text(render(_reading(stats), columns, lines), columns)

    assert max(len(line) for line in said.splitlines()) <= columns
    assert len(said.splitlines()) <= max(23, lines - 1)
    assert said.count("X/Method") == rpcs
    assert "X/Method29" in said
    for word in ("1,234,567", "1 d 6 h", "12,345", "1 min 1 s", "snapshot", "here", "ACTIVE"):
        assert word in said


def test_a_part_that_is_not_allowed_does_not_hide_the_others() -> None:
    said = _text(render(_reading(PermissionDenied("no")), 80, 24), 80)

    assert "not allowed" in said
    assert "12,345" in said


def test_a_server_that_is_away_leaves_no_old_numbers_on_the_screen() -> None:
    away = Unavailable("x", reason="UNAVAILABLE")
    reading = replace(_reading(away), info=away, tailer=away, parked=away, metrics=away)

    said = _text(render(reading, 80, 24), 80)

    assert "no answer; trying again" in said
    assert "X/Method" not in said
    assert "ACTIVE" not in said
