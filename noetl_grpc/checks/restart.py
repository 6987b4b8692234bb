"""Two servers behind one client, told to stop one after the other under load: no caller sees a failed call."""

from __future__ import annotations

import asyncio
import itertools
import socket
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass

import asyncpg

from noetl_grpc.checks.frame import Progress, Size, Verdict
from noetl_grpc.client import NoetlClient
from noetl_grpc.client.outbox import OutboxMessage
from noetl_grpc.dev.child import server_process
from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.postgres import Postgres
from noetl_grpc.errors import NoetlError

SUMMARY = "two servers restarted one after the other under load: zero failed calls seen by callers"

TOKEN = "check"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything."""

    callers: int
    rounds: int
    drain_seconds: float
    seconds_max: float


PLANS: dict[Size, Plan] = {
    "small": Plan(callers=20, rounds=1, drain_seconds=0.0, seconds_max=60.0),
    "full": Plan(callers=200, rounds=3, drain_seconds=1.0, seconds_max=900.0),
}


async def run(*, size: Size, seed: int, progress: Progress) -> Verdict:
    """The scenario on a database server of its own."""
    async with Postgres(durable=False) as postgres:
        url = await create_database(postgres, "noetl")
        return await run_on(url, size=size, seed=seed, progress=progress)


async def run_on(url: str, *, size: Size, seed: int, progress: Progress) -> Verdict:
    """Callers write and read without a pause while each server is stopped and started again, round by round."""
    plan, verdict = PLANS[size], Verdict("restart", seed)
    ports = _free_ports(2)
    stopping = asyncio.Event()
    numbers = itertools.count(1)
    done = restarts = 0

    async def caller(client: NoetlClient) -> None:
        nonlocal done
        while not stopping.is_set():
            number = next(numbers)
            try:
                await client.outbox.enqueue([OutboxMessage(event_id=number, payload_json="{}")])
                await client.operations.server_info()
            except NoetlError as error:
                verdict.require(False, f"a caller saw {type(error).__name__}: {error}")
            done += 1

    async with asyncio.timeout(plan.seconds_max), AsyncExitStack() as stack:
        progress("starting two servers")
        servers = [_Restartable(url, port, plan.drain_seconds) for port in ports]
        for server in servers:
            stack.push_async_callback(server.stop)
            await server.start()
        address = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
        client = await stack.enter_async_context(NoetlClient(address, token=TOKEN))
        callers = [asyncio.create_task(caller(client)) for _ in range(plan.callers)]
        try:
            for server in servers * plan.rounds:
                progress("restarts", restarts, len(servers) * plan.rounds)
                await _until_both_serve(client)
                await server.stop()
                await server.start()
                restarts += 1
            await _until_both_serve(client)
        finally:
            stopping.set()
            await asyncio.gather(*callers)
    conn = await asyncpg.connect(url)
    try:
        stored = await conn.fetchval("SELECT count(*) FROM noetl.outbox")
    finally:
        await conn.close()
    verdict.require(
        verdict.violations != [] or stored == done, f"{done} messages were sent, {stored} are stored"
    )
    verdict.figures.update(callers=plan.callers, restarts=restarts, calls=2 * done, stored=stored)
    return verdict


class _Restartable:
    """A server that comes back on its port."""

    def __init__(self, url: str, port: int, drain_seconds: float) -> None:
        self._url = url
        self._env = {"NOETL_GRPC_PORT": str(port), "NOETL_DRAIN_SECS": str(drain_seconds)}
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        await self._stack.enter_async_context(server_process(self._url, token=TOKEN, env=self._env))

    async def stop(self) -> None:
        """SIGTERM, and wait until it has gone."""
        await self._stack.aclose()


async def _until_both_serve(client: NoetlClient) -> None:
    """As a rollout waits for readiness: the client has found its way back to the server that was restarted."""
    instances: set[str] = set()
    while len(instances) < 2:
        with suppress(NoetlError):  # only what the callers see counts
            instances.add((await client.operations.server_metrics(["noetl_build_info"])).instance)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody has just now; held together, so that they differ."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
