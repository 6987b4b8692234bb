"""NATS JetStream: connect, keep a stream as it should be, publish many messages with their acknowledgements.

A connection is never mended underneath us: the client would send what it had buffered, out of order and after
somebody else may have taken over. When it breaks it is closed, and whoever uses it opens a new one.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import nats
import nats.errors
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from noetl_grpc.core.messages import Message, Refusal, Refused, is_subject, refusal
from noetl_grpc.errors import BrokerUnavailable

logger = logging.getLogger("noetl_grpc.broker")

#: Why a message was refused whose subject belongs to nobody.
NO_STREAM: Final = "no stream takes the subject"

CONNECT_SECONDS: Final = 5.0
API_SECONDS: Final = 5.0
#: Without a single acknowledgement for so long the broker counts as gone.
ACK_SECONDS: Final = 5.0
#: Sent and not yet acknowledged, at most. JetStream drops what comes faster than it can queue.
WINDOW_MESSAGES: Final = 4096
WINDOW_BYTES: Final = 16 * 1024 * 1024
#: The client writes to its socket only when we pause; four parts make a message.
_CHUNK_PARTS: Final = 4 * 100
#: Above what one window holds, so that the client never blocks in the middle of a publish, where it would swallow
#: a cancellation.
_CLIENT_BUFFER_BYTES: Final = 64 * 1024 * 1024
#: A fast batch waits for the server's leave before its second message; below this a window is quicker.
_FAST_MESSAGES_MIN: Final = 64
_FAST_VERSION: Final = (2, 14)
_FAST_FLOW: Final = 500
_FAST_OUTSTANDING: Final = 2

#: Read at a time.
_READ_MESSAGES: Final = 2000

_OVERLAP_ERROR: Final = 10065
_STREAM_NOT_FOUND: Final = 10059
_NO_JETSTREAM: Final = frozenset({10039, 10076})
_FAST_NOT_ALLOWED: Final = frozenset({10205, 10206})
_FORBIDDEN: Final = re.compile(r'permissions violation for publish to "([^"]+)"', re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """The stream as we want it."""

    name: str
    subjects: str
    description: str
    max_age_seconds: float
    duplicate_window_seconds: float


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """The stream as it is."""

    max_age_seconds: float
    first_sequence: int
    last_sequence: int
    #: Whether it drops messages for other reasons than their age.
    is_limited: bool
    first_time: datetime


class PublishInterrupted(Exception):
    """The connection or the acknowledgements ended in the middle. For publishers, who know what to do about it."""

    def __init__(self, message: str, *, acknowledged: frozenset[int]) -> None:
        super().__init__(message)
        self.acknowledged = acknowledged


class _Client(Client):
    """NATS's own client, with a way to send what is encoded already."""

    async def send(self, commands: bytes) -> None:
        """Like publish() for many messages; its checks of each header of each message cost more than all the rest."""
        if not self.is_connected:
            raise nats.errors.ConnectionClosedError
        await self._send_command(commands)
        if self._flush_queue is not None and self._flush_queue.empty():
            await self._flush_pending()


class _Flight:
    """The messages of one publish call, and what is known of each."""

    def __init__(self, messages: Sequence[Message], *, first_number: int) -> None:
        self.messages = messages
        #: The number of the first message on this connection; replies name theirs.
        self.first_number = first_number
        self.acknowledged: set[int] = set()
        self.refused: dict[int, Refusal] = {}
        self.sent = 0
        self.bytes_in_flight = 0
        self.progress = asyncio.Event()

    @property
    def in_flight(self) -> int:
        return self.sent - len(self.acknowledged) - len(self.refused)

    @property
    def is_full(self) -> bool:
        return self.in_flight >= WINDOW_MESSAGES or self.bytes_in_flight >= WINDOW_BYTES

    def acknowledge(self, index: int) -> None:
        if index not in self.acknowledged and index not in self.refused:
            self.acknowledged.add(index)
            self._settle(index)

    def refuse(self, index: int, why: Refusal) -> None:
        if index not in self.acknowledged and index not in self.refused:
            self.refused[index] = why
            self._settle(index)

    def refuse_subject(self, subject: str, why: Refusal) -> None:
        for index in range(self.sent):
            if self.messages[index].subject == subject:
                self.refuse(index, why)

    def _settle(self, index: int) -> None:
        self.bytes_in_flight -= self.messages[index].byte_length
        self.progress.set()


