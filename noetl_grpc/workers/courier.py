"""Carries single messages of many senders to JetStream, together, over a connection that may come and go."""

from __future__ import annotations

import asyncio
import logging

from noetl_grpc.broker import NO_STREAM, Broker, PublishInterrupted, StreamSpec
from noetl_grpc.client import Release
from noetl_grpc.client.channel import Pause
from noetl_grpc.core.messages import Message, Refusal, Refused
from noetl_grpc.errors import BrokerUnavailable

logger = logging.getLogger("noetl_grpc.publisher")


class MessageRefused(Exception):
    """The broker is there and does not want this message."""


class Courier:
    """One connection and the messages that wait for it. Whoever sends one learns what became of that one."""

    def __init__(self, url: str, spec: StreamSpec, *, name: str) -> None:
        self._url = url
        self._spec = spec
        self._name = name
        self._waiting: list[tuple[Message, asyncio.Future[None]]] = []
        self._has_waiting = asyncio.Event()
        self._is_up = asyncio.Event()

    async def ready(self) -> None:
        """Wait until there is a broker to send to."""
        await self._is_up.wait()

    async def send(self, message: Message) -> None:
        """Until JetStream has stored it. Raises Release while the broker is away, MessageRefused if it says no."""
        if not self._is_up.is_set():
            raise Release("the broker is away")
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((message, stored))
        self._has_waiting.set()
        await stored

    async def run(self) -> None:
        """Connect, carry, and connect again when the connection is lost, until cancelled."""
        pause = Pause()
        while True:
            try:
                broker = await Broker.connect(self._url, name=self._name)
                try:
                    for change in await broker.ensure_stream(self._spec, exclusive=False):
                        logger.info("%s", change)
                    self._is_up.set()
                    pause.reset()
                    logger.info("connected to the broker")
                    await self._carry(broker)
                finally:
                    self._is_up.clear()
                    self._give_back()
                    await broker.close()
            except BrokerUnavailable as error:
                logger.warning("%s; rows wait until the broker is back", error.message)
            await pause.wait()

    async def _carry(self, broker: Broker) -> None:
        """What came together goes together; meanwhile the next ones gather."""
        lost = asyncio.create_task(broker.closed.wait())
        lost.add_done_callback(lambda _: self._has_waiting.set())
        try:
            while not lost.done():
                await self._has_waiting.wait()
                self._has_waiting.clear()
                batch, self._waiting = self._waiting, []
                if batch:
                    await self._publish(broker, batch)
        finally:
            lost.cancel()
        raise BrokerUnavailable("the connection to the broker was lost")

    async def _publish(self, broker: Broker, batch: list[tuple[Message, asyncio.Future[None]]]) -> None:
        try:
            refused = await broker.publish([message for message, _ in batch])
        except PublishInterrupted as interrupted:
            for index, (_, stored) in enumerate(batch):
                _settle(stored, None if index in interrupted.acknowledged else Release(str(interrupted)))
            raise BrokerUnavailable(str(interrupted)) from interrupted
        except BaseException:
            for _, stored in batch:
                _settle(stored, Release("the publisher stops"))
            raise
        for index, (_, stored) in enumerate(batch):
            _settle(stored, _problem(refused.get(index)))

    def _give_back(self) -> None:
        batch, self._waiting = self._waiting, []
        for _, stored in batch:
            _settle(stored, Release("the broker is away"))


def _problem(refusal: Refusal | None) -> Exception | None:
    if refusal is None:
        return None
    if refusal.about is Refused.STREAM and refusal.text != NO_STREAM:
        # Full, out of resources, without a leader: no row is to blame.
        return Release(refusal.text)
    return MessageRefused(refusal.text)


def _settle(stored: asyncio.Future[None], problem: Exception | None) -> None:
    if stored.done():
        return  # its sender has gone
    if problem is None:
        stored.set_result(None)
    else:
        stored.set_exception(problem)
