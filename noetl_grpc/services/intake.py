"""Takes batches of events into the log: each shard's part in one transaction, a bad event at nobody else's cost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from noetl_grpc.core.envelope import Batch, Problem, Reason, first_of_each, pick, resolve_catalogs
from noetl_grpc.core.parking import NewDeadEvent
from noetl_grpc.core.traceparent import traced_components
from noetl_grpc.errors import Conflict, DatabaseUnavailable
from noetl_grpc.storage import catalog_entries, events
from noetl_grpc.storage.events import Key
from noetl_grpc.storage.pool import Connection, Pool, Shards

#: Rows of one statement; more take several, in the same transaction.
STATEMENT_ROWS = 2000
TRIES_MAX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A batch on its way into the log. Rows are numbered from 0, as in the request."""

    batch: Batch
    #: What is already known to be wrong.
    problems: Mapping[int, Problem]
    #: A row as it is kept when it can't be stored.
    payload_of: Callable[[int], str]
    parked_by: str
    #: Rows that are known by a key instead of their id, which was minted for them.
    keys: Mapping[int, str] = field(default_factory=dict)
    #: Whether stored events also become outbox rows, and under which subject.
    enqueues: bool = False
    subject: str | None = None
    #: The caller's, for events and outbox rows that have none of their own.
    traceparent: str | None = None
    #: Whether duplicates are compared with what is stored.
    compares: bool = False

    def row_keys(self) -> list[Key]:
        """What makes each row's event unique."""
        return list(zip(self.batch["execution_id"], self.batch["event_id"], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a delivery, or of a part of it. Rows neither stored nor rejected were there before."""

    stored: int = 0
    duplicates: int = 0
    rejected: Mapping[int, Problem] = field(default_factory=dict)
    conflicts: Sequence[int] = ()
    parked: int = 0
    enqueued: int = 0

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            stored=self.stored + other.stored,
            duplicates=self.duplicates + other.duplicates,
            rejected={**self.rejected, **other.rejected},
            conflicts=sorted((*self.conflicts, *other.conflicts)),
            parked=self.parked + other.parked,
            enqueued=self.enqueued + other.enqueued,
        )


class Intake:
    """Writes deliveries to the shards that their executions live in."""

    def __init__(
        self,
        shards: Shards,
        *,
        on_stored: Callable[[int], None] = lambda shard: None,
        on_enqueued: Callable[[int], None] = lambda shard: None,
    ) -> None:
        self._shards = shards
        self._on_stored = on_stored
        self._on_enqueued = on_enqueued

    async def take(self, delivery: Delivery) -> Outcome:
        """Store what can be stored, and park what never can.

        A shard out of reach rejects its own events only, as long as another one answers. Any other failure is raised:
        each shard's part is then stored as a whole or not at all, and a repeat completes it.
        """
        parts, homeless = self._split(delivery)
        answers = await asyncio.gather(
            *(self._take_part(delivery, shard, rows) for shard, rows in parts.items()), return_exceptions=True
        )
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        for failure in failures:
            if not isinstance(failure, DatabaseUnavailable) or len(failures) == len(answers):
                raise failure
        outcome = Outcome(rejected={row: delivery.problems[row] for row in homeless})
        for rows, answer in zip(parts.values(), answers, strict=True):
            outcome += answer if isinstance(answer, Outcome) else _unavailable(rows)
        return outcome

    def _split(self, delivery: Delivery) -> tuple[dict[int, list[int]], list[int]]:
        """The rows of each shard, and the rows without the ids that would give them a place."""
        parts: dict[int, list[int]] = {}
        homeless: list[int] = []
        for row, (execution_id, event_id) in enumerate(delivery.row_keys()):
            if execution_id > 0 and event_id > 0:
                parts.setdefault(self._shards.shard_of(execution_id), []).append(row)
            else:
                homeless.append(row)
        return parts, homeless

    async def _take_part(self, delivery: Delivery, shard: int, rows: list[int]) -> Outcome:
        pool = self._shards.pools[shard]
        entries = await self.foreign_entries(pool, delivery, rows)

        async def attempt(is_suspect: bool) -> Outcome:
            async with pool.transaction() as conn:
                outcome = await store(conn, delivery, rows, entries=entries, is_suspect=is_suspect)
                return outcome + Outcome(parked=await _park(conn, delivery, outcome.rejected))

        outcome = await persist(attempt)
        if outcome.stored:
            self._on_stored(shard)
        if outcome.enqueued:
            self._on_enqueued(shard)
        return outcome

    async def foreign_entries(self, pool: Pool, delivery: Delivery, rows: Sequence[int]) -> Sequence[Any]:
        """Catalog entries that the shard lacks and the cluster database has.

        Read before the shard's transaction begins: nobody may hold a connection to one database while he waits for
        one to the other.
        """
        if pool is self._shards.cluster:
            return ()
        execution_ids, catalog_ids = delivery.batch["execution_id"], delivery.batch["catalog_id"]
        good = [row for row in rows if row not in delivery.problems]
        wanting = {execution_ids[row] for row in good if not catalog_ids[row]}
        async with pool.acquire() as conn:
            # A command names an entry without a foreign key, so the shard may lack that one too.
            found = await events.catalogs_of(conn, wanting) if wanting else {}
            wanted = {catalog_ids[row] for row in good if catalog_ids[row]} | set(found.values())
            missing = wanted - await catalog_entries.known_ids(conn, wanted)
        if not missing:
            return ()
        async with self._shards.cluster.acquire() as conn:
            return await catalog_entries.read(conn, missing)


async def persist(attempt: Callable[[bool], Awaitable[Outcome]]) -> Outcome:
    """Run a transaction until it is through: again after a deadlock, and row by row once the data was refused."""
    is_suspect = False
    for number in range(1, TRIES_MAX + 1):
        try:
            return await attempt(is_suspect)
        except events.DATA_ERRORS:
            if is_suspect:
                raise
            is_suspect = True
        except Conflict as error:
            if number == TRIES_MAX or not isinstance(
                error.__cause__, (asyncpg.SerializationError, asyncpg.DeadlockDetectedError)
            ):
                raise
    return await attempt(is_suspect)


async def store(
    conn: Connection,
    delivery: Delivery,
    rows: Sequence[int],
    *,
    entries: Sequence[Any] = (),
    is_suspect: bool,
) -> Outcome:
    """Write these rows of a delivery in the caller's transaction; nothing is parked.

    Not suspect, it is one statement, which the database may refuse as a whole with one of `events.DATA_ERRORS`.
    """
    await catalog_entries.copy(conn, entries)
    batch = {**delivery.batch, "catalog_id": list(delivery.batch["catalog_id"])}
    if delivery.traceparent is not None:
        batch["trace_component"] = traced_components(batch, delivery.traceparent)
    rejected = {row: delivery.problems[row] for row in rows if row in delivery.problems}
    fresh = await _without_known_keys(conn, delivery, [row for row in rows if row not in rejected])
    rejected |= await _fill_catalogs(conn, batch, fresh)
    keys = delivery.row_keys()
    # Everybody inserts in the order of the key, so that two deliveries of the same events can't deadlock.
    good = sorted((row for row in fresh if row not in rejected), key=keys.__getitem__)
    first, repeated = first_of_each(keys, good)
    stored, refused = await _insert(conn, batch, first, is_suspect=is_suspect)
    if refused:
        # What the first of two equal keys could not do the second may.
        losers = {keys[row] for row in refused}
        seconds = [row for row in repeated if keys[row] in losers]
        more, more_refused = await _insert(conn, batch, seconds, is_suspect=True)
        stored |= more
        refused |= more_refused
        rejected |= refused
    known = [row for row in first if keys[row] not in stored]
    return Outcome(
        stored=len(stored),
        duplicates=len(rows) - len(rejected) - len(stored),
        rejected=rejected,
        conflicts=await _conflicts(
            conn, delivery, [row for row in (*known, *repeated) if row not in refused]
        ),
        enqueued=await events.enqueue(
            conn, sorted(stored), subject=delivery.subject, traceparent=delivery.traceparent
        )
        if delivery.enqueues
        else 0,
    )


async def _without_known_keys(conn: Connection, delivery: Delivery, rows: Sequence[int]) -> Sequence[int]:
    """The rows but those whose idempotency key their execution has already, or had earlier in the batch."""
    keyed = [row for row in rows if row in delivery.keys]
    if not keyed:
        return rows
    execution_ids = delivery.batch["execution_id"]
    keys = {row: (execution_ids[row], delivery.keys[row]) for row in keyed}
    await events.lock_executions(conn, {execution_id for execution_id, _ in keys.values()})
    stored = await events.stored_keys(
        conn,
        list(keys.values()),
        tenant_id=delivery.batch["tenant_id"][keyed[0]],
        organization_id=delivery.batch["organization_id"][keyed[0]],
    )
    first, _ = first_of_each(keys, keyed)
    fresh = {row for row in first if keys[row] not in stored}
    return [row for row in rows if row not in delivery.keys or row in fresh]


async def _fill_catalogs(conn: Connection, batch: Batch, rows: Sequence[int]) -> dict[int, Problem]:
    """Give each row the catalog entry that its execution has, and make sure that every entry exists."""
    execution_ids, catalog_ids = batch["execution_id"], batch["catalog_id"]
    wanting = {execution_ids[row] for row in rows if not catalog_ids[row]}
    known = await events.catalogs_of(conn, wanting) if wanting else {}
    problems = {
        row: Problem(
            Reason.CATALOG_UNKNOWN,
            f"catalog_id is 0, and nothing stored of execution {execution_ids[row]} names its catalog entry",
        )
        for row in resolve_catalogs(batch, rows, known)
    }
    named = {catalog_ids[row] for row in rows} - {0}
    unknown = named - await catalog_entries.known_ids(conn, named) if named else set()
    for row in rows:
        if catalog_ids[row] in unknown:
            problems[row] = Problem(
                Reason.CATALOG_UNKNOWN, f"catalog_id {catalog_ids[row]} names no catalog entry"
            )
    return problems


async def _insert(
    conn: Connection, batch: Batch, rows: Sequence[int], *, is_suspect: bool
) -> tuple[set[Key], dict[int, Problem]]:
    stored: set[Key] = set()
    refused: dict[int, Problem] = {}
    for chunk in _chunks(rows):
        if is_suspect:
            keys, problems = await events.insert_one_by_one(conn, batch, chunk)
            refused |= problems
        else:
            keys = await events.insert(conn, pick(batch, chunk))
        stored |= keys
    return stored, refused


async def _conflicts(conn: Connection, delivery: Delivery, rows: Sequence[int]) -> Sequence[int]:
    """Those of the rows that are stored with other content."""
    if not delivery.compares:
        return ()
    # A catalog entry that was not given can't differ.
    given = {**delivery.batch, "catalog_id": [value or None for value in delivery.batch["catalog_id"]]}
    conflicts: list[int] = []
    for chunk in _chunks(rows):
        conflicts += [chunk[place] for place in await events.differing(conn, pick(given, chunk))]
    return sorted(conflicts)


async def _park(conn: Connection, delivery: Delivery, rejected: Mapping[int, Problem]) -> int:
    """Keep what was rejected for good, but for rows whose id we made up ourselves: nobody could ask for those."""
    batch = delivery.batch
    parked = [
        NewDeadEvent(
            execution_id=batch["execution_id"][row],
            event_id=batch["event_id"][row],
            catalog_id=batch["catalog_id"][row] or None,
            event_type=_storable(batch["event_type"][row]),
            node_name=_storable(batch["node_name"][row]),
            reason=problem.reason,
            last_error=problem.detail,
            payload_json=delivery.payload_of(row),
        )
        for row, problem in rejected.items()
        if row not in delivery.keys
    ]
    return await events.park(conn, parked, parked_by=delivery.parked_by) if parked else 0


def _storable(text: str | None) -> str | None:
    return text and text.replace("\0", "␀")


def _unavailable(rows: Sequence[int]) -> Outcome:
    problem = Problem(
        Reason.SHARD_UNAVAILABLE, "the shard of this execution is out of reach; send the event again later"
    )
    return Outcome(rejected=dict.fromkeys(rows, problem))


def _chunks(rows: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(rows), STATEMENT_ROWS):
        yield rows[start : start + STATEMENT_ROWS]