class _FastBatch:
    """One batch by which the server acknowledges many messages at once, in order and without gaps."""

    def __init__(self, identifier: str) -> None:
        self.identifier = identifier
        #: Messages at the front that are stored.
        self.stored = 0
        self.sent = 0
        self.flow = 1
        self.is_open = False
        self.is_over = False
        self.problem = ""
        self.error_code = 0
        self.progress = asyncio.Event()

    @property
    def must_wait(self) -> bool:
        """Whether the server wants no more just now. It first says whether it wants any at all."""
        if self.problem or self.is_over:
            return False
        return not self.is_open or self.sent - self.stored > self.flow * _FAST_OUTSTANDING

    def tell(self, data: bytes) -> None:
        """What the server says of the batch."""
        answer = orjson.loads(data) if data else {}
        match answer.get("type"):
            case "ack":
                self.is_open = True
                self.stored = max(self.stored, answer["seq"])
                self.flow = answer["msgs"]
            case "gap":
                self.fail("messages were lost on the way")
            case "err":
                self._fail_with(answer)
            case None if "error" in answer or "stream" not in answer:
                self._fail_with(answer)
                self.is_over = True
            case None:
                self.stored = max(self.stored, answer.get("count", 0))
                self.is_over = True
        self.progress.set()

    def _fail_with(self, answer: dict[str, Any]) -> None:
        error = answer.get("error") or {}
        self.fail(error.get("description", "the stream does not answer"), error.get("err_code", 0))

    def fail(self, problem: str, error_code: int = 0) -> None:
        """Note why the batch stopped; the first reason counts."""
        self.problem = self.problem or problem
        self.error_code = self.error_code or error_code
        self.progress.set()


