"""What `top` shows: readings of a server, the rates between them, and the screen they make."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from noetl_grpc.cli import form
from noetl_grpc.client.mapping import to_document
from noetl_grpc.client.operations import ServerInfo, ServerMetrics, TailerShardStatus
from noetl_grpc.client.outbox import OutboxStats
from noetl_grpc.errors import NoetlError, PermissionDenied

Labels = frozenset[tuple[str, str]]
Key = tuple[str, Labels]

#: A row each on the screen; the busiest ones, and more of them on a higher one.
RPCS_SHOWN_MIN = 6
#: What stands above them, with a tailer of one shard, and the last line, which stays empty.
LINES_ABOVE = 17
#: An instance that has not answered for so long no longer counts.
FORGET_SECONDS = 30.0

_STATES = ("REGISTERED", "ACTIVE", "PAUSED", "DRAINING", "DEACTIVATED")


@dataclass(slots=True)
class _Instance:
    """The last two answers of one process."""

    seconds: float = 0.0
    values: dict[Key, float] = field(default_factory=dict)
    rates: dict[Key, float] = field(default_factory=dict)


class Meter:
    """Counters of several processes, each only ever compared with itself."""

    def __init__(self) -> None:
        self._instances: dict[str, _Instance] = {}

    def note(self, metrics: ServerMetrics, seconds: float) -> None:
        """Take in one process's numbers at a moment."""
        values = {(one.name, frozenset(one.labels.items())): one.value for one in metrics.samples}
        known = self._instances.get(metrics.instance)
        instance = _Instance(seconds, values)
        if known is not None and seconds > known.seconds:
            span = seconds - known.seconds
            instance.rates = {
                key: max(0.0, value - known.values.get(key, 0.0)) / span
                for key, value in values.items()
                if key[0].endswith(("_total", "_count", "_sum"))
            }
        self._instances[metrics.instance] = instance
        for name in [name for name, one in self._instances.items() if seconds - one.seconds > FORGET_SECONDS]:
            del self._instances[name]

    @property
    def instances(self) -> int:
        """Processes that answered lately."""
        return len(self._instances)

    def rate(self, name: str, **labels: str) -> float:
        """Per second, over all processes and all labels that are not named."""
        return sum(rate for _, rate in self._matching(name, labels))

    def rates_by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Per second, split by some labels."""
        split: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for found, rate in self._matching(name, {}):
            known = dict(found)
            split[tuple(known.get(label, "") for label in labels)] += rate
        return split

    def level(self, name: str, **labels: str) -> float | None:
        """A gauge, as the process that answered last has it; None if it has none."""
        if not self._instances:
            return None
        newest = max(self._instances.values(), key=lambda one: one.seconds)
        found = [
            value
            for (known, pairs), value in newest.values.items()
            if known == name and labels.items() <= dict(pairs).items()
        ]
        return sum(found) if found else None

    def _matching(self, name: str, labels: dict[str, str]) -> Iterable[tuple[Labels, float]]:
        for instance in self._instances.values():
            for (known, pairs), rate in instance.rates.items():
                if known == name and labels.items() <= dict(pairs).items():
                    yield pairs, rate


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at a server. A part that could not be had is the error instead."""

    address: str
    at: datetime
    info: ServerInfo | NoetlError
    outbox: OutboxStats | NoetlError
    tailer: tuple[TailerShardStatus, ...] | NoetlError
    parked: int | NoetlError
    metrics: ServerMetrics | NoetlError
    meter: Meter

    def document(self) -> dict[str, Any]:
        """For scripts: what is on the screen."""
        meter = self.meter
        return {
            "at": self.at.isoformat(),
            "address": self.address,
            "instances": meter.instances,
            "outbox": None if isinstance(self.outbox, NoetlError) else to_document(self.outbox),
            "tailer": None
            if isinstance(self.tailer, NoetlError)
            else [to_document(one) for one in self.tailer],
            "parked": None if isinstance(self.parked, NoetlError) else self.parked,
            "snapshots_behind": meter.level("noetl_projection_behind"),
            "subscriptions": {state: meter.level("noetl_subscriptions", state=state) for state in _STATES},
            "per_second": {
                "enqueued": meter.rate("noetl_outbox_enqueued_total"),
                "claimed": meter.rate("noetl_outbox_claimed_total"),
                "published": meter.rate("noetl_outbox_published_total"),
                "failed": meter.rate("noetl_outbox_failed_total"),
                "projected": meter.rate("noetl_events_projected_total"),
                "streamed": meter.rate("noetl_event_stream_published_total"),
                "advanced": meter.rate("noetl_projection_advanced_total"),
                "rpcs": meter.rate("grpc_server_handled_total"),
            },
        }


