"""A tailer and nothing else, to be killed. `python -m noetl_grpc.checks._tailer DATABASE_URL BROKER_URL [backfill]`"""

from __future__ import annotations

import asyncio
import sys

from noetl_grpc.metrics import Metrics
from noetl_grpc.settings import EventStreamSettings
from noetl_grpc.tailer import ShardTailer, TailerOptions


async def main(database_url: str, broker_url: str, *, backfill: bool) -> None:
    """Tail until killed."""

    async def ignore() -> None:
        """Nobody asks for its health."""

    stream = EventStreamSettings()
    tailer = ShardTailer(
        shard=0,
        database_url=database_url,
        options=TailerOptions(
            broker_url=broker_url,
            batch_size=stream.batch_size,
            poll_seconds=stream.poll_ms / 1000,
            backfill=backfill,
            dedup_seconds=stream.dedup_seconds,
            retention_seconds=stream.retention_seconds,
        ),
        metrics=Metrics(),
        on_change=ignore,
    )
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await tailer.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], backfill="backfill" in sys.argv[3:]))
