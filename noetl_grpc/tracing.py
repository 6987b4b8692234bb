"""Tracing by OpenTelemetry, where it is wanted: spans on their way to a collector, and a trace on its way to a server.

Nothing here loads OpenTelemetry before somebody asks for it. Where tracing is off, `None` stands for the spans.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from noetl_grpc.errors import SettingsError

if TYPE_CHECKING:
    from noetl_grpc.spans import Spans

#: How long the end of a process waits for its last spans to be taken.
FLUSH_SECONDS: Final = 5.0


@asynccontextmanager
async def exporting(endpoint: str, *, service: str) -> AsyncIterator[Spans | None]:
    """Spans that go to a collector for the length of the block; None without an endpoint.

    They are sent by a thread of their own. What a collector does, or that there is none, is nobody else's concern.
    """
    if not endpoint:
        yield None
        return
    try:
        from noetl_grpc.spans import open_export
    except ImportError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise SettingsError(
            "OTEL_EXPORTER_OTLP_ENDPOINT turns tracing on, and OpenTelemetry is missing;"
            " pip install 'noetl-grpc[otel]', or unset it"
        ) from None
    export = open_export(endpoint, service=service)
    try:
        yield export.spans
    finally:
        if not await _ends(export.close, seconds=FLUSH_SECONDS):
            export.give_up()


async def _ends(work: Callable[[], None], *, seconds: float) -> bool:
    """Whether blocking work is done in time. It runs in a thread that keeps no process from ending."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def run() -> None:
        try:
            work()
        finally:
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="last spans", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            await done.wait()
    except TimeoutError:
        return False
    return True


def outgoing() -> Sequence[tuple[str, str]]:
    """The trace that the running code is in, as metadata of a call."""
    # Whoever never loaded OpenTelemetry is inside no span.
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
