"""SubscriptionService: an event-sourced lifecycle, each change checked and written under the subscription's lock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TypeAlias

from noetlpb.v1 import subscription_pb2 as pb
from noetlpb.v1 import subscription_pb2_grpc as rpc

from noetl_grpc import calls
from noetl_grpc.calls import Context
from noetl_grpc.convert.moments import timestamp_to_pb
from noetl_grpc.convert.subscription import (
    subscription_event_to_pb,
    subscription_state_from_pb,
    subscription_to_pb,
)
from noetl_grpc.core import fields, lifecycle, paging, watching
from noetl_grpc.core.lifecycle import Action, Cause, Report, Subscription
from noetl_grpc.core.watching import Target
from noetl_grpc.errors import Unavailable
from noetl_grpc.follower import Follower
from noetl_grpc.services.fanout import all_or_raise, ask_every_shard
from noetl_grpc.services.registration import Registrar
from noetl_grpc.services.subscription_answers import merge, subscription_not_found
from noetl_grpc.services.subscription_watch import Feed, Watch
from noetl_grpc.services.turns import Turns
from noetl_grpc.storage import subscriptions
from noetl_grpc.storage.pool import Connection, Pool, Shards

ACTOR_CHARACTERS_MAX = 256
REASON_CHARACTERS_MAX = 2000
REQUEST_ID_CHARACTERS_MAX = 128
RUNTIME_ID_CHARACTERS_MAX = 256
#: A shard that takes longer to list its page is left out of the answer, and named there.
SHARD_SECONDS = 10.0

DRAINED = Cause(actor=lifecycle.OURSELVES, reason="drained")

TransitionRequest: TypeAlias = (
    pb.ActivateSubscriptionRequest
    | pb.PauseSubscriptionRequest
    | pb.ResumeSubscriptionRequest
    | pb.DrainSubscriptionRequest
    | pb.DeactivateSubscriptionRequest
)


class SubscriptionServicer(rpc.SubscriptionServiceServicer):
    """Serves noetlpb.v1.SubscriptionService from the event log."""

    def __init__(
        self,
        shards: Shards,
        followers: Sequence[Follower],
        next_id: Callable[[], int],
        *,
        drain_timeout: timedelta,
    ) -> None:
        self._shards = shards
        self._next_id = next_id
        self._registrar = Registrar(
            shards, next_id, drain_timeout=drain_timeout, on_stored=lambda shard: followers[shard].wake()
        )
        self._turns = Turns()
        self._feeds = [Feed(pool, follower) for pool, follower in zip(shards.pools, followers, strict=True)]

    async def RegisterSubscription(
        self, request: pb.RegisterSubscriptionRequest, context: Context
    ) -> pb.RegisterSubscriptionResponse:
        path = fields.required_text(request.path, "path")
        subscription, created = await self._registrar.register(path)
        return pb.RegisterSubscriptionResponse(subscription=subscription_to_pb(subscription), created=created)

    async def ActivateSubscription(
        self, request: pb.ActivateSubscriptionRequest, context: Context
    ) -> pb.ActivateSubscriptionResponse:
        subscription = await self._advance(Action.ACTIVATE, request)
        return pb.ActivateSubscriptionResponse(subscription=subscription_to_pb(subscription))

    async def PauseSubscription(
        self, request: pb.PauseSubscriptionRequest, context: Context
    ) -> pb.PauseSubscriptionResponse:
        subscription = await self._advance(Action.PAUSE, request)
        return pb.PauseSubscriptionResponse(subscription=subscription_to_pb(subscription))

    async def ResumeSubscription(
        self, request: pb.ResumeSubscriptionRequest, context: Context
    ) -> pb.ResumeSubscriptionResponse:
        subscription = await self._advance(Action.RESUME, request)
        return pb.ResumeSubscriptionResponse(subscription=subscription_to_pb(subscription))

    async def DrainSubscription(
        self, request: pb.DrainSubscriptionRequest, context: Context
    ) -> pb.DrainSubscriptionResponse:
        subscription = await self._advance(Action.DRAIN, request)
        return pb.DrainSubscriptionResponse(subscription=subscription_to_pb(subscription))

    async def DeactivateSubscription(
        self, request: pb.DeactivateSubscriptionRequest, context: Context
    ) -> pb.DeactivateSubscriptionResponse:
        subscription = await self._advance(Action.DEACTIVATE, request)
        return pb.DeactivateSubscriptionResponse(subscription=subscription_to_pb(subscription))

    async def GetSubscription(
        self, request: pb.GetSubscriptionRequest, context: Context
    ) -> pb.GetSubscriptionResponse:
        subscription_id = fields.positive_id(request.subscription_id, "subscription_id")
        async with self._shards.pool_for(subscription_id).acquire() as conn:
            subscription, _ = await _read(conn, subscription_id)
        return pb.GetSubscriptionResponse(subscription=subscription_to_pb(subscription))

    async def ListSubscriptions(
        self, request: pb.ListSubscriptionsRequest, context: Context
    ) -> pb.ListSubscriptionsResponse:
        limit = paging.page_size(request.page_size)
        states = {subscription_state_from_pb(number, "states") for number in request.states}
        path_prefix = fields.text(request.path_prefix, "path_prefix")
        filters = [sorted(state.value for state in states), path_prefix]
        (after,) = paging.decode_token(request.page_token, filters, shape=[int]) or (0,)

        async def ask(pool: Pool) -> list[Subscription]:
            async with pool.transaction(readonly=True) as conn:
                return await subscriptions.list_page(
                    conn, after=after, states=states, path_prefix=path_prefix, limit=limit + 1
                )

        answers = await ask_every_shard(self._shards, ask, seconds=self._patience_seconds(context))
        page, more = merge([answer for answer in answers if not isinstance(answer, Unavailable)], limit)
        unreachable = [number for number, answer in enumerate(answers) if isinstance(answer, Unavailable)]
        if len(unreachable) == len(answers):
            all_or_raise(answers)
        return pb.ListSubscriptionsResponse(
            subscriptions=map(subscription_to_pb, page),
            next_page_token=paging.encode_token([page[-1].subscription_id], filters) if more else "",
            unreachable_shards=unreachable,
        )

    async def ListSubscriptionEvents(
        self, request: pb.ListSubscriptionEventsRequest, context: Context
    ) -> pb.ListSubscriptionEventsResponse:
        subscription_id = fields.positive_id(request.subscription_id, "subscription_id")
        limit = paging.page_size(request.page_size)
        (after,) = paging.decode_token(request.page_token, subscription_id, shape=[int]) or (0,)
        async with self._shards.pool_for(subscription_id).acquire() as conn:
            events = await subscriptions.list_events(conn, subscription_id, after=after, limit=limit + 1)
            if not events:
                await _read(conn, subscription_id)
        more = len(events) > limit
        return pb.ListSubscriptionEventsResponse(
            events=map(subscription_event_to_pb, events[:limit]),
            next_page_token=paging.encode_token([events[limit - 1].event_id], subscription_id)
            if more
            else "",
        )

    async def WatchSubscriptions(
        self, request: pb.WatchSubscriptionsRequest, context: Context
    ) -> AsyncIterator[pb.WatchSubscriptionsResponse]:
        target = _target(request)
        feeds = self._feeds
        if target.subscription_id is not None:
            feeds = [feeds[self._shards.shard_of(target.subscription_id)]]
        token = request.resume_token
        place = watching.decode(token, target, shards=len(feeds)) if token else None
        call = calls.current()
        call.resume_token = token
        # There may be nothing to tell for hours; the caller should know that it is heard.
        await context.send_initial_metadata(())
        async with aclosing(Watch(feeds, target).steps(place)) as steps:
            async for step in steps:
                token = watching.encode(step.place, target)
                if step.subscription is not None:
                    yield pb.WatchSubscriptionsResponse(
                        subscription=subscription_to_pb(step.subscription),
                        resume_token=token,
                        initial=step.initial,
                    )
                # Only now: until it is sent, a stream that ends goes on before it.
                call.resume_token = token

    async def HeartbeatSubscription(
        self, request: pb.HeartbeatSubscriptionRequest, context: Context
    ) -> pb.HeartbeatSubscriptionResponse:
        subscription_id = fields.positive_id(request.subscription_id, "subscription_id")
        report = _report(request)
        async with self._changing(subscription_id) as (conn, current, now):
            runtime = lifecycle.renew(current, report, now=now)
            await subscriptions.save_runtime(conn, subscription_id, runtime)
            if lifecycle.has_drained(current, report):
                event = lifecycle.advance(
                    current, Action.DEACTIVATE, event_id=self._next_id(), now=now, cause=DRAINED
                )
                current = lifecycle.subscription_at(await subscriptions.append(conn, event))
        return pb.HeartbeatSubscriptionResponse(
            subscription=subscription_to_pb(replace(current, runtime=runtime)),
            lease_expires_at=timestamp_to_pb(runtime.lease_expires_at),
        )

    async def _advance(self, action: Action, request: TransitionRequest) -> Subscription:
        subscription_id = fields.positive_id(request.subscription_id, "subscription_id")
        cause = Cause(
            actor=fields.text(request.actor, "actor", characters_max=ACTOR_CHARACTERS_MAX),
            reason=fields.text(request.reason, "reason", characters_max=REASON_CHARACTERS_MAX),
            request_id=fields.text(
                request.request_id, "request_id", characters_max=REQUEST_ID_CHARACTERS_MAX
            ),
        )
        async with self._changing(subscription_id) as (conn, current, now):
            if cause.request_id:
                earlier = await subscriptions.event_of_request(
                    conn, subscription_id, request_id=cause.request_id
                )
                if earlier is not None:
                    lifecycle.require_repeat(earlier, action)
                    return lifecycle.subscription_at(earlier, current.runtime)
            lifecycle.require_etag(current, request.etag)
            event = lifecycle.advance(current, action, event_id=self._next_id(), now=now, cause=cause)
            event = await subscriptions.append(conn, event)
        return lifecycle.subscription_at(event, current.runtime)

    @asynccontextmanager
    async def _changing(
        self, subscription_id: int
    ) -> AsyncIterator[tuple[Connection, Subscription, datetime]]:
        """A transaction in which nobody else changes the subscription, which is as it is, and the time."""
        pool = self._shards.pool_for(subscription_id)
        async with self._turns.turn(subscription_id), pool.transaction() as conn:
            await subscriptions.lock(conn, subscription_id)
            current, now = await _read(conn, subscription_id)
            yield conn, current, now
        self._feeds[self._shards.shard_of(subscription_id)].follower.wake()

    def _patience_seconds(self, context: Context) -> float | None:
        """How long to wait for the slowest shard; the others' answers must still reach the caller in time."""
        if len(self._shards) == 1:
            return None
        remaining = context.time_remaining()
        return SHARD_SECONDS if remaining is None else min(SHARD_SECONDS, remaining * 0.8)


def _target(request: pb.WatchSubscriptionsRequest) -> Target:
    if request.WhichOneof("target") == "subscription_id":
        return Target(subscription_id=fields.positive_id(request.subscription_id, "subscription_id"))
    return Target(path_prefix=fields.text(request.path_prefix, "path_prefix"))


def _report(request: pb.HeartbeatSubscriptionRequest) -> Report:
    return Report(
        runtime_id=fields.required_text(
            request.runtime_id, "runtime_id", characters_max=RUNTIME_ID_CHARACTERS_MAX
        ),
        lease=fields.lease(seconds=request.lease.seconds, nanos=request.lease.nanos),
        in_flight=fields.count(request.in_flight, "in_flight") if request.HasField("in_flight") else None,
        backlog=fields.count(request.backlog, "backlog") if request.HasField("backlog") else None,
    )


async def _read(conn: Connection, subscription_id: int) -> tuple[Subscription, datetime]:
    present = await subscriptions.read(conn, subscription_id)
    if present is None:
        raise subscription_not_found(subscription_id)
    return present
