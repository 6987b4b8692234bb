"""The composition root: settings in, a running server out. What opens last closes first, also when start-up fails."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import grpc
from externalscaler import externalscaler_pb2, externalscaler_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer
from noetlpb.v1 import (
    operations_pb2,
    operations_pb2_grpc,
    outbox_pb2,
    outbox_pb2_grpc,
    projection_pb2,
    projection_pb2_grpc,
    replay_pb2,
    replay_pb2_grpc,
    subscription_pb2,
    subscription_pb2_grpc,
)
from prometheus_client import start_http_server

from noetl_grpc.certificates import Certificates
from noetl_grpc.core.fold import FOLD_VERSION
from noetl_grpc.core.tailing import Mode
from noetl_grpc.errors import NoetlError, SettingsError
from noetl_grpc.extensions import load_registry, load_resolvers
from noetl_grpc.follower import Follower
from noetl_grpc.health import Health
from noetl_grpc.interceptors.access import Observers
from noetl_grpc.interceptors.auth import AuthInterceptor, TokenChecker
from noetl_grpc.interceptors.errors import MethodTable, OpenStreams, Rim
from noetl_grpc.interceptors.load import Lanes
from noetl_grpc.interceptors.traces import TracedObserver
from noetl_grpc.metrics import Metrics
from noetl_grpc.reconcile import Reconciler
from noetl_grpc.services.intake import Intake
from noetl_grpc.services.operations import DisabledTailer, Limits, OperationsServicer, ServerFacts
from noetl_grpc.services.outbox import Outbox, OutboxServicer
from noetl_grpc.services.outbox_gauges import OutboxGauges
from noetl_grpc.services.payloads import FileResolver, PayloadResolver
from noetl_grpc.services.projection import ProjectionServicer
from noetl_grpc.services.projection_gauge import ProjectionGauge
from noetl_grpc.services.readmodel import ReadModel
from noetl_grpc.services.replay import ReplayServicer
from noetl_grpc.services.scaler import ExternalScalerServicer
from noetl_grpc.services.seeds import Seeds
from noetl_grpc.services.subscription import SubscriptionServicer
from noetl_grpc.services.subscription_gauges import SubscriptionGauges
from noetl_grpc.services.waiters import Waiters
from noetl_grpc.settings import Settings
from noetl_grpc.storage import migrate
from noetl_grpc.storage.ids import IdSource
from noetl_grpc.storage.pool import Pool, Shards, open_shards
from noetl_grpc.tailer import STOP_SECONDS, Tailer, TailerOptions
from noetl_grpc.tracing import exporting

if TYPE_CHECKING:
    from noetl_grpc.spans import Spans

logger = logging.getLogger("noetl_grpc")

API_VERSION = "noetlpb.v1"
RETRY_SECONDS_MAX = 10.0
CONNECTION_CALLS_MAX = 1000

#: What this server serves and what health answers for, by full name.
SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name]
    for module, name in (
        (subscription_pb2, "SubscriptionService"),
        (replay_pb2, "ReplayService"),
        (outbox_pb2, "OutboxService"),
        (projection_pb2, "ProjectionService"),
        (operations_pb2, "OperationsService"),
        (externalscaler_pb2, "ExternalScaler"),
    )
)
SERVICE_NAMES = tuple(service.full_name for service in SERVICES)

#: What the operations listener serves, to anybody.
OPS_SERVICES = frozenset({"grpc.health.v1.Health", "externalscaler.ExternalScaler"})


class Server:
    """A server that is up. `stop` takes it down in the order that loses no call."""

    def __init__(
        self,
        *,
        grpc_servers: Sequence[grpc.aio.Server],
        health: Health,
        streams: OpenStreams,
        settings: Settings,
        port: int,
        ops_port: int | None,
        metrics_port: int | None,
        spans: Spans | None,
    ) -> None:
        self._grpc_servers = grpc_servers
        self._health = health
        self._streams = streams
        self._settings = settings
        self._metrics_port = metrics_port
        self.port = port
        self.ops_port = ops_port
        #: For what runs beside the server in this process.
        self.spans = spans

    @property
    def address(self) -> str:
        """host:port for a client on this machine."""
        return _reachable(self._settings.grpc_host, self.port)

    @property
    def ops_address(self) -> str:
        """host:port of the listener without tokens; empty when it is off."""
        if self.ops_port is None or self._settings.ops_address is None:
            return ""
        return _reachable(self._settings.ops_address[0], self.ops_port)

    @property
    def metrics_url(self) -> str:
        """Where Prometheus finds the metrics; empty when they are off."""
        if self._metrics_port is None or self._settings.metrics_address is None:
            return ""
        return f"http://{_reachable(self._settings.metrics_address[0], self._metrics_port)}/metrics"

    async def drain(self) -> None:
        """Say NOT_SERVING, keep serving for a while, end the streams, let running calls finish."""
        await self._health.shut_down()
        if self._settings.drain_seconds:
            logger.info("draining: calls are served for another %g s", self._settings.drain_seconds)
            await asyncio.sleep(self._settings.drain_seconds)
        self._streams.end_all()
        await asyncio.gather(*(server.stop(self._settings.grace_seconds) for server in self._grpc_servers))


def _reachable(host: str, port: int) -> str:
    return f"{'127.0.0.1' if host in ('0.0.0.0', '[::]', '::') else host}:{port}"


@asynccontextmanager
async def serving(settings: Settings, *, clock: Callable[[], float] = time.time) -> AsyncIterator[Server]:
    """A running server for the length of the block; it has drained when the block is left.

    `clock` is what ids are made from.
    """
    if not settings.shards:
        raise SettingsError(
            "no database is configured; set NOETL_DATABASE_URL, such as postgresql://user:password@host:5432/noetl"
            " (or try `noetl-grpc dev`, which brings its own)"
        )
    async with AsyncExitStack() as stack:
        spans = await stack.enter_async_context(exporting(settings.tracing.endpoint, service="noetl-grpc"))
        shards = await open_shards(
            settings.shards,
            cluster_url=settings.cluster,
            size_min=settings.pool_size_min,
            size_max=settings.pool_size_max,
            wait_seconds=settings.pool_wait_seconds,
            statement_cache_size=settings.statement_cache_size,
            spans=spans,
        )
        stack.push_async_callback(shards.close)
        for pool in _distinct(shards):
            await _until_reachable(pool, lambda pool=pool: _require_schema(pool))  # type: ignore[misc]  # mypy#4226

        ids = IdSource(shards.cluster, machine_id=settings.machine_id, clock=clock)
        await ids.open()
        stack.push_async_callback(ids.close)
        await stack.enter_async_context(background(ids.run, name="machine lease"))

        metrics = Metrics(shards=len(shards))
        for pool in _distinct(shards):
            metrics.watch_pool(pool.name, pool.connections)
        health = Health(shards, SERVICE_NAMES)
        await health.start()
        await stack.enter_async_context(background(health.run, name="health"))

        # By shard; they rest while no stream is interested.
        followers = tuple(Follower(pool) for pool in shards.pools)
        for number, follower in enumerate(followers):
            await _until_reachable(shards.pools[number], follower.find_mode)
            await stack.enter_async_context(background(follower.run, name=f"follower of shard {number}"))

        if settings.metrics_address is not None:
            gauges = SubscriptionGauges(shards, metrics)
            await stack.enter_async_context(background(gauges.run, name="subscription gauges"))
            behind = ProjectionGauge(shards, metrics)
            await stack.enter_async_context(background(behind.run, name="gauge of the read model"))

        streams = OpenStreams()
        rim = Rim(
            observers=_observers(metrics, spans),
            streams=streams,
            request_bytes_max=Limits().request_bytes,
        )
        methods = MethodTable(rim)
        outbox = Outbox(shards, attempts_max=settings.outbox_attempts_max, metrics=metrics)
        stack.push_async_callback(outbox.close)
        if settings.metrics_address is not None:
            outbox_gauges = OutboxGauges(outbox.stats, metrics)
            await stack.enter_async_context(background(outbox_gauges.run, name="outbox gauges"))
        tailer = _tailer(settings, shards, metrics, health, spans)
        if tailer is not None:
            await stack.enter_async_context(background(tailer.measure, name="lag of the tailer"))
            await stack.enter_async_context(
                background(tailer.run, name="tailer", stop=tailer.stop, stop_seconds=STOP_SECONDS)
            )
        _add_services(methods, settings, shards, ids, metrics, health, outbox, followers, tailer)
        checker = TokenChecker(settings.api_token, tokens_file=settings.tokens_file)
        lanes = Lanes(
            calls_max=settings.calls_max,
            streams_max=settings.streams_max,
            streams=[f"/{service}/{method}" for service, method, kind in _methods() if kind != "unary"],
        )
        grpc_server = _grpc_server(AuthInterceptor(checker, deny=rim.denial, lanes=lanes))
        grpc_server.add_generic_rpc_handlers((methods,))
        grpc_servers = [grpc_server]
        port = _listen(grpc_server, settings)
        ops_port = None
        if settings.ops_address is not None:
            ops_server = _grpc_server(
                AuthInterceptor(checker, deny=rim.denial, lanes=lanes, public_services=OPS_SERVICES)
            )
            ops_server.add_generic_rpc_handlers((methods.only(OPS_SERVICES),))
            ops_port = _listen_ops(ops_server, settings.ops_address)
            grpc_servers.append(ops_server)
        metrics_port = _serve_metrics(settings, metrics, stack)
        for one in grpc_servers:
            await one.start()
        server = Server(
            grpc_servers=grpc_servers,
            health=health,
            streams=streams,
            settings=settings,
            port=port,
            ops_port=ops_port,
            metrics_port=metrics_port,
            spans=spans,
        )
        stack.push_async_callback(server.drain)
        yield server


def _add_services(
    server: Any,
    settings: Settings,
    shards: Shards,
    ids: IdSource,
    metrics: Metrics,
    health: Health,
    outbox: Outbox,
    followers: Sequence[Follower],
    tailer: Tailer | None,
) -> None:
    """Register every service."""
    facts = ServerFacts(
        version=version("noetl-grpc"),
        api_version=API_VERSION,
        fold_version=FOLD_VERSION,
        shards=len(shards),
        limits=Limits(),
    )
    subscription_pb2_grpc.add_SubscriptionServiceServicer_to_server(
        SubscriptionServicer(
            shards,
            followers,
            ids.next_id,
            drain_timeout=timedelta(seconds=settings.subscription_drain_timeout_seconds),
        ),
        server,
    )
    registry = load_registry()
    folding = asyncio.Semaphore(settings.replay_concurrency)
    seeds = Seeds(registry=registry, metrics=metrics)
    replay_pb2_grpc.add_ReplayServiceServicer_to_server(
        ReplayServicer(
            shards,
            followers,
            folding=folding,
            seeds=seeds,
            registry=registry,
            resolvers=_payload_resolvers(settings),
            message_bytes_max=Limits().message_bytes,
        ),
        server,
    )
    outbox_pb2_grpc.add_OutboxServiceServicer_to_server(OutboxServicer(outbox), server)

    def on_stored(shard: int) -> None:
        followers[shard].wake()
        if tailer is not None:
            tailer.wake(shard)

    intake = Intake(shards, on_stored=on_stored, on_enqueued=outbox.notify)
    projection_pb2_grpc.add_ProjectionServiceServicer_to_server(
        ProjectionServicer(
            shards,
            intake=intake,
            read_model=ReadModel(shards, seeds=seeds, registry=registry, metrics=metrics, folding=folding),
            waiters=Waiters(shards),
            next_id=ids.next_id,
            metrics=metrics,
        ),
        server,
    )
    operations_pb2_grpc.add_OperationsServiceServicer_to_server(
        OperationsServicer(
            facts,
            metrics,
            tailer=tailer or DisabledTailer(len(shards)),
            misses_late_commits=lambda: any(follower.misses_late_commits for follower in followers),
            reconciler=Reconciler(
                database_urls=settings.direct, broker_url=settings.nats_url, metrics=metrics
            ),
        ),
        server,
    )
    externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(
        ExternalScalerServicer(
            shards, tailer_lag_events=tailer.lag_events if tailer is not None else _no_lag
        ),
        server,
    )
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    if settings.reflection:
        names = (
            *SERVICE_NAMES,
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            reflection.SERVICE_NAME,
        )
        add_reflection: Any = reflection_pb2_grpc.add_ServerReflectionServicer_to_server
        add_reflection(ReflectionServicer(names), server)


def _tailer(
    settings: Settings, shards: Shards, metrics: Metrics, health: Health, spans: Spans | None
) -> Tailer | None:
    stream = settings.event_stream
    if not stream.enabled:
        metrics.stream_mode.labels(Mode.DISABLED.value).set(1)
        return None
    return Tailer(
        shards,
        database_urls=settings.direct,
        options=TailerOptions(
            broker_url=settings.nats_url,
            batch_size=stream.batch_size,
            poll_seconds=stream.poll_ms / 1000,
            backfill=stream.backfill,
            dedup_seconds=stream.dedup_seconds,
            retention_seconds=stream.retention_seconds,
        ),
        metrics=metrics,
        on_health=lambda serving: health.set_tailer(serving=serving),
        spans=spans,
    )


async def _no_lag() -> float:
    """Without a tailer nothing waits for it."""
    return 0


def _payload_resolvers(settings: Settings) -> list[PayloadResolver]:
    """Those of the deployment first: ours only knows files."""
    own = [FileResolver(settings.payload_root)] if settings.payload_root else []
    return [*load_resolvers(), *own]


def _grpc_server(auth: AuthInterceptor) -> grpc.aio.Server:
    return grpc.aio.server(interceptors=(auth,), options=channel_options())


def channel_options() -> tuple[tuple[str, int], ...]:
    """What gRPC's core is told. It ignores a name that it does not know."""
    limits = Limits()
    return (
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_send_message_length", limits.message_bytes),
        # One connection alone can't take all the room there is; what is above waits on the caller's side.
        ("grpc.max_concurrent_streams", CONNECTION_CALLS_MAX),
        # C-core waits two minutes for a handshake that may never be finished.
        ("grpc.server_handshake_timeout_ms", 10_000),
        # A second server on the same port must fail, not share its calls.
        ("grpc.so_reuseport", 0),
        # Clients behind a load balancer ping often; C-core's default of five minutes would cut them off.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # A new replica gets its share; what runs on the old connection, a long stream too, runs on to its end.
        ("grpc.max_connection_age_ms", 30 * 60_000),
    )


