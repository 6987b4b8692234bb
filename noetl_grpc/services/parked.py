"""Events that could not be stored: shown in pages, and tried again once their cause is mended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from noetlpb.v1 import event_pb2 as pb

from noetl_grpc.convert.events import batch_from_pb, native_from_pb, normalised_to_pb
from noetl_grpc.convert.parked import Native, event_from_json
from noetl_grpc.core.envelope import Problem, Reason, examine
from noetl_grpc.core.normalise import normalise
from noetl_grpc.core.parking import DeadEvent
from noetl_grpc.services.intake import Delivery, Intake, Outcome, persist, store
from noetl_grpc.storage import events
from noetl_grpc.storage.events import Held, Key
from noetl_grpc.storage.pool import Pool, Shards

#: Parked events that one transaction of a retry holds.
RETRY_ROWS = 500
TAILER = "tailer"

ID_MIN = -(2**63)
#: shard, execution_id, event_id
Place = tuple[int, int, int]
START: Place = (0, ID_MIN, ID_MIN)


@dataclass(slots=True)
class Retried:
    """What became of parked events that were tried again."""

    stored: int = 0
    duplicates: int = 0
    failed: dict[Key, Problem] = field(default_factory=dict)


class ParkedEvents:
    """The parked events of all shards."""

    def __init__(self, shards: Shards, intake: Intake) -> None:
        self._shards = shards
        self._intake = intake

    async def page(
        self, after: Place, *, size: int, with_payload: bool
    ) -> tuple[list[DeadEvent], Place | None]:
        """Unresolved ones behind a place, shard by shard; and the place to go on from, if there are more."""
        found: list[tuple[Place, DeadEvent]] = []
        first_shard, *key = after
        for shard in range(first_shard, len(self._shards)):
            async with self._shards.pools[shard].acquire() as conn:
                dead = await events.list_dead(
                    conn, after=(key[0], key[1]), limit=size + 1 - len(found), with_payload=with_payload
                )
            found += [((shard, event.execution_id, event.event_id), event) for event in dead]
            if len(found) > size:
                return [event for _, event in found[:size]], found[size - 1][0]
            key = [ID_MIN, ID_MIN]
        return [event for _, event in found], None

    async def retry_all(self) -> Retried:
        """Try every parked event once."""
        total = Retried()
        for pool in self._shards.pools:
            after = (ID_MIN, ID_MIN)
            while True:
                async with pool.acquire() as conn:
                    keys = await events.retryable_keys(conn, after=after, limit=RETRY_ROWS)
                if not keys:
                    break
                await self._retry(pool, keys, total)
                after = keys[-1]
        return total

    async def retry(self, keys: Sequence[Key]) -> Retried:
        """Try these events, each of which must be parked."""
        total = Retried()
        by_shard: dict[int, list[Key]] = {}
        for key in sorted(set(keys)):
            by_shard.setdefault(self._shards.shard_of(key[0]), []).append(key)
        for shard, wanted in by_shard.items():
            for start in range(0, len(wanted), RETRY_ROWS):
                await self._retry(self._shards.pools[shard], wanted[start : start + RETRY_ROWS], total)
        return total

    async def _retry(self, pool: Pool, keys: Sequence[Key], total: Retried) -> None:
        async with pool.acquire() as conn:
            held = await events.read_dead(conn, keys)
        total.failed |= _not_parked(keys, held)
        # A retry that is repeated finds its work done.
        total.duplicates += sum(one.is_resolved for one in held.values())
        open_keys = [
            key for key in keys if key in held and not held[key].is_resolved and held[key].parked_by != TAILER
        ]
        if not open_keys:
            return
        delivery = _delivery(open_keys, held)
        entries = await self._intake.foreign_entries(pool, delivery, range(len(open_keys)))
        failed: dict[Key, Problem] = {}

        async def attempt(is_suspect: bool) -> Outcome:
            async with pool.transaction() as conn:
                mine = await events.lock_dead(conn, open_keys)
                rows = [row for row, key in enumerate(open_keys) if key in mine]
                outcome = await store(conn, delivery, rows, entries=entries, is_suspect=is_suspect)
                failed.clear()
                failed.update({open_keys[row]: problem for row, problem in outcome.rejected.items()})
                await events.resolve_dead(conn, [key for key in mine if key not in failed])
                await events.note_failed_retries(conn, failed)
                # Somebody else was faster with the others.
                return outcome + Outcome(duplicates=len(open_keys) - len(rows))

        outcome = await persist(attempt)
        total.stored += outcome.stored
        total.duplicates += outcome.duplicates
        total.failed |= failed


def _not_parked(keys: Sequence[Key], held: Mapping[Key, Held]) -> dict[Key, Problem]:
    problems: dict[Key, Problem] = {}
    for key in keys:
        if key not in held:
            problems[key] = Problem(Reason.EVENT_NOT_FOUND, "no such event is parked")
        elif held[key].parked_by == TAILER and not held[key].is_resolved:
            detail = "the event is stored and could not be published; ReconcileStream publishes it again"
            problems[key] = Problem(Reason.EVENT_NOT_FOUND, detail)
    return problems


def _delivery(keys: Sequence[Key], held: Mapping[Key, Held]) -> Delivery:
    """The events of these keys as they were parked; what can't be read any more is a problem of its own."""
    messages: list[pb.EventEnvelope] = []
    unreadable: dict[int, Problem] = {}
    for row, key in enumerate(keys):
        message = _event(key, held[key].payload_json)
        if isinstance(message, Problem):
            unreadable[row] = message
            message = pb.EventEnvelope(execution_id=key[0], event_id=key[1])
        messages.append(message)
    batch, timestamps = batch_from_pb(messages)
    problems = {**examine(batch, timestamps), **unreadable}
    return Delivery(
        batch=batch, problems=problems, payload_of=lambda row: held[keys[row]].payload_json, parked_by=""
    )


def _event(key: Key, payload_json: str) -> pb.EventEnvelope | Problem:
    execution_id, event_id = key
    parked = event_from_json(payload_json, execution_id=execution_id, event_id=event_id)
    if not isinstance(parked, Native):
        return parked
    normalised = normalise(native_from_pb(parked.message))
    if isinstance(normalised, Problem):
        return normalised
    return normalised_to_pb(normalised, tenant_id=parked.tenant_id, organization_id=parked.organization_id)
