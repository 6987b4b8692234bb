"""Subscriptions under contradictory callers, two servers, a clock that is an hour behind, and a kill."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import asyncpg
import grpc
from noetlpb.v1 import subscription_pb2 as pb
from noetlpb.v1 import subscription_pb2_grpc as rpc

from noetl_grpc import status
from noetl_grpc.checks.frame import Progress, Size, Verdict
from noetl_grpc.core.lifecycle import REGISTERED_EVENT, TRANSITIONS, Action, State
from noetl_grpc.dev.child import child
from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.postgres import Postgres
from noetl_grpc.errors import IllegalTransition, NoetlError, Unavailable

SUMMARY = "one legal history and one id per path, and a watch that tells it, on servers whose clocks disagree"

TOKEN = "check"
AUTHORIZATION = (("authorization", f"Bearer {TOKEN}"),)
CLOCKS_OFF_SECONDS = (0.0, -3600.0)
CALL_SECONDS = 60.0
WATCH_SECONDS = 30.0
RETRY_SECONDS = 0.02
#: A path is registered anew after its subscription was deactivated.
REGISTRATIONS_PER_PATH = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything."""

    paths: int
    registrations: int
    rounds: int
    transitions: int
    seconds_max: float


PLANS: dict[Size, Plan] = {
    "small": Plan(paths=2, registrations=20, rounds=2, transitions=60, seconds_max=60.0),
    "full": Plan(paths=20, registrations=50, rounds=40, transitions=100, seconds_max=600.0),
}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call, and what became of it in the end."""

    request_id: str
    action: Action
    answer: pb.Subscription | NoetlError


async def run(*, size: Size, seed: int, progress: Progress) -> Verdict:
    """The scenario on a database server of its own."""
    async with Postgres(durable=False) as postgres:
        url = await create_database(postgres, "noetl")
        return await run_on(url, size=size, seed=seed, progress=progress)


async def run_on(url: str, *, size: Size, seed: int, progress: Progress) -> Verdict:
    """Register, then move one subscription per round, the last one while a server is killed."""
    plan, verdict, chance = PLANS[size], Verdict("lifecycle", seed), random.Random(seed)
    async with asyncio.timeout(plan.seconds_max), AsyncExitStack() as stack:
        progress("starting two servers")
        servers = await _start_servers(url, stack)
        conn = await asyncpg.connect(url)
        stack.push_async_callback(conn.close)
        stubs = [server.stub for server in servers]
        for number in range(plan.paths):
            progress("registering", number, plan.paths)
            await _register(conn, stubs, f"path/{number}", plan.registrations, verdict)
        outcomes: Counter[str] = Counter()
        for number in range(plan.rounds):
            progress("contradicting", number, plan.rounds)
            killed = chance.choice(servers) if number == plan.rounds - 1 else None
            outcomes += await _contradict(
                conn, servers, f"round/{number}", plan.transitions, chance, verdict, killed=killed
            )
        verdict.figures = {
            "paths": plan.paths,
            "registrations": plan.paths * plan.registrations * REGISTRATIONS_PER_PATH,
            "rounds": plan.rounds,
            "transitions": plan.rounds * plan.transitions,
            **outcomes,
        }
    return verdict


@dataclass(frozen=True, slots=True)
class _Server:
    pid: int
    stub: rpc.SubscriptionServiceStub


async def _start_servers(url: str, stack: AsyncExitStack) -> list[_Server]:
    """One per clock. No process is started once gRPC's threads run."""
    running = await asyncio.gather(
        *(
            stack.enter_async_context(child("noetl_grpc.checks._server", url, TOKEN, str(seconds_off)))
            for seconds_off in CLOCKS_OFF_SECONDS
        )
    )
    return [
        _Server(
            one.pid,
            rpc.SubscriptionServiceStub(await stack.enter_async_context(grpc.aio.insecure_channel(one.line))),
        )
        for one in running
    ]


async def _add_entry(conn: asyncpg.Connection, path: str) -> None:
    await conn.execute("INSERT INTO noetl.catalog (path, version, kind) VALUES ($1, 1, 'subscription')", path)


