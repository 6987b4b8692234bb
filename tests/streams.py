"""What a JetStream stream holds, read by a client of its own, and servers whose tailer is on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import nats
import orjson
from nats.aio.client import Client
from nats.js.errors import NotFoundError

from noetl_grpc.core.tailing import STREAM

WAIT_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Stored:
    """A message in the stream."""

    sequence: int
    subject: str
    headers: dict[str, str]
    data: bytes

    @property
    def body(self) -> Any:
        return orjson.loads(self.data)

    @property
    def key(self) -> tuple[int, int]:
        body = self.body
        return body["execution_id"], body["event_id"]


@asynccontextmanager
async def client(url: str) -> AsyncIterator[Client]:
    """A plain client of the broker."""

    async def ignore(error: Exception) -> None:
        """It says so by itself when it matters."""

    connection = await nats.connect(url, error_cb=ignore)
    try:
        yield connection
    finally:
        await connection.close()


async def messages(url: str, stream: str = STREAM) -> list[Stored]:
    """Everything the stream holds now; nothing where there is none."""
    async with client(url) as connection:
        js = connection.jetstream()
        try:
            state = (await js.stream_info(stream)).state
        except NotFoundError:
            return []
        found: list[Stored] = []
        if not state.messages:
            return found
        subscription = await js.subscribe(
            ">" if stream != STREAM else "noetl.events.>", stream=stream, ordered_consumer=True
        )
        while not found or found[-1].sequence < state.last_seq:
            message = await subscription.next_msg(timeout=5)
            found.append(
                Stored(
                    message.metadata.sequence.stream,
                    message.subject,
                    dict(message.headers or {}),
                    message.data,
                )
            )
        await subscription.unsubscribe()
        return found


async def wait_for_messages(url: str, count: int, *, seconds: float = WAIT_SECONDS) -> list[Stored]:
    """Until the stream holds at least so many."""
    async with client(url) as connection:

        async def has_come() -> bool:
            try:
                info = await connection.jetstream().stream_info(STREAM)
            except NotFoundError:
                return False
            return bool(info.state.messages >= count)

        await until(has_come, seconds=seconds)
    return await messages(url)


async def until(condition: Callable[[], Awaitable[object]], *, seconds: float = WAIT_SECONDS) -> None:
    """Wait for what other processes bring about, which tell nobody."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 (nobody sets an event for it)
            await asyncio.sleep(0.02)


async def until_tailing(conn: asyncpg.Connection, *, epoch: int = 1, shard: int = 0) -> None:
    """Wait until a tailer has taken its cursor: what is written from now on is published."""
    await until(
        lambda: conn.fetchval(
            "SELECT count(*) FROM noetl.log_cursor"
            " WHERE epoch >= $1 AND shard = $2 AND system_identifier IS NOT NULL",
            epoch,
            shard,
        )
    )
