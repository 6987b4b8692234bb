"""Subscriptions: their lifecycle, their history, and a watch that misses nothing."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

import grpc
from noetlpb.v1 import subscription_pb2 as pb
from noetlpb.v1 import subscription_pb2_grpc as rpc

from noetl_grpc.client.channel import Line
from noetl_grpc.client.mapping import Id, duration, from_pb, number_of
from noetl_grpc.errors import NotFound


class SubscriptionState(StrEnum):
    """Where a subscription stands in its lifecycle."""

    UNSPECIFIED = "UNSPECIFIED"
    REGISTERED = "REGISTERED"
    ACTIVE = "ACTIVE"
    PAUSED = "PAUSED"
    DRAINING = "DRAINING"
    DEACTIVATED = "DEACTIVATED"


@dataclass(frozen=True, slots=True)
class SubscriptionRuntime:
    """The process that runs a subscription, by its last heartbeat."""

    runtime_id: str
    last_heartbeat_at: datetime
    lease_expires_at: datetime
    alive: bool
    in_flight: int | None
    backlog: int | None


@dataclass(frozen=True, slots=True)
class Subscription:
    """A subscription as its log tells."""

    subscription_id: Id
    path: str
    catalog_id: Id
    state: SubscriptionState
    last_event_type: str
    updated_at: datetime
    #: Give it back to act only on what you saw.
    etag: str
    runtime: SubscriptionRuntime | None


@dataclass(frozen=True, slots=True)
class Registration:
    """The subscription of a path, and whether this call made it."""

    subscription: Subscription
    created: bool


@dataclass(frozen=True, slots=True)
class SubscriptionEvent:
    """One step of a lifecycle."""

    event_id: Id
    event_type: str
    state: SubscriptionState
    created_at: datetime
    actor: str
    reason: str
    request_id: str


@dataclass(frozen=True, slots=True)
class SubscriptionChange:
    """What a watch tells: first the present (`initial`), then each change."""

    subscription: Subscription
    resume_token: str
    initial: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a runtime should do, and until when it holds the subscription."""

    subscription: Subscription
    lease_expires_at: datetime


