"""`publish-outbox` and `run-projector`: two workers that are ready to run, as many copies as wanted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

import typer

from noetl_grpc import logs
from noetl_grpc.cli.remote import Session, command
from noetl_grpc.client import Consumption
from noetl_grpc.settings import WorkerSettings
from noetl_grpc.tracing import exporting
from noetl_grpc.workers.projector import ACK_WAIT_SECONDS, DURABLE, Progress, run_projector
from noetl_grpc.workers.publisher import publish_outbox, stream_spec

app = typer.Typer()

_NatsUrl = Annotated[
    str, typer.Option(help="The broker. Default: NOETL_NATS_URL, else that of `dev`.", show_default=False)
]


@command(app, "publish-outbox")
async def publish(
    session: Session,
    nats_url: _NatsUrl = "",
    concurrency: Annotated[
        int, typer.Option(help="Rows on their way at the same time.", min=1, max=5000)
    ] = 256,
    lease_seconds: Annotated[
        float,
        typer.Option(help="How soon the rows of a dead publisher are handed to another.", min=1, max=3600),
    ] = 30.0,
    retention_seconds: Annotated[
        int, typer.Option(help="How long the stream noetl_outbox keeps a message.", min=1)
    ] = 86_400,
    dedup_seconds: Annotated[
        int, typer.Option(help="How long it recognises a message that is sent again.", min=1)
    ] = 600,
) -> None:
    """Publish outbox rows to JetStream, in order per execution. SIGTERM ends it with nothing held.

    Example: noetl-grpc publish-outbox --nats-url nats://broker:4222
    """
    worker = WorkerSettings.from_env(nats_url=nats_url)
    logs.configure(level=worker.log_level, form=worker.log_format)
    spec = stream_spec(retention_seconds=retention_seconds, dedup_seconds=dedup_seconds)
    tally = Consumption()
    async with exporting(worker.tracing.endpoint, service="noetl-grpc-publish-outbox") as spans:
        await until_signal(
            publish_outbox(
                session.client,
                nats_url=worker.nats_url,
                spec=spec,
                concurrency=concurrency,
                lease_seconds=lease_seconds,
                tally=tally,
                spans=spans,
            )
        )
    _tell(session, tally)


@command(app, "run-projector")
async def project(
    session: Session,
    nats_url: _NatsUrl = "",
    durable: Annotated[str, typer.Option(help="The consumer that all copies share.")] = DURABLE,
    ack_wait_seconds: Annotated[
        float,
        typer.Option(
            help="How soon the messages of a dead copy are handed to another; set when it is made.", min=1
        ),
    ] = ACK_WAIT_SECONDS,
) -> None:
    """Advance the snapshots of executions as their events arrive. SIGTERM ends it after the batch at hand.

    Example: noetl-grpc run-projector --nats-url nats://broker:4222
    """
    worker = WorkerSettings.from_env(nats_url=nats_url)
    logs.configure(level=worker.log_level, form=worker.log_format)
    progress = Progress()
    async with exporting(worker.tracing.endpoint, service="noetl-grpc-run-projector") as spans:
        await until_signal(
            run_projector(
                session.client,
                nats_url=worker.nats_url,
                durable=durable,
                ack_wait_seconds=ack_wait_seconds,
                progress=progress,
                spans=spans,
            )
        )
    _tell(session, progress)


def _tell(session: Session, done: Consumption | Progress) -> None:
    """What it has done in its life."""
    if session.as_json:
        session.document(done)
    else:
        session.say(
            ", ".join(f"{number:,} {word.replace('_', ' ')}" for word, number in asdict(done).items())
        )


async def until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run it until it ends or a signal tells it to; a second signal ends it without its farewell."""
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    with suppress(asyncio.CancelledError):
        await task