def render(reading: Reading, columns: int, lines: int) -> RenderableType:
    """The screen; readable at 80 columns and 24 lines."""
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(_outbox(reading), _events(reading))
    return Group(
        _head(reading),
        "",
        grid,
        "",
        _tailer(reading),
        "",
        _subscriptions(reading),
        "",
        _rpcs(reading, columns, max(RPCS_SHOWN_MIN, lines - LINES_ABOVE)),
    )


def _head(reading: Reading) -> Text:
    info = reading.info
    about = (
        _trouble(info)
        if isinstance(info, NoetlError)
        else f"noetl-grpc {info.version} · {form.count(info.shards, 'shard')}"
    )
    several = f" · {reading.meter.instances} processes" if reading.meter.instances > 1 else ""
    return Text.from_markup(
        f"[bold]{reading.address}[/bold]  {about}{several}  [dim]{reading.at:%H:%M:%S} · q ends[/dim]"
    )


def _panel(title: str, rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(title, "", "", "", box=None, pad_edge=False, header_style="bold cyan", show_edge=False)
    table.columns[1].justify = "right"
    table.columns[3].justify = "right"
    for row in rows:
        table.add_row(*row)
    return table


def _outbox(reading: Reading) -> RenderableType:
    found, meter = reading.outbox, reading.meter
    if isinstance(found, NoetlError):
        return _panel("OUTBOX", [(_trouble(found),)])
    oldest = "–" if found.oldest_pending_age is None else form.span(found.oldest_pending_age)
    return _panel(
        "OUTBOX",
        (
            (
                "pending",
                f"{found.pending:,}",
                "enqueued",
                _per_second(meter.rate("noetl_outbox_enqueued_total")),
            ),
            ("oldest", oldest, "claimed", _per_second(meter.rate("noetl_outbox_claimed_total"))),
            (
                "in flight",
                f"{found.in_flight:,}",
                "acked",
                _per_second(meter.rate("noetl_outbox_published_total")),
            ),
            ("delayed", f"{found.delayed:,}", "failed", _per_second(meter.rate("noetl_outbox_failed_total"))),
            (
                "expired",
                _alarm(found.expired, "yellow"),
                "stale",
                _per_second(meter.rate("noetl_outbox_stale_total")),
            ),
            ("dead", _alarm(found.dead, "red"), "died", _per_second(meter.rate("noetl_outbox_dead_total"))),
        ),
    )


def _events(reading: Reading) -> RenderableType:
    meter = reading.meter
    if isinstance(reading.metrics, NoetlError):
        return _panel("EVENTS", [(_trouble(reading.metrics),)])
    parked = "–" if isinstance(reading.parked, NoetlError) else _alarm(reading.parked, "red")
    behind = meter.level("noetl_projection_behind")
    return _panel(
        "EVENTS",
        (
            ("parked", parked, "projected", _per_second(meter.rate("noetl_events_projected_total"))),
            ("", "", "materialized", _per_second(meter.rate("noetl_events_materialized_total"))),
            ("", "", "duplicates", _per_second(meter.rate("noetl_events_projected_duplicates_total"))),
            ("", "", "rejected", _per_second(meter.rate("noetl_events_rejected_total"))),
            ("snapshots", "", "written", _per_second(meter.rate("noetl_projection_advanced_total"))),
            (
                "behind",
                "–" if behind is None else f"{behind:,.0f}",
                "rebuilt",
                _per_second(meter.rate("noetl_projection_rebuilt_total")),
            ),
        ),
    )


def _tailer(reading: Reading) -> RenderableType:
    found = reading.tailer
    if isinstance(found, NoetlError):
        return _panel("TAILER", [(_trouble(found),)])
    table = Table(
        "TAILER",
        "leader",
        "lag",
        "lag time",
        "in flight",
        "parked",
        "published",
        box=None,
        pad_edge=False,
        header_style="bold cyan",
    )
    streamed = reading.meter.rate("noetl_event_stream_published_total")
    for one in found:
        table.add_row(
            f"shard {one.shard} {one.mode.value.lower()}",
            "[green]here[/green]" if one.leader else "–",
            form.count(one.lag_events, "event"),
            form.span(one.lag_seconds),
            f"{one.in_flight:,}",
            _alarm(one.parked, "red"),
            _per_second(streamed) if one is found[0] else "",
        )
        if one.last_error:
            table.add_row(f"[red]{form.short(one.last_error, 60)}[/red]")
    return table


def _subscriptions(reading: Reading) -> RenderableType:
    if isinstance(reading.metrics, NoetlError):
        return _panel("SUBSCRIPTIONS", [(_trouble(reading.metrics),)])
    meter = reading.meter
    levels = [(state, meter.level("noetl_subscriptions", state=state)) for state in _STATES]
    lost = meter.level("noetl_subscription_runtimes_dead")
    line = Text.from_markup("[bold cyan]SUBSCRIPTIONS[/bold cyan]")
    for state, level in levels:
        line.append_text(
            Text.from_markup(
                f"  {form.state(state) if level else f'[dim]{state}[/dim]'} {'–' if level is None else f'{level:,.0f}'}"
            )
        )
    if lost:
        line.append_text(Text.from_markup(f"  [red]{form.count(int(lost), 'runtime')} lost[/red]"))
    return line


def _rpcs(reading: Reading, columns: int, rows: int) -> RenderableType:
    if isinstance(reading.metrics, NoetlError):
        return _panel("RPC", [(_trouble(reading.metrics),)])
    meter = reading.meter
    table = Table(
        "RPC", "calls", "errors", "mean", "codes", box=None, pad_edge=False, header_style="bold cyan"
    )
    for column in table.columns[1:4]:
        column.justify = "right"
    started = meter.rates_by("grpc_server_started_total", "grpc_service", "grpc_method")
    handled = meter.rates_by("grpc_server_handled_total", "grpc_service", "grpc_method", "grpc_code")
    spent = meter.rates_by("grpc_server_handling_seconds_sum", "grpc_service", "grpc_method")
    ended = meter.rates_by("grpc_server_handling_seconds_count", "grpc_service", "grpc_method")
    busiest = sorted(started, key=lambda key: (-started[key], key))[:rows]
    for service, method in busiest:
        if not started[service, method]:
            continue
        codes = {code: rate for (s, m, code), rate in handled.items() if (s, m) == (service, method) and rate}
        errors = sum(rate for code, rate in codes.items() if code != "OK")
        calls = ended[service, method]
        table.add_row(
            form.short(f"{service.rpartition('.')[2]}/{method}", 44),
            _per_second(started[service, method]),
            f"[red]{_per_second(errors)}[/red]" if errors else "",
            form.span(spent[service, method] / calls) if calls else "–",
            form.short(", ".join(sorted(code for code in codes if code != "OK")), max(10, columns - 70)),
        )
    if not table.rows:
        table.add_row("[dim]no calls[/dim]")
    return table


def _per_second(rate: float) -> str:
    return f"{rate:,.0f}/s" if rate >= 10 or not rate else f"{rate:.1f}/s"


def _alarm(number: int, colour: str) -> str:
    return f"[{colour}]{number:,}[/{colour}]" if number else "0"


def _trouble(error: NoetlError) -> str:
    if isinstance(error, PermissionDenied):
        word = "not allowed"
    elif error.reason == "UNAVAILABLE":
        word = "no answer; trying again"
    else:
        word = error.reason.lower().replace("_", " ")
    return f"[red]{form.short(word, 30)}[/red]"