async def _call(method: Any, request: Any) -> Any:
    try:
        return await method(request, metadata=AUTHORIZATION, timeout=CALL_SECONDS)
    except grpc.aio.AioRpcError as error:
        return status.from_rpc_error(error)


async def _register(
    conn: asyncpg.Connection,
    stubs: Sequence[rpc.SubscriptionServiceStub],
    path: str,
    count: int,
    verdict: Verdict,
) -> None:
    """Many at once give one id and one event, again and again after it was deactivated."""
    await _add_entry(conn, path)
    for again in range(REGISTRATIONS_PER_PATH):
        answers = await asyncio.gather(
            *(
                _call(stubs[n % 2].RegisterSubscription, pb.RegisterSubscriptionRequest(path=path))
                for n in range(count)
            )
        )
        failed = [answer for answer in answers if isinstance(answer, NoetlError)]
        verdict.require(not failed, f"{path}: registering failed: {failed[:1]}")
        if failed:
            return
        ids = {answer.subscription.subscription_id for answer in answers}
        created = sum(answer.created for answer in answers)
        verdict.require(len(ids) == 1, f"{path}: {len(ids)} ids for {count} registrations at once")
        verdict.require(created == 1, f"{path}: created was true {created} times")
        for subscription_id in ids:
            request = pb.DeactivateSubscriptionRequest(subscription_id=subscription_id)
            await _call(stubs[again % 2].DeactivateSubscription, request)
    events = await conn.fetchval(
        "SELECT count(*) FROM noetl.event WHERE node_name = $1 AND event_type = $2", path, REGISTERED_EVENT
    )
    verdict.require(
        events == REGISTRATIONS_PER_PATH,
        f"{path}: {events} events for {REGISTRATIONS_PER_PATH} subscriptions",
    )