class Broker:
    """One connection. Every publish waits for JetStream's word on each of its messages."""

    def __init__(self, client: _Client) -> None:
        self._client = client
        self._inbox = ""
        self._stream = ""
        self._fast = False
        #: Numbers given to messages and batches, so that a late answer is not taken for another one's.
        self._messages = 0
        self._batches = 0
        self._flight: _Flight | None = None
        self._batch: _FastBatch | None = None
        self._turn = asyncio.Lock()
        #: Asked before each chunk; a publisher that may have been replaced meanwhile says no.
        self.may_send: Callable[[], bool] = lambda: True
        self.closed = asyncio.Event()

    @classmethod
    async def connect(cls, url: str, *, name: str) -> Broker:
        """A connection to the first server that answers; credentials in the URL are passed on."""
        client = _Client()
        broker = cls(client)
        servers, credentials = split_credentials(url)
        options: dict[str, Any] = {**credentials}
        if any(server.startswith(("tls:", "wss:")) for server in servers):
            options["tls"] = ssl.create_default_context()
        try:
            async with asyncio.timeout(CONNECT_SECONDS * len(servers)):
                await client.connect(
                    servers=servers,
                    name=name,
                    error_cb=broker._on_error,
                    closed_cb=broker._on_closed,
                    allow_reconnect=False,
                    connect_timeout=2,
                    # Two tries with each server; then the client gives up, and we say so.
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    ping_interval=10,
                    max_outstanding_pings=2,
                    pending_size=_CLIENT_BUFFER_BYTES,
                    **options,
                )
                broker._inbox = client.new_inbox()
                await client.subscribe(f"{broker._inbox}.>", cb=broker._on_answer)
        except (nats.errors.Error, OSError, TimeoutError) as error:
            await broker.close()
            raise BrokerUnavailable(_connect_problem(error)) from error
        return broker

    @property
    def message_bytes_max(self) -> int:
        """The largest message with its headers that the server takes."""
        return int(self._client.max_payload)

    @property
    def version(self) -> tuple[int, int]:
        """Of the server."""
        version = self._client.connected_server_version
        return version.major, version.minor

    @property
    def in_flight(self) -> int:
        """Messages sent and not yet acknowledged."""
        if self._batch is not None:
            return self._batch.sent - self._batch.stored
        return self._flight.in_flight if self._flight is not None else 0

    async def close(self) -> None:
        """End the connection; what is not acknowledged may or may not be stored."""
        with suppress(nats.errors.Error, OSError, TimeoutError):
            async with asyncio.timeout(API_SECONDS):
                await self._client.close()
        self._on_lost()

    async def ensure_stream(self, spec: StreamSpec, *, exclusive: bool = True) -> list[str]:
        """Make the stream, or bring it in line; what was changed.

        `exclusive` is for a connection whose messages must all go to this stream; without it other streams'
        acknowledgements count too. Raises BrokerUnavailable naming what differs and can't be changed safely, or who
        has the subjects.
        """
        info = await self._api(f"STREAM.INFO.{spec.name}", expected_error=_STREAM_NOT_FOUND)
        if info is None:
            await self._create(spec)
            if exclusive:
                self._use(spec, allows_fast=self.version >= _FAST_VERSION)
            return [f"stream {spec.name} was made"]
        config: dict[str, Any] = info["config"]
        problems = _unsafe_differences(config, spec)
        if problems:
            raise BrokerUnavailable(f"stream {spec.name} can't be used: {'; '.join(problems)}")
        wanted = _safe_settings(spec, fast=self.version >= _FAST_VERSION)
        changes = {key: value for key, value in wanted.items() if config.get(key) != value}
        if changes:
            # Everything else stays as it is, also what this client has never heard of.
            updated = await self._ask(f"STREAM.UPDATE.{spec.name}", {**config, **changes})
            config = updated["config"]
        if exclusive:
            self._use(spec, allows_fast=bool(config.get("allow_batched")) and self.version >= _FAST_VERSION)
        return [f"{key} of stream {spec.name} was set to {value}" for key, value in changes.items()]

    async def _create(self, spec: StreamSpec) -> None:
        config = {
            "name": spec.name,
            "subjects": [spec.subjects],
            "description": spec.description,
            "retention": "limits",
            "storage": "file",
            "discard": "old",
            "num_replicas": 1,
            "allow_direct": True,
            **_safe_settings(spec, fast=self.version >= _FAST_VERSION),
        }
        if await self._api(f"STREAM.CREATE.{spec.name}", config, expected_error=_OVERLAP_ERROR) is None:
            found = await self._ask("STREAM.NAMES", {"subject": spec.subjects})
            owners = ", ".join(found.get("streams") or ["another stream"])
            raise BrokerUnavailable(
                f"the subjects {spec.subjects} belong to stream {owners}; stream {spec.name} can't be made beside it"
            )

    def _use(self, spec: StreamSpec, *, allows_fast: bool) -> None:
        self._stream = spec.name
        self._fast = allows_fast

    async def stream_facts(self, name: str) -> StreamFacts:
        """What the stream holds."""
        info = await self._ask(f"STREAM.INFO.{name}")
        config, state = info["config"], info["state"]
        limits = (config.get(key, -1) for key in ("max_msgs", "max_bytes", "max_msgs_per_subject"))
        return StreamFacts(
            max_age_seconds=config.get("max_age", 0) / 1e9,
            first_sequence=state["first_seq"],
            last_sequence=state["last_seq"],
            is_limited=any(limit > 0 for limit in limits),
            first_time=datetime.fromisoformat(state["first_ts"][:19]).replace(tzinfo=UTC),
        )

    async def message_ids(self, stream: str, *, last_sequence: int) -> AsyncIterator[list[str]]:
        """The ids of all messages up to that one, some at a time. Bodies stay where they are."""
        consumer = ConsumerConfig(
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.NONE,
            headers_only=True,
            mem_storage=True,
            inactive_threshold=60.0,
        )
        try:
            subscription = await self._client.jetstream(timeout=API_SECONDS).pull_subscribe(
                ">", stream=stream, config=consumer
            )
            pending = (await subscription.consumer_info()).num_pending
            sequence = 0
            while pending and sequence < last_sequence:
                messages = await subscription.fetch(_READ_MESSAGES, timeout=ACK_SECONDS)
                yield [(message.headers or {}).get("Nats-Msg-Id", "") for message in messages]
                last = messages[-1].metadata
                pending, sequence = last.num_pending, last.sequence.stream
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise BrokerUnavailable("the stream could not be read to its end") from error

    async def publish(self, messages: Sequence[Message]) -> dict[int, Refusal]:
        """Send all of them and wait until JetStream has answered for each; the refused ones by their index.

        They are stored in this order, but for refused ones. Raises PublishInterrupted with what was acknowledged
        until then.
        """
        async with self._turn:
            refused = {index: why for index, message in enumerate(messages) if (why := self._unfit(message))}
            stored = 0
            if self._fast and len(messages) >= _FAST_MESSAGES_MIN and not refused:
                stored = await self._publish_fast(messages)
                if stored == len(messages):
                    return {}
            flight = self._flight = _Flight(messages, first_number=self._messages)
            self._messages += len(messages)
            flight.refused |= refused
            # What a batch that stopped had stored is not sent again.
            flight.acknowledged |= set(range(stored))
            try:
                await self._publish_in_window(flight)
            finally:
                self._flight = None
        return flight.refused

    def _unfit(self, message: Message) -> Refusal | None:
        """Why a message must not be sent: the server would end the connection instead of refusing it."""
        if message.byte_length > self.message_bytes_max:
            return Refusal(
                Refused.MESSAGE, f"it is larger than the server's limit of {self.message_bytes_max} bytes"
            )
        if not is_subject(message.subject):
            return Refusal(Refused.MESSAGE, "its subject is not one that NATS takes")
        return None

    async def _publish_in_window(self, flight: _Flight) -> None:
        """Each message is acknowledged by itself, under a reply subject that names it."""
        commands: list[bytes] = []
        known = flight.acknowledged | flight.refused.keys()
        for index, message in enumerate(flight.messages):
            flight.sent += 1
            if index in known:
                continue
            commands += _command(message, f"{self._inbox}.w.{flight.first_number + index}")
            flight.bytes_in_flight += message.byte_length
            if len(commands) >= _CHUNK_PARTS or flight.is_full:
                await self._send(commands, acknowledged=flight.acknowledged)
                while flight.is_full:
                    await self._wait_for(flight.progress, acknowledged=flight.acknowledged)
        await self._send(commands, acknowledged=flight.acknowledged)
        while flight.in_flight:
            await self._wait_for(flight.progress, acknowledged=flight.acknowledged)

    async def _publish_fast(self, messages: Sequence[Message]) -> int:
        """How many at the front a fast batch (NATS ADR-50) has stored; all of them unless something is wrong."""
        self._batches += 1
        batch = self._batch = _FastBatch(f"{self._inbox.rpartition('.')[2]}-{self._batches}")
        try:
            await self._fill(batch, messages)
        finally:
            self._batch = None
        if batch.problem:
            logger.debug("fast batch stopped after %d messages: %s", batch.stored, batch.problem)
        if batch.error_code in _FAST_NOT_ALLOWED:
            self._fast = False
        return batch.stored

    async def _fill(self, batch: _FastBatch, messages: Sequence[Message]) -> None:
        # Gaps fail the batch: then what is acknowledged is stored without holes, and in order.
        replies = f"{self._inbox}.{batch.identifier}.{_FAST_FLOW}.fail"
        commands: list[bytes] = []
        for index, message in enumerate(messages):
            operation = 0 if index == 0 else 2 if index == len(messages) - 1 else 1
            commands += _command(message, f"{replies}.{index + 1}.{operation}.$FI")
            batch.sent += 1
            if len(commands) >= _CHUNK_PARTS or batch.must_wait:
                await self._send(commands, acknowledged=range(batch.stored))
                while batch.must_wait:
                    await self._wait_for(batch.progress, acknowledged=range(batch.stored))
                if batch.problem:
                    return
        await self._send(commands, acknowledged=range(batch.stored))
        while not batch.is_over and not batch.problem:
            await self._wait_for(batch.progress, acknowledged=range(batch.stored))

    async def _send(self, commands: list[bytes], *, acknowledged: Iterable[int]) -> None:
        """Hand commands to the client, and the loop to the client."""
        if not self.may_send():
            raise _interrupted("somebody else may publish by now", acknowledged)
        try:
            await self._client.send(b"".join(commands))
        except (nats.errors.Error, OSError) as error:
            raise _interrupted("the connection to the broker was lost", acknowledged) from error
        commands.clear()
        await asyncio.sleep(0)

    async def _wait_for(self, progress: asyncio.Event, *, acknowledged: Iterable[int]) -> None:
        if self.closed.is_set():
            raise _interrupted("the connection to the broker was lost", acknowledged)
        try:
            async with asyncio.timeout(ACK_SECONDS):
                await progress.wait()
        except TimeoutError:
            raise _interrupted(
                f"the broker acknowledged nothing for {ACK_SECONDS:g} s", acknowledged
            ) from None
        progress.clear()

    async def _on_answer(self, answer: Msg) -> None:
        kind, _, rest = answer.subject[len(self._inbox) + 1 :].partition(".")
        if kind == "w":
            self._on_ack(int(rest), answer.data)
        elif self._batch is not None and kind == self._batch.identifier:
            self._batch.tell(answer.data)

    def _on_ack(self, number: int, data: bytes) -> None:
        flight = self._flight
        if flight is None or not 0 <= number - flight.first_number < len(flight.messages):
            return  # of a publish that was given up
        index = number - flight.first_number
        if b'"error"' not in data and self._is_ours(data):
            flight.acknowledge(index)
        elif not data:
            flight.refuse(index, Refusal(Refused.STREAM, NO_STREAM))
        else:
            error = orjson.loads(data).get("error") or {"description": "another stream took the message"}
            why = refusal(
                code=error.get("code", 500),
                error_code=error.get("err_code", 0),
                text=error.get("description", "refused"),
            )
            flight.refuse(index, why)

    def _is_ours(self, data: bytes) -> bool:
        return b'"stream":"%s"' % self._stream.encode() in data if self._stream else bool(data)

    async def _on_error(self, error: Exception) -> None:
        logger.debug("broker: %r", error)
        forbidden = _FORBIDDEN.search(str(error))
        if forbidden and self._flight is not None:
            why = Refusal(Refused.UNCLEAR, "the broker forbids publishing to its subject")
            self._flight.refuse_subject(forbidden[1], why)
        if forbidden and self._batch is not None:
            self._batch.fail("the broker forbids publishing to a subject")

    async def _on_closed(self) -> None:
        self._on_lost()

    def _on_lost(self) -> None:
        self.closed.set()
        for waiting in (self._flight, self._batch):
            if waiting is not None:
                waiting.progress.set()

    async def _ask(self, subject: str, document: object = None) -> dict[str, Any]:
        """Ask JetStream's management API."""
        reply = await self._api(subject, document)
        assert reply is not None
        return reply

    async def _api(
        self, subject: str, document: object = None, *, expected_error: int | None = None
    ) -> dict[str, Any] | None:
        """The same, None for an error that the caller knows what to do about."""
        payload = b"" if document is None else orjson.dumps(document)
        try:
            answer = await self._client.request(f"$JS.API.{subject}", payload, timeout=API_SECONDS)
        except nats.errors.NoRespondersError as error:
            raise BrokerUnavailable("the broker's account has no JetStream") from error
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise BrokerUnavailable("the broker does not answer") from error
        reply: dict[str, Any] = orjson.loads(answer.data)
        problem = reply.get("error")
        if problem is None:
            return reply
        if problem.get("err_code") == expected_error:
            return None
        if problem.get("err_code") in _NO_JETSTREAM:
            raise BrokerUnavailable("the broker's account has no JetStream")
        raise BrokerUnavailable(f"the broker refuses: {problem.get('description', 'it does not say why')}")


