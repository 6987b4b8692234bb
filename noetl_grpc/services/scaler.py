"""KEDA's external scaler: how much there is to do, cheaply and in one number."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from externalscaler import externalscaler_pb2 as pb
from externalscaler import externalscaler_pb2_grpc as rpc

from noetl_grpc.calls import Context
from noetl_grpc.core.scaling import Metric, Trigger, parse_trigger
from noetl_grpc.errors import InvalidRequest
from noetl_grpc.storage import scaler as storage
from noetl_grpc.storage.pool import Pool, Shards

#: How often an open stream looks for a change.
LOOK_SECONDS = 1.0
#: How old an answer may be. On the operations listener anybody may ask, and must not be able to load the database.
FRESH_SECONDS = 0.25

Count = Callable[[], Awaitable[float]]


class ExternalScalerServicer(rpc.ExternalScalerServicer):
    """Serves externalscaler.ExternalScaler from the outbox and the tailer's lag."""

    def __init__(
        self,
        shards: Shards,
        *,
        tailer_lag_events: Count,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shards = shards
        self._tailer_lag_events = tailer_lag_events
        self._monotonic = monotonic
        self._looks: dict[Any, tuple[float, asyncio.Task[Any]]] = {}

    async def IsActive(self, request: pb.ScaledObjectRef, context: Context) -> pb.IsActiveResponse:
        return pb.IsActiveResponse(result=await self._value(parse_trigger(request.scalerMetadata)) > 0)

    async def StreamIsActive(
        self, request: pb.ScaledObjectRef, context: Context
    ) -> AsyncIterator[pb.IsActiveResponse]:
        trigger = parse_trigger(request.scalerMetadata)
        told: bool | None = None
        while True:
            is_active = await self._value(trigger) > 0
            if is_active != told:
                told = is_active
                yield pb.IsActiveResponse(result=is_active)
            await asyncio.sleep(LOOK_SECONDS)

    async def GetMetricSpec(self, request: pb.ScaledObjectRef, context: Context) -> pb.GetMetricSpecResponse:
        return _spec(request.scalerMetadata)

    async def StreamMetricSpec(
        self, request: pb.ScaledObjectRef, context: Context
    ) -> AsyncIterator[pb.GetMetricSpecResponse]:
        yield _spec(request.scalerMetadata)
        # It follows from the request alone, so it never changes; KEDA takes an ended stream for a broken one.
        await asyncio.get_running_loop().create_future()

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Context) -> pb.GetMetricsResponse:
        trigger = parse_trigger(request.scaledObjectRef.scalerMetadata)
        if request.metricName not in ("", trigger.metric.value):
            raise InvalidRequest("metricName", f"must be {trigger.metric.value}, as GetMetricSpec says")
        value = await self._value(trigger)
        return pb.GetMetricsResponse(
            metricValues=[
                pb.MetricValue(
                    metricName=trigger.metric.value, metricValue=math.ceil(value), metricValueFloat=value
                )
            ]
        )

    async def _value(self, trigger: Trigger) -> float:
        if trigger.metric is Metric.TAILER_LAG_EVENTS:
            return float(await self._look(trigger.metric, self._tailer_lag_events))
        rows_max = trigger.rows_counted_max
        shards = await self._look(rows_max, lambda: self._count(rows_max))
        if trigger.metric is Metric.OUTBOX_PENDING:
            return float(min(rows_max, sum(shard.rows for shard in shards)))
        return max(float(shard.oldest_seconds) for shard in shards)

    async def _count(self, rows_max: int) -> list[storage.Waiting]:
        """One that is out of reach fails the answer: half a count would scale half of the publishers away."""
        return await asyncio.gather(*(_count_waiting(pool, rows_max) for pool in self._shards.pools))

    async def _look(self, key: Any, look: Callable[[], Awaitable[Any]]) -> Any:
        """What was found a moment ago, or by a look that somebody else has begun, or by one of our own."""
        now = self._monotonic()
        begun, task = self._looks.get(key, (-math.inf, None))
        if task is None or (task.done() and now - begun >= FRESH_SECONDS):
            task = asyncio.create_task(_awaited(look))
            self._looks[key] = (now, task)
        # Shielded: one caller's deadline must not take the answer from the others.
        return await asyncio.shield(task)


async def _awaited(look: Callable[[], Awaitable[Any]]) -> Any:
    return await look()


async def _count_waiting(pool: Pool, rows_max: int) -> storage.Waiting:
    async with pool.acquire() as conn:
        return await storage.count_waiting(conn, rows_max=rows_max)


def _spec(metadata: Mapping[str, str]) -> pb.GetMetricSpecResponse:
    trigger = parse_trigger(metadata)
    return pb.GetMetricSpecResponse(
        metricSpecs=[
            pb.MetricSpec(
                metricName=trigger.metric.value,
                targetSize=trigger.target_size,
                targetSizeFloat=trigger.target,
            )
        ]
    )
