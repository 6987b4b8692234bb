"""`run-projector`: every event that reaches the stream makes its execution's snapshot advance.

It only talks to the service and to the broker. Copies of it share one durable consumer. A message is acknowledged only
after the snapshot of its execution includes its event; until then JetStream delivers it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import nats
import nats.errors
import nats.js.errors
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.client import JetStreamContext

from noetl_grpc.broker import split_credentials
from noetl_grpc.client import NoetlClient
from noetl_grpc.client.channel import Pause, can_come_back
from noetl_grpc.client.projection import Advanced
from noetl_grpc.core.tailing import DESTINATION, STREAM, SUBJECTS
from noetl_grpc.core.traceparent import HEADER as TRACE_HEADER
from noetl_grpc.errors import Aborted, DeadlineExceeded, NoetlError

if TYPE_CHECKING:
    from noetl_grpc.spans import Spans

logger = logging.getLogger("noetl_grpc.projector")

DURABLE: Final = "noetl_projector"
BATCH_MESSAGES: Final = 500
FETCH_SECONDS: Final = 1.0
ACK_WAIT_SECONDS: Final = 60.0
#: Executions in one call; the server takes 1000, and a smaller call gives the others their turn.
EXECUTIONS_AT_ONCE: Final = 100
#: An execution without events was purged, or is of another database; so often it is looked for.
LOOKS_FOR_NO_EVENTS: Final = 5
RETRY_SECONDS_MAX: Final = 300.0


@dataclass(slots=True)
class Progress:
    """What a projector has done so far."""

    advanced: int = 0
    acknowledged: int = 0
    failed: int = 0
    given_up: int = 0


@dataclass(frozen=True, slots=True)
class _Tenant:
    tenant_id: str
    organization_id: str


@dataclass(slots=True)
class _Work:
    """The messages of a batch by tenant and execution; one advance settles all of an execution."""

    messages: defaultdict[_Tenant, defaultdict[int, list[Msg]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    unreadable: list[Msg] = field(default_factory=list)

    @classmethod
    def of(cls, batch: Iterable[Msg]) -> _Work:
        work = cls()
        for message in batch:
            try:
                body = orjson.loads(message.data)
                execution_id = int(body["execution_id"])
                tenant = _Tenant(body.get("tenant_id") or "", body.get("organization_id") or "")
            except (ValueError, KeyError, TypeError, AttributeError):
                work.unreadable.append(message)
            else:
                work.messages[tenant][execution_id].append(message)
        return work


async def run_projector(
    client: NoetlClient,
    *,
    nats_url: str,
    durable: str = DURABLE,
    ack_wait_seconds: float = ACK_WAIT_SECONDS,
    progress: Progress | None = None,
    spans: Spans | None = None,
) -> None:
    """Advance for ever. On cancellation the batch at hand is finished first."""
    projector = Projector(client, progress=progress or Progress(), durable=durable, spans=spans)
    pause = Pause()
    while True:
        try:
            connection = await _connect(nats_url)
            try:
                subscription = await _subscribe(
                    connection.jetstream(), durable, ack_wait_seconds=ack_wait_seconds
                )
                logger.info("consuming %s as %s", STREAM, durable)
                pause.reset()
                while not connection.is_closed:
                    await projector.run_once(subscription)
            finally:
                await connection.close()
        except nats.js.errors.NotFoundError:
            logger.info("waiting for the stream %s; the tailer makes it", STREAM)
        except (nats.errors.Error, nats.js.errors.Error, OSError, TimeoutError) as error:
            logger.warning("the broker is out of reach (%s); trying again", type(error).__name__)
        await pause.wait()


class Projector:
    """Takes batches of messages and settles each of them."""

    def __init__(
        self, client: NoetlClient, *, progress: Progress, durable: str = DURABLE, spans: Spans | None = None
    ) -> None:
        self._client = client
        self._progress = progress
        self._durable = durable
        self._spans = spans
        self._pause = Pause(first_seconds=0.5)

    async def run_once(self, subscription: JetStreamContext.PullSubscription) -> None:
        """One batch; none within a second is fine."""
        await self._settle_next(subscription)
        # The wait_for of Python 3.11, by which messages are fetched, forgets a cancellation that comes with its result.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError

    async def _settle_next(self, subscription: JetStreamContext.PullSubscription) -> None:
        try:
            batch = await subscription.fetch(BATCH_MESSAGES, timeout=FETCH_SECONDS)
        except TimeoutError:
            return
        # A batch that was fetched is worth finishing, also when we are told to stop.
        work = asyncio.ensure_future(self._settle(_Work.of(batch)))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait((work,), timeout=ACK_WAIT_SECONDS)
            raise

    async def _settle(self, work: _Work) -> None:
        for message in work.unreadable:
            logger.error("a message on %s is not an event; it is skipped", message.subject)
            self._progress.given_up += 1
            await message.term()
        for tenant, executions in work.messages.items():
            ids = list(executions)
            for start in range(0, len(ids), EXECUTIONS_AT_ONCE):
                part = ids[start : start + EXECUTIONS_AT_ONCE]
                await self._advance(tenant, {execution_id: executions[execution_id] for execution_id in part})

    async def _advance(self, tenant: _Tenant, executions: dict[int, list[Msg]]) -> None:
        try:
            with self._span(executions):
                answer = await self._client.projection.advance(
                    executions, tenant_id=tenant.tenant_id, organization_id=tenant.organization_id
                )
        except NoetlError as error:
            if not can_come_back(error) and not isinstance(error, Aborted | DeadlineExceeded):
                raise
            logger.warning("%s; trying again", error.message)
            for messages in executions.values():
                await _nak(messages, seconds=1.0)
            await self._pause.wait()
            return
        self._pause.reset()
        await self._acknowledge(answer, executions)

    def _span(self, executions: dict[int, list[Msg]]) -> AbstractContextManager[object]:
        """The call that is made inside it goes on with the trace of the messages."""
        if self._spans is None:
            return nullcontext()
        messages = [message for group in executions.values() for message in group]
        origins = ((message.headers or {}).get(TRACE_HEADER) for message in messages)
        return self._spans.process(DESTINATION, origins, count=len(messages), group=self._durable)

    async def _acknowledge(self, answer: Advanced, executions: dict[int, list[Msg]]) -> None:
        for advanced in answer.advanced:
            self._progress.advanced += advanced.changed
            for message in executions[advanced.execution_id]:
                await message.ack()
                self._progress.acknowledged += 1
        for failed in answer.failed:
            messages = executions[failed.execution_id]
            tries = max(message.metadata.num_delivered or 1 for message in messages)
            if failed.reason == "NO_EVENTS" and tries >= LOOKS_FOR_NO_EVENTS:
                logger.error("execution %d has no events; its messages are skipped", failed.execution_id)
                self._progress.given_up += len(messages)
                for message in messages:
                    await message.term()
                continue
            self._progress.failed += 1
            logger.warning("execution %d: %s %s", failed.execution_id, failed.reason, failed.detail)
            await _nak(messages, seconds=min(RETRY_SECONDS_MAX, 2.0 ** min(tries - 1, 9)))


async def _nak(messages: Iterable[Msg], *, seconds: float) -> None:
    for message in messages:
        await message.nak(delay=seconds)


async def _connect(url: str) -> Client:
    servers, credentials = split_credentials(url)
    connection = Client()
    options: dict[str, Any] = dict(credentials)
    await connection.connect(
        servers=servers,
        name="noetl-grpc run-projector",
        error_cb=_on_error,
        connect_timeout=2,
        max_reconnect_attempts=1,
        reconnect_time_wait=0,
        allow_reconnect=False,
        **options,
    )
    return connection


async def _on_error(error: Exception) -> None:
    logger.debug("broker: %r", error)


async def _subscribe(
    jetstream: JetStreamContext, durable: str, *, ack_wait_seconds: float
) -> JetStreamContext.PullSubscription:
    config = ConsumerConfig(
        durable_name=durable,
        ack_policy=AckPolicy.EXPLICIT,
        deliver_policy=DeliverPolicy.ALL,
        filter_subject=SUBJECTS,
        ack_wait=ack_wait_seconds,
        max_ack_pending=10_000,
    )
    try:
        # One that is there already keeps its settings: it may be somebody's on purpose.
        await jetstream.consumer_info(STREAM, durable)
    except nats.js.errors.NotFoundError:
        await jetstream.add_consumer(STREAM, config)
    return await jetstream.pull_subscribe_bind(durable=durable, stream=STREAM)