def _command(message: Message, reply: str) -> tuple[bytes, bytes, bytes, bytes]:
    head = f"HPUB {message.subject} {reply} {len(message.headers)} {message.byte_length}\r\n"
    return head.encode(), message.headers, message.body, b"\r\n"


def _interrupted(problem: str, acknowledged: Iterable[int]) -> PublishInterrupted:
    return PublishInterrupted(problem, acknowledged=frozenset(acknowledged))


def split_credentials(url: str) -> tuple[list[str], dict[str, str]]:
    """The servers of a comma-separated URL without credentials, and the first credentials among them."""
    servers: list[str] = []
    credentials: dict[str, str] = {}
    for part in (part.strip() for part in url.split(",")):
        split = urlsplit(part)
        host = split.netloc.rpartition("@")[2]
        servers.append(split._replace(netloc=host).geturl())
        if not credentials and split.username is not None:
            user = unquote(split.username)
            if split.password is None:
                credentials = {"token": user}
            else:
                credentials = {"user": user, "password": unquote(split.password)}
    return servers, credentials


def _connect_problem(error: BaseException) -> str:
    text = str(error).lower()
    if "authorization" in text or "authentication" in text:
        return "the broker refuses our credentials"
    return "the broker is out of reach"


def _safe_settings(spec: StreamSpec, *, fast: bool) -> dict[str, Any]:
    """What may be changed on a living stream."""
    settings: dict[str, Any] = {
        "max_age": int(spec.max_age_seconds * 1e9),
        "duplicate_window": int(spec.duplicate_window_seconds * 1e9),
    }
    if fast:
        settings["allow_batched"] = True
    return settings


def _unsafe_differences(config: dict[str, Any], spec: StreamSpec) -> list[str]:
    """What would lose messages or keep us from publishing, and is for its owner to change."""
    problems = [
        f"its {key} is {config.get(key)}, expected {wanted}"
        for key, wanted in (("storage", "file"), ("retention", "limits"))
        if config.get(key) != wanted
    ]
    if config.get("mirror"):
        problems.append("it is a mirror")
    elif spec.subjects not in config.get("subjects", ()):
        taken = ", ".join(config.get("subjects") or ["none"])
        problems.append(f"its subjects are {taken}, expected {spec.subjects}")
    problems += [f"it is set to {key}" for key in ("sealed", "no_ack") if config.get(key)]
    return problems