class SubscriptionClient:
    """noetlpb.v1.SubscriptionService."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._stub = rpc.SubscriptionServiceStub(line.channel)

    async def register(self, path: str, *, timeout: float | None = None) -> Registration:
        """The living subscription of a catalog path; made if there is none."""
        request = pb.RegisterSubscriptionRequest(path=path)
        answer = await self._line.call(self._stub.RegisterSubscription, request, timeout=timeout)
        return from_pb(Registration, answer)

    async def activate(
        self,
        subscription_id: int,
        *,
        etag: str = "",
        actor: str = "",
        reason: str = "",
        request_id: str = "",
        timeout: float | None = None,
    ) -> Subscription:
        """To ACTIVE from REGISTERED, PAUSED, DEACTIVATED or ACTIVE."""
        request = pb.ActivateSubscriptionRequest(
            subscription_id=subscription_id, etag=etag, actor=actor, reason=reason, request_id=request_id
        )
        return await self._act(self._stub.ActivateSubscription, request, timeout)

    async def pause(
        self,
        subscription_id: int,
        *,
        etag: str = "",
        actor: str = "",
        reason: str = "",
        request_id: str = "",
        timeout: float | None = None,
    ) -> Subscription:
        """To PAUSED from ACTIVE or PAUSED."""
        request = pb.PauseSubscriptionRequest(
            subscription_id=subscription_id, etag=etag, actor=actor, reason=reason, request_id=request_id
        )
        return await self._act(self._stub.PauseSubscription, request, timeout)

    async def resume(
        self,
        subscription_id: int,
        *,
        etag: str = "",
        actor: str = "",
        reason: str = "",
        request_id: str = "",
        timeout: float | None = None,
    ) -> Subscription:
        """To ACTIVE from PAUSED or ACTIVE."""
        request = pb.ResumeSubscriptionRequest(
            subscription_id=subscription_id, etag=etag, actor=actor, reason=reason, request_id=request_id
        )
        return await self._act(self._stub.ResumeSubscription, request, timeout)

    async def drain(
        self,
        subscription_id: int,
        *,
        etag: str = "",
        actor: str = "",
        reason: str = "",
        request_id: str = "",
        timeout: float | None = None,
    ) -> Subscription:
        """To DRAINING from ACTIVE, PAUSED or DRAINING; its runtime ends it."""
        request = pb.DrainSubscriptionRequest(
            subscription_id=subscription_id, etag=etag, actor=actor, reason=reason, request_id=request_id
        )
        return await self._act(self._stub.DrainSubscription, request, timeout)

    async def deactivate(
        self,
        subscription_id: int,
        *,
        etag: str = "",
        actor: str = "",
        reason: str = "",
        request_id: str = "",
        timeout: float | None = None,
    ) -> Subscription:
        """To DEACTIVATED from any state."""
        request = pb.DeactivateSubscriptionRequest(
            subscription_id=subscription_id, etag=etag, actor=actor, reason=reason, request_id=request_id
        )
        return await self._act(self._stub.DeactivateSubscription, request, timeout)

    async def _act(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Any, Any], request: Any, timeout: float | None
    ) -> Subscription:
        # Lets gRPC's own retries be recognised, so that one call never becomes two events.
        request.request_id = request.request_id or uuid.uuid4().hex
        answer = await self._line.call(method, request, timeout=timeout)
        return from_pb(Subscription, answer.subscription)

    async def get(self, subscription_id: int, *, timeout: float | None = None) -> Subscription:
        """One subscription as it is now."""
        request = pb.GetSubscriptionRequest(subscription_id=subscription_id)
        answer = await self._line.call(self._stub.GetSubscription, request, timeout=timeout)
        return from_pb(Subscription, answer.subscription)

    async def find(self, path: str) -> Subscription:
        """The subscription of a path: the living one, else the last there was."""
        found: Subscription | None = None
        async for one in self.list(path_prefix=path):
            if one.path == path and (found is None or found.state is SubscriptionState.DEACTIVATED):
                found = one
        if found is None:
            raise NotFound(
                f"there is no subscription of {path}",
                reason="SUBSCRIPTION_NOT_FOUND",
                metadata={"path": path},
            )
        return found

    async def list(
        self,
        *,
        states: Iterable[SubscriptionState] = (),
        path_prefix: str = "",
        page_size: int = 0,
        unreachable_shards: set[int] | None = None,
    ) -> AsyncIterator[Subscription]:
        """Every subscription, page after page.

        A shard that does not answer is added to `unreachable_shards`: what it holds is then missing.
        """
        request = pb.ListSubscriptionsRequest(
            states=[number_of(state, pb.SubscriptionState) for state in states],  # type: ignore[misc]  # an int is what the enum is on the wire
            path_prefix=path_prefix,
            page_size=page_size,
        )
        async for page in self._line.pages(self._stub.ListSubscriptions, request):
            if unreachable_shards is not None:
                unreachable_shards.update(page.unreachable_shards)
            for subscription in page.subscriptions:
                yield from_pb(Subscription, subscription)

    async def events(self, subscription_id: int, *, page_size: int = 0) -> AsyncIterator[SubscriptionEvent]:
        """The lifecycle of one subscription, oldest first, page after page."""
        request = pb.ListSubscriptionEventsRequest(subscription_id=subscription_id, page_size=page_size)
        async for page in self._line.pages(self._stub.ListSubscriptionEvents, request):
            for event in page.events:
                yield from_pb(SubscriptionEvent, event)

    async def watch(
        self, *, subscription_id: int | None = None, path_prefix: str | None = None, resume_token: str = ""
    ) -> AsyncIterator[SubscriptionChange]:
        """The present, then each change, for ever. When the server goes away the watch goes on where it was."""
        request = pb.WatchSubscriptionsRequest(resume_token=resume_token)
        if subscription_id is not None:
            request.subscription_id = subscription_id
        elif path_prefix is not None:
            request.path_prefix = path_prefix
        async for response in self._line.resumed(self._stub.WatchSubscriptions, request):
            yield from_pb(SubscriptionChange, response)

    async def heartbeat(
        self,
        subscription_id: int,
        *,
        runtime_id: str,
        in_flight: int | None = None,
        backlog: int | None = None,
        lease_seconds: float = 0.0,
        timeout: float | None = None,
    ) -> Heartbeat:
        """Say that a runtime lives, and learn what it should do. `in_flight` 0 while DRAINING ends the subscription."""
        request = pb.HeartbeatSubscriptionRequest(
            subscription_id=subscription_id,
            runtime_id=runtime_id,
            in_flight=in_flight,
            backlog=backlog,
            lease=duration(lease_seconds),
        )
        answer = await self._line.call(self._stub.HeartbeatSubscription, request, timeout=timeout)
        return from_pb(Heartbeat, answer)
