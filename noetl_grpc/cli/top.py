"""`top`: a live screen of one server or of several behind one address, by gRPC alone."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Annotated, TypeVar

import typer
from rich.live import Live

from noetl_grpc.cli.gauges import Meter, Reading, render
from noetl_grpc.cli.remote import Session, command
from noetl_grpc.errors import NoetlError, Unauthenticated, Unavailable

app = typer.Typer()

T = TypeVar("T")

#: What the screen needs of the server's metrics.
METRICS = (
    "grpc_server_",
    "noetl_outbox_",
    "noetl_events_",
    "noetl_projection_",
    "noetl_event_stream_",
    "noetl_subscription",
)
ANSWER_SECONDS = 5.0
PARKED_SHOWN_MAX = 1000


@command(app)
async def top(
    session: Session,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.2, max=60)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print one screen and end.")] = False,
) -> None:
    """A live screen of a server. Outbox, tailer, events, read model, subscriptions and RPCs; q ends it.

    Example: noetl-grpc top --address noetl.example.org:443 --tls --token-file token
    """
    watch = _Watch(session)
    # The first look alone has no rates, and it shows at once whether we are let in.
    reading = await watch.look()
    if once or session.as_json or not session.console.is_terminal:
        while True:
            await asyncio.sleep(interval)
            reading = await watch.look()
            if session.as_json:
                session.line(reading.document())
            else:
                session.console.print(render(reading, *session.console.size))
            if once or not session.as_json:
                return
    async with _keys() as pressed:
        with Live(console=session.console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(render(reading, *session.console.size), refresh=True)
                if await _is_pressed(pressed, "qQ", seconds=interval):
                    return
                reading = await watch.look()


class _Watch:
    """Looks at the server again and again; a part that does not answer does not hide the others."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._meter = Meter()
        self._info = ""
        self._has_answered = False

    async def look(self) -> Reading:
        client = self._session.client
        metrics, outbox, tailer, parked, info = await asyncio.gather(
            self._ask(client.operations.server_metrics(METRICS, timeout=ANSWER_SECONDS)),
            self._ask(client.outbox.stats(timeout=ANSWER_SECONDS)),
            self._ask(client.operations.tailer_status(timeout=ANSWER_SECONDS)),
            self._ask(self._count_parked()),
            self._ask(client.operations.server_info(timeout=ANSWER_SECONDS)),
        )
        if not isinstance(metrics, NoetlError):
            self._meter.note(metrics, asyncio.get_running_loop().time())
        self._has_answered = True
        return Reading(
            address=client.address,
            at=datetime.now().astimezone(),
            info=info,
            outbox=outbox,
            tailer=tailer,
            parked=parked,
            metrics=metrics,
            meter=self._meter,
        )

    async def _ask(self, question: Awaitable[T]) -> T | NoetlError:
        try:
            return await question
        except NoetlError as error:
            # At the first look nothing is on the screen yet: then the command ends with a sentence.
            if not self._has_answered and isinstance(error, Unavailable | Unauthenticated):
                raise
            return error

    async def _count_parked(self) -> int:
        number = 0
        async for _ in self._session.client.projection.dead_events(page_size=PARKED_SHOWN_MAX):
            number += 1
            if number == PARKED_SHOWN_MAX:
                break
        return number


@asynccontextmanager
async def _keys() -> AsyncIterator[asyncio.Queue[str]]:
    """The keys as they are pressed; none where there is no keyboard."""
    pressed: asyncio.Queue[str] = asyncio.Queue()
    if not sys.stdin.isatty():
        yield pressed
        return
    import termios
    import tty

    # Opened anew: the event loop makes what it reads non-blocking, and standard input is shared with the output and
    # with the shell, which would find it so after us.
    descriptor = os.open(os.ttyname(sys.stdin.fileno()), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def read() -> None:
        with suppress(BlockingIOError):
            for key in os.read(descriptor, 64).decode(errors="ignore"):
                pressed.put_nowait(key)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield pressed
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        os.close(descriptor)


async def _is_pressed(pressed: asyncio.Queue[str], keys: str, *, seconds: float) -> bool:
    """Whether one of the keys is pressed within that time."""
    try:
        async with asyncio.timeout(seconds):
            while await pressed.get() not in keys:
                pass
    except TimeoutError:
        return False
    return True
