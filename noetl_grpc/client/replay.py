"""Replay: an execution's state as of any event or time, its events, and why it is as it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from noetlpb.v1 import replay_pb2 as pb
from noetlpb.v1 import replay_pb2_grpc as rpc
from noetlpb.v1 import state_pb2

from noetl_grpc.client.channel import LONG_CALL_SECONDS, Line
from noetl_grpc.client.events import EventEnvelope
from noetl_grpc.client.mapping import Id, from_pb, number_of, timestamp
from noetl_grpc.client.state import FoldRules, ReplayedState, ReplayProjection


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutoff:
    """How far into a log to look, inclusive: up to an event or a time; neither is everything."""

    event_id: int | None = None
    time: datetime | None = None

    def arguments(self) -> dict[str, Any]:
        """As fields of a request."""
        if self.event_id is not None and self.time is not None:
            raise ValueError("a cutoff is an event or a time, not both")
        if self.event_id is not None:
            return {"as_of_event_id": self.event_id}
        if self.time is not None:
            return {"as_of_time": timestamp(self.time, field="as_of_time")}
        return {}


EVERYTHING = Cutoff()


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Some events of a stream, and whether everything that was there when it began has been sent."""

    events: tuple[EventEnvelope, ...]
    resume_token: str
    caught_up: bool


@dataclass(frozen=True, slots=True)
class StateChange:
    """One difference between two states; `path` is a JSON Pointer."""

    path: str
    before_json: str | None
    after_json: str | None
    event_id: Id


@dataclass(frozen=True, slots=True)
class ReplayDiff:
    """What changed between two cutoffs."""

    changes: tuple[StateChange, ...]
    from_checksum: str
    to_checksum: str


@dataclass(frozen=True, slots=True)
class StateCause:
    """An event that set the value at a path."""

    event_id: Id
    event_type: str
    event_time: datetime
    value_json: str


class ReplayClient:
    """noetlpb.v1.ReplayService."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._stub = rpc.ReplayServiceStub(line.channel)

    async def state(
        self,
        execution_id: int,
        *,
        as_of: Cutoff = EVERYTHING,
        projection: ReplayProjection = ReplayProjection.ALL,
        rules: FoldRules = FoldRules.UNION,
        limit: int = 0,
        use_snapshot: bool = True,
        resolve_payloads: bool = False,
        include_canonical_json: bool = False,
        tenant_id: str = "",
        organization_id: str = "",
        timeout: float | None = None,
    ) -> ReplayedState:
        """The state at a cutoff, with checksums."""
        request = pb.ReplayStateRequest(
            tenant_id=tenant_id,
            organization_id=organization_id,
            execution_id=execution_id,
            projection=number_of(projection, state_pb2.ReplayProjection),  # type: ignore[arg-type]  # an int on the wire
            rules=number_of(rules, state_pb2.FoldRules),  # type: ignore[arg-type]  # an int on the wire
            limit=limit,
            use_snapshot=use_snapshot,
            resolve_payloads=resolve_payloads,
            include_canonical_json=include_canonical_json,
            **as_of.arguments(),
        )
        answer = await self._line.call(self._stub.ReplayState, request, timeout=timeout or LONG_CALL_SECONDS)
        return from_pb(ReplayedState, answer.state)

    async def batches(
        self,
        execution_id: int,
        *,
        as_of: Cutoff = EVERYTHING,
        after_event_id: int = 0,
        follow: bool = False,
        resume_token: str = "",
        tenant_id: str = "",
        organization_id: str = "",
    ) -> AsyncIterator[EventBatch]:
        """The events of an execution as they travel, with the place to go on from.

        With `follow` it stays open behind `caught_up`. When the server goes away it goes on where it was.
        """
        request = pb.StreamEventsRequest(
            tenant_id=tenant_id,
            organization_id=organization_id,
            execution_id=execution_id,
            after_event_id=after_event_id,
            follow=follow,
            resume_token=resume_token,
            **as_of.arguments(),
        )
        async for response in self._line.resumed(self._stub.StreamEvents, request, until_end=not follow):
            yield from_pb(EventBatch, response)

    async def events(
        self,
        execution_id: int,
        *,
        as_of: Cutoff = EVERYTHING,
        after_event_id: int = 0,
        follow: bool = False,
        tenant_id: str = "",
        organization_id: str = "",
    ) -> AsyncIterator[EventEnvelope]:
        """The events of an execution, oldest first; with `follow` for ever, as they become visible."""
        async for batch in self.batches(
            execution_id,
            as_of=as_of,
            after_event_id=after_event_id,
            follow=follow,
            tenant_id=tenant_id,
            organization_id=organization_id,
        ):
            for event in batch.events:
                yield event

    async def event(
        self,
        execution_id: int,
        event_id: int,
        *,
        tenant_id: str = "",
        organization_id: str = "",
        timeout: float | None = None,
    ) -> EventEnvelope:
        """One event, whole: what an oversize stream message points to."""
        request = pb.GetEventRequest(
            tenant_id=tenant_id,
            organization_id=organization_id,
            execution_id=execution_id,
            event_id=event_id,
        )
        answer = await self._line.call(self._stub.GetEvent, request, timeout=timeout)
        return from_pb(EventEnvelope, answer.event)

    async def diff(
        self,
        execution_id: int,
        *,
        before: Cutoff,
        after: Cutoff = EVERYTHING,
        rules: FoldRules = FoldRules.UNION,
        tenant_id: str = "",
        organization_id: str = "",
        timeout: float | None = None,
    ) -> ReplayDiff:
        """What changed between two cutoffs, by path."""
        request = pb.DiffReplayRequest(
            tenant_id=tenant_id,
            organization_id=organization_id,
            execution_id=execution_id,
            from_cutoff=state_pb2.Cutoff(**before.arguments()),
            to_cutoff=state_pb2.Cutoff(**after.arguments()),
            rules=number_of(rules, state_pb2.FoldRules),  # type: ignore[arg-type]  # an int on the wire
        )
        answer = await self._line.call(self._stub.DiffReplay, request, timeout=timeout or LONG_CALL_SECONDS)
        return from_pb(ReplayDiff, answer)

    async def explain(
        self,
        execution_id: int,
        path: str,
        *,
        as_of: Cutoff = EVERYTHING,
        rules: FoldRules = FoldRules.UNION,
        tenant_id: str = "",
        organization_id: str = "",
        timeout: float | None = None,
    ) -> tuple[StateCause, ...]:
        """Which events gave the value at a JSON Pointer its values, newest first."""
        request = pb.ExplainReplayRequest(
            tenant_id=tenant_id,
            organization_id=organization_id,
            execution_id=execution_id,
            path=path,
            rules=number_of(rules, state_pb2.FoldRules),  # type: ignore[arg-type]  # an int on the wire
            **as_of.arguments(),
        )
        answer = await self._line.call(
            self._stub.ExplainReplay, request, timeout=timeout or LONG_CALL_SECONDS
        )
        return tuple(from_pb(StateCause, cause) for cause in answer.causes)