def _methods() -> Iterable[tuple[str, str, str]]:
    kinds = {
        (False, False): "unary",
        (False, True): "server_stream",
        (True, False): "client_stream",
        (True, True): "bidi_stream",
    }
    for service in (*SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"]):
        for method in service.methods:
            yield service.full_name, method.name, kinds[method.client_streaming, method.server_streaming]


def _observers(metrics: Metrics, spans: Spans | None) -> Observers:
    if spans is None:
        return Observers(metrics, _methods())
    # Probes ask all the time, and nobody wants to see that.
    traced = partial(TracedObserver, spans=spans)
    return Observers(metrics, _methods(), makers=dict.fromkeys(SERVICE_NAMES, traced))


def _listen(server: grpc.aio.Server, settings: Settings) -> int:
    address = f"{settings.grpc_host}:{settings.grpc_port}"
    try:
        if settings.tls_key is None or settings.tls_certificate is None:
            return server.add_insecure_port(address)
        certificates = Certificates(
            certificate=settings.tls_certificate, key=settings.tls_key, client_ca=settings.tls_client_ca
        )
        return server.add_secure_port(address, certificates.credentials())
    except RuntimeError:
        raise SettingsError(
            f"can't listen on {address}; another process may have that port: choose another NOETL_GRPC_PORT"
            " (0 picks a free one) or NOETL_GRPC_HOST"
        ) from None


def _listen_ops(server: grpc.aio.Server, ops_address: tuple[str, int]) -> int:
    """Never with TLS: the kubelet's probes don't speak it, and nothing secret is served there."""
    address = ":".join(map(str, ops_address))
    try:
        return server.add_insecure_port(address)
    except RuntimeError:
        raise SettingsError(f"can't listen on {address}; choose another NOETL_OPS_ADDR, or empty") from None


def _serve_metrics(settings: Settings, metrics: Metrics, stack: AsyncExitStack) -> int | None:
    if settings.metrics_address is None:
        return None
    host, port = settings.metrics_address
    try:
        http_server, thread = start_http_server(port, host, metrics.registry)
    except OSError as error:
        raise SettingsError(
            f"can't serve metrics on {host}:{port} ({error.strerror}); choose another NOETL_METRICS_ADDR, or empty"
        ) from None

    def close() -> None:
        http_server.shutdown()
        http_server.server_close()
        thread.join()

    stack.callback(close)
    return int(http_server.server_address[1])


def _distinct(shards: Shards) -> Iterable[Pool]:
    return {id(pool): pool for pool in (shards.cluster, *shards.pools)}.values()


async def _require_schema(pool: Pool) -> None:
    """Refuse a schema that can't be worked with, and make the partitions that will soon be needed."""
    async with pool.acquire() as conn:
        usability = await migrate.require_usable(conn)
        for drift in usability.optional_drift:
            logger.warning("database %s: %s; `noetl-grpc migrate --verify` tells more", pool.name, drift)
        await migrate.ensure_partitions(conn, now=datetime.now(UTC))


async def _until_reachable(pool: Pool, attempt: Callable[[], Awaitable[None]]) -> None:
    """Wait for a database that is not up yet; whatever else is wrong with it is raised."""
    delay_seconds = 0.2
    while True:
        try:
            return await attempt()
        except NoetlError as error:
            logger.warning("database %s: %s; trying again in %.1f s", pool.name, error, delay_seconds)
        await asyncio.sleep(delay_seconds)
        delay_seconds = min(delay_seconds * 2, RETRY_SECONDS_MAX)


@asynccontextmanager
async def background(
    run: Callable[[], Awaitable[None]],
    *,
    name: str,
    stop: Callable[[], None] | None = None,
    stop_seconds: float = 0,
) -> AsyncIterator[None]:
    """A coroutine that runs beside the server. If it fails it is logged and started again; it never stops the RPCs.

    At the end it is cancelled; one that can `stop` by itself gets so long to finish what it is at.
    """

    async def supervise() -> None:
        delay_seconds = 0.1
        while True:
            try:
                return await run()
            except Exception:
                logger.exception("%s failed; starting it again in %.1f s", name, delay_seconds)
            await asyncio.sleep(delay_seconds)
            delay_seconds = min(delay_seconds * 2, RETRY_SECONDS_MAX)

    task = asyncio.create_task(supervise(), name=name)
    try:
        yield
    finally:
        if stop is not None:
            stop()
            await asyncio.wait((task,), timeout=stop_seconds)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def run(
    settings: Settings,
    *,
    ready: Callable[[Server], None] = lambda server: None,
    beside: Callable[[Server], AbstractAsyncContextManager[None]] = lambda server: nullcontext(),
    clock: Callable[[], float] = time.time,
) -> None:
    """Serve until SIGTERM or SIGINT. A second signal ends the process at once.

    What runs `beside` the server is up before `ready` is told, and down before the server drains.
    """
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            os._exit(1)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    up = asyncio.Event()

    async def serve() -> None:
        async with serving(settings, clock=clock) as server:
            up.set()
            logger.info("serving on %s", server.address)
            async with beside(server):
                # What is loaded by now stays for ever, so the collector need not look at it again and again.
                gc.collect()
                gc.freeze()
                ready(server)
                await stopping.wait()
                logger.info("stopping")

    served = asyncio.create_task(serve())
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait((served, stopped), return_when=asyncio.FIRST_COMPLETED)
    if stopped.done() and not up.is_set():
        # Still waiting for its database, so there is nothing to drain.
        served.cancel()
        with suppress(asyncio.CancelledError):
            await served
        return
    stopped.cancel()
    await served
