"""`publish-outbox`: outbox rows to JetStream, in order per execution, each at least once.

It only talks to the service and to the broker. Copies of it may run side by side.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final

from noetl_grpc.broker import StreamSpec
from noetl_grpc.client import Consumption, NoetlClient
from noetl_grpc.client.outbox import OutboxRow
from noetl_grpc.core.messages import Destination, Message, encode_headers
from noetl_grpc.core.traceparent import HEADER as TRACE_HEADER
from noetl_grpc.workers.courier import Courier, MessageRefused

if TYPE_CHECKING:
    from noetl_grpc.spans import Spans

STREAM: Final = "noetl_outbox"
SUBJECT: Final = "noetl.outbox"

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


def stream_spec(*, retention_seconds: float, dedup_seconds: float) -> StreamSpec:
    """The stream of rows that name no subject of their own."""
    return StreamSpec(
        name=STREAM,
        subjects=f"{SUBJECT}.>",
        description="Outbox rows without a subject of their own",
        max_age_seconds=retention_seconds,
        duplicate_window_seconds=dedup_seconds,
    )


def message_id(row: OutboxRow) -> str:
    """The same in every attempt, so that a repeat is stored once."""
    return f"outbox-{row.shard}-{row.outbox_id}"


def destination_of(row: OutboxRow) -> Destination:
    """Where a trace says that it goes."""
    return Destination(row.subject) if row.subject else Destination(STREAM, f"{SUBJECT}.{{execution_id}}")


def message_of(row: OutboxRow, *, traceparent: str | None = None) -> Message:
    """The row as it goes to the broker; `traceparent` takes the place of the row's own."""
    subject = row.subject or f"{SUBJECT}.{row.execution_id or 'none'}"
    headers = {"Content-Type": "application/json"}
    for name, value in row.headers.items():
        if _HEADER_NAME.fullmatch(name) is None:
            raise MessageRefused(f"{name!r} is not a header name that NATS takes")
        if traceparent is None or name.lower() != TRACE_HEADER:
            headers[name] = value
    if traceparent is not None:
        headers[TRACE_HEADER] = traceparent
    # Last, so that nobody's header can make two rows one.
    headers["Nats-Msg-Id"] = message_id(row)
    return Message(subject, encode_headers(headers), row.payload_json.encode())


async def publish_outbox(
    client: NoetlClient,
    *,
    nats_url: str,
    spec: StreamSpec,
    concurrency: int = 256,
    lease_seconds: float = 30.0,
    tally: Consumption | None = None,
    spans: Spans | None = None,
) -> None:
    """Publish for ever. On cancellation what was sent is acknowledged and the rest is given back."""
    courier = Courier(nats_url, spec, name="noetl-grpc publish-outbox")

    async def publish(row: OutboxRow) -> None:
        if spans is None:
            await courier.send(message_of(row))
            return
        origins = (value for name, value in row.headers.items() if name.lower() == TRACE_HEADER)
        with spans.publish(destination_of(row), origins, message_id=message_id(row)) as span:
            await courier.send(message_of(row, traceparent=span.traceparent))

    carrying = asyncio.create_task(courier.run())
    consuming = asyncio.create_task(
        client.outbox.consume(
            publish,
            concurrency=concurrency,
            lease_seconds=lease_seconds,
            ready=courier.ready,
            tally=tally,
        )
    )
    try:
        done, _ = await asyncio.wait((carrying, consuming), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        # The courier goes last: handlers that still run need it.
        for task in (consuming, carrying):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
