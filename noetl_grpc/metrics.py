"""Every series the process exports.

Labelled ones exist at 0 from the start, because an absent series looks like a dead exporter.
No label ever holds an execution id, and event types are capped, so that the number of series stays bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from importlib.metadata import version
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

OUTBOX_STATES = ("pending", "delayed", "in_flight", "expired", "dead")
SEED_OUTCOMES = ("used", "absent", "tampered", "fold_version", "registry_digest", "straggler")
SUBSCRIPTION_STATES = ("REGISTERED", "ACTIVE", "PAUSED", "DRAINING", "DEACTIVATED")
PURGED_TABLES = ("command", "runtime", "outbox", "event")
TAILER_MODES = ("disabled", "snapshot", "overlap")
EVENT_TYPES_MAX = 200
OTHER_EVENT_TYPE = "other"

#: By number, as other gRPC servers label them.
GRPC_CODES = (
    "OK",
    "Canceled",
    "Unknown",
    "InvalidArgument",
    "DeadlineExceeded",
    "NotFound",
    "AlreadyExists",
    "PermissionDenied",
    "ResourceExhausted",
    "FailedPrecondition",
    "Aborted",
    "OutOfRange",
    "Unimplemented",
    "Internal",
    "Unavailable",
    "DataLoss",
    "Unauthenticated",
)

_LATENCY_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class MethodSeries:
    """The series of one method. Plain numbers: only the event loop writes them, and once or more per call."""

    __slots__ = ("counts", "handled", "labels", "seconds_sum", "started")

    def __init__(self, labels: tuple[str, str, str]) -> None:
        self.labels = labels
        self.started = 0
        self.handled = [0] * len(GRPC_CODES)
        self.counts = [0] * (len(_LATENCY_BUCKETS) + 1)
        self.seconds_sum = 0.0

    def finish(self, code: int, seconds: float) -> None:
        """Count a call that ended with the code of this number."""
        self.handled[code] += 1
        self.counts[bisect_left(_LATENCY_BUCKETS, seconds)] += 1
        self.seconds_sum += seconds


class RpcSeries(Collector):
    """`grpc_server_*` with the ecosystem's names and labels.

    The library's own counters lock and search at each step, which every call would pay for.
    """

    def __init__(self) -> None:
        self._methods: list[MethodSeries] = []

    def of(self, *, kind: str, service: str, method: str) -> MethodSeries:
        """New series of a method, at 0."""
        series = MethodSeries((kind, service, method))
        self._methods.append(series)
        return series

    def collect(self) -> Iterable[Metric]:
        """What a scrape gets."""
        labels = ("grpc_type", "grpc_service", "grpc_method")
        started = CounterMetricFamily("grpc_server_started", "RPCs started on the server.", labels=labels)
        handled = CounterMetricFamily(
            "grpc_server_handled", "RPCs completed on the server.", labels=(*labels, "grpc_code")
        )
        seconds = HistogramMetricFamily(
            "grpc_server_handling_seconds", "How long RPCs took on the server.", labels=labels
        )
        bounds = [*map(floatToGoString, _LATENCY_BUCKETS), "+Inf"]
        for series in self._methods:
            started.add_metric(series.labels, series.started)
            for code, count in zip(GRPC_CODES, series.handled, strict=True):
                handled.add_metric((*series.labels, code), count)
            buckets = list(zip(bounds, accumulate(series.counts), strict=True))
            seconds.add_metric(series.labels, buckets, series.seconds_sum)
        return started, handled, seconds


class Metrics:
    """The series of one server, in a registry of its own so that several servers fit into one process."""

    def __init__(self, *, shards: int = 1) -> None:
        self.registry = CollectorRegistry()
        self._event_types: set[str] = {OTHER_EVENT_TYPE}
        self.rpc = RpcSeries()
        self.registry.register(self.rpc)

        self.outbox_rows = self._gauge(
            "noetl_outbox_rows", "Outbox rows by state.", ("state",), OUTBOX_STATES
        )
        self.outbox_oldest_pending_seconds = self._gauge(
            "noetl_outbox_oldest_pending_seconds",
            "Age of the oldest outbox row that is due; 0 when there is none.",
        )
        self.outbox_enqueued = self._counter("noetl_outbox_enqueued", "Outbox rows enqueued.")
        self.outbox_claimed = self._counter("noetl_outbox_claimed", "Outbox rows handed out.")
        self.outbox_published = self._counter("noetl_outbox_published", "Outbox rows marked published.")
        self.outbox_failed = self._counter("noetl_outbox_failed", "Failures reported for outbox rows.")
        self.outbox_dead = self._counter("noetl_outbox_dead", "Outbox rows that went dead.")
        self.outbox_stale = self._counter("noetl_outbox_stale", "Acknowledgements refused as stale.")

        self.events_projected = self._counter("noetl_events_projected", "Events stored by ProjectEvents.")
        self.events_projected_duplicates = self._counter(
            "noetl_events_projected_duplicates", "Events that ProjectEvents had stored before."
        )
        self.events_materialized = self._counter(
            "noetl_events_materialized", "Events stored by MaterializeEvents."
        )
        self.events_rejected = self._counter("noetl_events_rejected", "Events refused with a reason.")
        self.events_parked = self._counter("noetl_events_parked", "Events parked in the dead letter table.")

        self.projection_advanced = self._counter("noetl_projection_advanced", "Snapshots written.")
        self.projection_rebuilt = self._counter(
            "noetl_projection_rebuilt", "Snapshots folded anew because of a straggler."
        )
        self.projection_behind = self._gauge(
            "noetl_projection_behind",
            "Executions among the latest events whose snapshot is missing or older than they are.",
        )
        self.replay_seed = self._counter(
            "noetl_replay_seed", "Replays by what became of the stored snapshot.", ("outcome",), SEED_OUTCOMES
        )

        self.stream_published = self._counter(
            "noetl_event_stream_published",
            "Events published to JetStream.",
            ("event_type",),
            (OTHER_EVENT_TYPE,),
        )
        self.stream_referenced = self._counter(
            "noetl_event_stream_referenced", "Oversize events published by reference."
        )
        self.stream_parked = self._counter(
            "noetl_event_stream_parked", "Events that the broker refused for good."
        )
        self.stream_republished = self._counter(
            "noetl_event_stream_republished", "Events that the broker had lost."
        )
        numbers = tuple(str(shard) for shard in range(shards))
        self.stream_lag_events = self._gauge(
            "noetl_event_stream_lag_events", "Committed events not yet published.", ("shard",), numbers
        )
        self.stream_lag_seconds = self._gauge(
            "noetl_event_stream_lag_seconds",
            "Age of the oldest committed event not yet published.",
            ("shard",),
            numbers,
        )
        self.stream_leader = self._gauge(
            "noetl_event_stream_leader",
            "1 while this process publishes the shard's events.",
            ("shard",),
            numbers,
        )
        self.stream_mode = self._gauge(
            "noetl_event_stream_mode", "1 for the tailer's present mode.", ("mode",), TAILER_MODES
        )

        self.subscriptions = self._gauge(
            "noetl_subscriptions", "Subscriptions by state.", ("state",), SUBSCRIPTION_STATES
        )
        self.subscription_runtimes_dead = self._gauge(
            "noetl_subscription_runtimes_dead", "Subscriptions whose runtime's lease has expired."
        )
        self.cleanup_rows_purged = self._counter(
            "noetl_cleanup_rows_purged", "Rows (partitions for events) purged.", ("table",), PURGED_TABLES
        )
        self.pool_connections = Gauge(
            "noetl_pool_connections", "Database connections.", ("shard", "state"), registry=self.registry
        )
        for shard in (*numbers, "cluster"):
            for state in ("idle", "used"):
                self.pool_connections.labels(shard, state)
        self._gauge(
            "noetl_build_info", "1, labelled with the version.", ("version",), (version("noetl-grpc"),)
        ).labels(version("noetl-grpc")).set(1)

    def samples(self) -> Iterable[tuple[str, dict[str, str], float]]:
        """Every number as it is now."""
        for family in self.registry.collect():
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value

    def watch_pool(self, shard: str, connections: Callable[[], tuple[int, int]]) -> None:
        """Ask for idle and used connections at each scrape."""
        self.pool_connections.labels(shard, "idle").set_function(lambda: connections()[0])
        self.pool_connections.labels(shard, "used").set_function(lambda: connections()[1])

    def event_type_label(self, event_type: str) -> str:
        """The label for an event type: itself for the first few hundred, then `other`."""
        if event_type in self._event_types:
            return event_type
        if len(self._event_types) >= EVENT_TYPES_MAX:
            return OTHER_EVENT_TYPE
        self._event_types.add(event_type)
        return event_type

    def _counter(
        self, name: str, text: str, labels: Iterable[str] = (), values: Iterable[str] = ()
    ) -> Counter:
        counter = Counter(name, text, tuple(labels), registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def _gauge(self, name: str, text: str, labels: Iterable[str] = (), values: Iterable[str] = ()) -> Gauge:
        gauge = Gauge(name, text, tuple(labels), registry=self.registry)
        for value in values:
            gauge.labels(value)
        return gauge
