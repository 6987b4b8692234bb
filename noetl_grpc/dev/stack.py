"""PostgreSQL and NATS together, as `noetl-grpc dev`, the checks and the benches need them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from noetl_grpc.dev.nats import Nats
from noetl_grpc.dev.postgres import Postgres


class Stack:
    """Both servers under one folder, or in temporary ones; started side by side, ended together."""

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        durable: bool = True,
        settings: Mapping[str, str] | None = None,
        max_payload: int | None = None,
    ) -> None:
        self.postgres = Postgres(data_dir and data_dir / "postgres", settings=settings, durable=durable)
        self.nats = Nats(data_dir and data_dir / "nats", max_payload=max_payload)

    async def __aenter__(self) -> Self:
        try:
            started = await asyncio.gather(self.postgres.start(), self.nats.start(), return_exceptions=True)
            for failure in started:
                if isinstance(failure, BaseException):
                    raise failure
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.gather(self.postgres.close(), self.nats.close())