async def _contradict(
    conn: asyncpg.Connection,
    servers: Sequence[_Server],
    path: str,
    count: int,
    chance: random.Random,
    verdict: Verdict,
    *,
    killed: _Server | None,
) -> Counter[str]:
    """Random actions at once, some sent to both servers, some lost with the killed one and sent again; and a watch."""
    await _add_entry(conn, path)
    registered = await _call(
        servers[chance.randrange(2)].stub.RegisterSubscription, pb.RegisterSubscriptionRequest(path=path)
    )
    subscription_id = registered.subscription.subscription_id
    survivors = [server for server in servers if server is not killed]
    kill_after = chance.randrange(count // 4, count // 2) if killed else count + 1
    done = 0

    async def attempt(request_id: str, action: Action, server: _Server, *, twice: bool) -> list[Attempt]:
        nonlocal done
        request = getattr(pb, f"{action.value.capitalize()}SubscriptionRequest")(
            subscription_id=subscription_id, request_id=request_id, actor="check", reason=action.value
        )
        method = f"{action.value.capitalize()}Subscription"
        targets = servers if twice else [server]
        answers = await asyncio.gather(*(_call(getattr(t.stub, method), request) for t in targets))
        done += 1
        if done == kill_after and killed is not None:
            os.kill(killed.pid, signal.SIGKILL)
        for place, answer in enumerate(answers):
            if isinstance(answer, Unavailable):
                # Nobody knows whether it was carried out; the same request elsewhere must tell.
                answers[place] = await _call(getattr(survivors[0].stub, method), request)
        return [
            Attempt(request_id, action, answer if isinstance(answer, NoetlError) else answer.subscription)
            for answer in answers
        ]

    watcher = _Watcher([server.stub for server in servers], path, random.Random(chance.random()))
    watching = asyncio.create_task(watcher.run())
    jobs = []
    for number in range(count):
        action = chance.choice(list(Action))
        server = servers[chance.randrange(2)]
        jobs.append(attempt(f"r-{number}", action, server, twice=chance.random() < 0.1))
    attempts = [one for some in await asyncio.gather(*jobs) for one in some]
    history = await _history(survivors[0].stub, subscription_id)
    _judge(path, history, attempts, verdict)
    expected = [event.event_id for event in history]
    try:
        async with asyncio.timeout(WATCH_SECONDS):
            await watcher.until(expected[-1])
    except TimeoutError:
        verdict.require(False, f"{path}: the watch did not come to the last event")
    watching.cancel()
    told = watcher.event_ids
    verdict.require(
        bool(told) and told == expected[-len(told) :],
        f"{path}: the watch told {len(told)} events that are not the last of the {len(expected)} in the history",
    )
    return Counter(_outcome(one.answer) for one in attempts)


class _Watcher:
    """Watches a path, by servers that it leaves again and again."""

    def __init__(
        self, stubs: Sequence[rpc.SubscriptionServiceStub], path: str, chance: random.Random
    ) -> None:
        self._stubs = stubs
        self._path = path
        self._chance = chance
        self._moved = asyncio.Event()
        self.event_ids: list[int] = []

    async def run(self) -> None:
        """Watch until cancelled."""
        token = ""
        while True:
            request = pb.WatchSubscriptionsRequest(path_prefix=self._path, resume_token=token)
            call = self._chance.choice(self._stubs).WatchSubscriptions(request, metadata=AUTHORIZATION)
            stay = self._chance.randrange(1, 40)
            try:
                async for message in call:
                    self.event_ids.append(int(message.subscription.etag))
                    self._moved.set()
                    token = message.resume_token
                    stay -= 1
                    if not stay:
                        break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(RETRY_SECONDS)
            finally:
                call.cancel()

    async def until(self, event_id: int) -> None:
        """Wait until it has been told of an event."""
        while not self.event_ids or self.event_ids[-1] != event_id:
            self._moved.clear()
            await self._moved.wait()


def _outcome(answer: pb.Subscription | NoetlError) -> str:
    if isinstance(answer, IllegalTransition):
        return "refused"
    return "failed" if isinstance(answer, NoetlError) else "accepted"


async def _history(stub: rpc.SubscriptionServiceStub, subscription_id: int) -> list[pb.SubscriptionEvent]:
    request = pb.ListSubscriptionEventsRequest(subscription_id=subscription_id, page_size=1000)
    events: list[pb.SubscriptionEvent] = []
    while True:
        page = await _call(stub.ListSubscriptionEvents, request)
        events.extend(page.events)
        request.page_token = page.next_page_token
        if not page.next_page_token:
            return events


def _judge(
    path: str, history: Sequence[pb.SubscriptionEvent], attempts: Sequence[Attempt], verdict: Verdict
) -> None:
    """The history is legal from start to end, and every accepted call is in it exactly once."""
    by_type = {transition.event_type: transition for transition in TRANSITIONS.values()}
    states = [State(pb.SubscriptionState.Name(e.state).removeprefix("SUBSCRIPTION_STATE_")) for e in history]
    verdict.require(
        bool(history) and history[0].event_type == REGISTERED_EVENT,
        f"{path}: does not begin with registering",
    )
    for before, event, after in zip(states, history[1:], states[1:], strict=False):
        transition = by_type.get(event.event_type)
        verdict.require(
            transition is not None and before in transition.allowed_from and transition.to is after,
            f"{path}: {event.event_type} led from {before.value} to {after.value}",
        )
    times = [event.created_at.ToNanoseconds() for event in history]
    verdict.require(times == sorted(times), f"{path}: the times of its events go back")

    written = Counter(event.request_id for event in history[1:])
    verdict.require(all(count == 1 for count in written.values()), f"{path}: a request wrote two events")
    ids = {event.request_id: str(event.event_id) for event in history[1:]}
    accepted = set()
    for one in attempts:
        if isinstance(one.answer, pb.Subscription):
            accepted.add(one.request_id)
            verdict.require(
                ids.get(one.request_id) == one.answer.etag,
                f"{path}: {one.request_id} ({one.action.value}) was accepted as {one.answer.etag}"
                f" and is in the history as {ids.get(one.request_id)}",
            )
        else:
            verdict.require(
                isinstance(one.answer, IllegalTransition), f"{path}: {one.request_id} failed: {one.answer}"
            )
    verdict.require(
        accepted == ids.keys(), f"{path}: events of calls that were not accepted: {ids.keys() - accepted}"
    )
