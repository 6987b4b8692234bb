"""`publish-outbox`: outbox rows to JetStream, in order per execution, each at least once.

It only talks to the service and to the broker. Copies of it may run side by side.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

from noetl_grpc.broker import StreamSpec
from noetl_grpc.client import Consumption, NoetlClient
from noetl_grpc.client.outbox import OutboxRow
from noetl_grpc.core.messages import Message, encode_headers
from noetl_grpc.workers.courier import Courier, MessageRefused

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


def message_of(row: OutboxRow) -> Message:
    """The row as it goes to the broker. Its message id is the same in every attempt, so a repeat is stored once."""
    subject = row.subject or f"{SUBJECT}.{row.execution_id or 'none'}"
    headers = {"Content-Type": "application/json"}
    for name, value in row.headers.items():
        if _HEADER_NAME.fullmatch(name) is None:
            raise MessageRefused(f"{name!r} is not a header name that NATS takes")
        headers[name] = value
    # Last, so that nobody's header can make two rows one.
    headers["Nats-Msg-Id"] = f"outbox-{row.shard}-{row.outbox_id}"
    return Message(subject, encode_headers(headers), row.payload_json.encode())


async def publish_outbox(
    client: NoetlClient,
    *,
    nats_url: str,
    spec: StreamSpec,
    concurrency: int = 256,
    lease_seconds: float = 30.0,
    tally: Consumption | None = None,
) -> None:
    """Publish for ever. On cancellation what was sent is acknowledged and the rest is given back."""
    courier = Courier(nats_url, spec, name="noetl-grpc publish-outbox")

    async def publish(row: OutboxRow) -> None:
        await courier.send(message_of(row))

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
