"""How far something is: a bar on standard error, and nothing where nobody looks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from noetl_grpc.cli.remote import Session
from noetl_grpc.client import NoetlClient
from noetl_grpc.errors import NoetlError

T = TypeVar("T")

LOOK_SECONDS = 0.5


def bar(console: Console) -> Progress:
    """A bar that goes away when it is done."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


async def counted(
    session: Session, work: Coroutine[Any, Any, T], text: str, *, counter: str, total: int | None = None
) -> T:
    """Await one long call. A counter that the server keeps tells how far it is."""
    with bar(session.aside) as shown:
        task = shown.add_task(text, total=total)
        if shown.disable:
            return await work
        growth = Growth(session.client, counter)
        await growth.look()
        following = asyncio.create_task(growth.follow(lambda done: shown.update(task, completed=done)))
        try:
            return await work
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


class Growth:
    """How much a counter has grown since the first look, over every process that answers."""

    def __init__(self, client: NoetlClient, counter: str) -> None:
        self._client = client
        self._counter = counter
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}

    async def look(self) -> int:
        """By how much by now; 0 for a token that may not read the metrics."""
        try:
            metrics = await self._client.operations.server_metrics((self._counter,))
        except NoetlError:
            return 0
        value = sum(sample.value for sample in metrics.samples)
        self._first.setdefault(metrics.instance, value)
        self._last[metrics.instance] = value
        return int(sum(self._last.values()) - sum(self._first.values()))

    async def follow(self, show: Callable[[int], None]) -> None:
        """Show it again and again, until cancelled."""
        while True:
            show(await self.look())
            await asyncio.sleep(LOOK_SECONDS)
