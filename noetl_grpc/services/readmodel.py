"""The read model: snapshots that follow the log, only ever forwards, and can prove it.

A snapshot is folded inside one REPEATABLE READ transaction, which also tells the database snapshot it was folded from.
What that snapshot shows is in the state and nothing else is; so a straggler, however late, is seen by the next advance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from noetl_grpc.core import snapshots
from noetl_grpc.core.access import Tenant
from noetl_grpc.core.checksums import Steps, checksums_of
from noetl_grpc.core.cutoff import EVERYTHING, Scope
from noetl_grpc.core.fold import Fold, Identity, apply_to_each
from noetl_grpc.core.projections import Advanced, Check, NotAdvanced, Projection, Verified
from noetl_grpc.core.snapshots import RULES, Folded, SeedOutcome, Snapshot, SnapshotRow
from noetl_grpc.core.upcast import Registry
from noetl_grpc.errors import Conflict, EventMalformed, NotFound, Unavailable
from noetl_grpc.metrics import Metrics
from noetl_grpc.services.hot_states import HotState
from noetl_grpc.services.seeds import Seeds
from noetl_grpc.storage import projections
from noetl_grpc.storage.pool import Connection, Pool, Shards
from noetl_grpc.storage.projections import Coverage, StoredRow
from noetl_grpc.storage.replay import START, collector_held, fold_log, in_steps

#: Executions that are folded in one transaction: at first, at most, and by what their states weigh together.
SLICE_FIRST = 20
SLICE_MAX = 350
SLICE_BYTES = 8 * 1024 * 1024
#: Slices of one call that are under way at a time: while the database reads or saves one, another is folded.
SLICES_AT_ONCE = 3
PAGE_ROWS = 2000
TRIES_MAX = 3
COUNTED_EXECUTIONS_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class _Found:
    """A stored snapshot, as far as it is one, and whether a fold may go on from it."""

    snapshot: Snapshot | None
    outcome: SeedOutcome
    text_bytes: int
    hot: HotState | None = None


@dataclass(frozen=True, slots=True)
class _Folding:
    """A fold that is under way or done, and what it began from."""

    fold: Fold
    seed: Snapshot | None
    seed_outcome: SeedOutcome

    @property
    def is_news(self) -> bool:
        """Whether it covers more than what is stored."""
        count = self.fold.state["event_count"]
        return bool(count) and (self.seed is None or count > self.seed.event_count)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A state that is to be stored, and its row."""

    folded: Folded
    row: SnapshotRow


class Queue:
    """What is left to be advanced, handed out in slices that weigh little enough for the memory."""

    def __init__(self, ids: Sequence[int], *, known_bytes: Callable[[int], int | None]) -> None:
        """What states at hand weigh is known; of the others it is guessed, and then learnt."""
        self._ids = ids
        self._done = 0
        self._known_bytes = known_bytes
        self._guess_bytes = SLICE_BYTES // SLICE_FIRST

    def take(self) -> Sequence[int]:
        """The next slice; nothing when all is done."""
        first, room_bytes = self._done, SLICE_BYTES
        for execution_id in self._ids[first : first + SLICE_MAX]:
            room_bytes -= self._known_bytes(execution_id) or self._guess_bytes
            if room_bytes < 0 and self._done > first:
                break
            self._done += 1
        return self._ids[first : self._done]

    def learn(self, executions: int, text_bytes: int) -> None:
        """What so many executions weighed together; nothing, where none of them could be advanced, tells nothing."""
        if text_bytes:
            self._guess_bytes = text_bytes // executions


class ReadModel:
    """Advances, reads, verifies and mends snapshots."""

    def __init__(
        self,
        shards: Shards,
        *,
        seeds: Seeds,
        registry: Registry,
        metrics: Metrics,
        folding: asyncio.Semaphore,
    ) -> None:
        """`folding` bounds how many folds run at a time; the others wait without a connection."""
        self._shards = shards
        self._seeds = seeds
        self._registry = registry
        self._metrics = metrics
        self._folding = folding
        self._hot = seeds.hot

    async def advance(self, tenant: Tenant, execution_ids: Sequence[int]) -> list[Advanced | NotAdvanced]:
        """Bring the snapshots of these executions up to date, in the order first seen."""
        wanted = list(dict.fromkeys(execution_ids))
        by_shard: dict[int, list[int]] = {}
        for execution_id in wanted:
            by_shard.setdefault(self._shards.shard_of(execution_id), []).append(execution_id)
        answers = await asyncio.gather(
            *(self._advance_shard(self._shards.pools[shard], tenant, ids) for shard, ids in by_shard.items())
        )
        away = [answer for answer in answers if isinstance(answer, Unavailable)]
        if away and len(away) == len(answers):
            raise away[0]
        outcomes: dict[int, Advanced | NotAdvanced] = {}
        for (_, ids), answer in zip(by_shard.items(), answers, strict=True):
            if isinstance(answer, Unavailable):
                answer = [
                    NotAdvanced(item, "SHARD_UNAVAILABLE", "the shard is out of reach; retry") for item in ids
                ]
            outcomes.update((outcome.execution_id, outcome) for outcome in answer)
        return [outcomes[execution_id] for execution_id in wanted]

    async def _advance_shard(
        self, pool: Pool, tenant: Tenant, ids: Sequence[int]
    ) -> list[Advanced | NotAdvanced] | Unavailable:
        queue = Queue(ids, known_bytes=partial(self._hot.text_bytes_of, tenant))
        outcomes: list[Advanced | NotAdvanced] = []

        async def work() -> None:
            while part := queue.take():
                more, weight = await self._advance_slice(pool, tenant, part)
                outcomes.extend(more)
                queue.learn(len(part), weight)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(SLICES_AT_ONCE):
                    group.create_task(work())
        except BaseExceptionGroup as failures:
            error = failures.exceptions[0]
            if isinstance(error, Unavailable):
                return error
            raise error from None
        return outcomes

    async def _advance_slice(
        self, pool: Pool, tenant: Tenant, ids: Sequence[int]
    ) -> tuple[list[Advanced | NotAdvanced], int]:
        """What became of each, and how many bytes their states have."""
        for attempt in range(TRIES_MAX):
            try:
                return await self._advance_once(pool, tenant, ids)
            except Conflict as error:
                if attempt + 1 == TRIES_MAX:
                    return [NotAdvanced(item, "CONFLICT", error.message) for item in ids], 0
            except EventMalformed as error:
                if len(ids) == 1:
                    return [NotAdvanced(ids[0], "EVENT_MALFORMED", error.message)], 0
                # One bad execution never stops the rest.
                alone = [await self._advance_slice(pool, tenant, [item]) for item in ids]
                return [outcome for outcomes, _ in alone for outcome in outcomes], sum(
                    weight for _, weight in alone
                )
        raise AssertionError("unreachable")

    async def _advance_once(
        self, pool: Pool, tenant: Tenant, ids: Sequence[int]
    ) -> tuple[list[Advanced | NotAdvanced], int]:
        async with self._folding:
            async with pool.transaction(isolation="repeatable_read", readonly=True) as conn:
                log_snapshot, found = await self._find(conn, tenant, ids)
                foldings = await self._fold(conn, tenant, ids, found, has_xact_id=log_snapshot is not None)
            news = [folding for folding in foldings.values() if folding.is_news]
            drafts = await in_steps(_drafts(news, log_snapshot=log_snapshot))
        places, covered = await self._save(pool, tenant, drafts)
        weight = max(
            sum(one.text_bytes for one in found.values()), sum(draft.folded.text_bytes for draft in drafts)
        )
        with collector_held():
            self._keep_hot(tenant, foldings, found, drafts, places)
            return self._outcomes(foldings, places, covered), weight

    async def _find(
        self, conn: Connection, tenant: Tenant, ids: Sequence[int]
    ) -> tuple[str | None, dict[int, _Found]]:
        """What the transaction sees of the log, and the stored snapshots.

        One that this process stored itself, and nobody has touched since, is at hand.
        """
        hot = self._hot.take(tenant, ids)
        log_snapshot, places = await projections.read_places(conn, tenant, list(hot))
        found = {
            execution_id: _Found(state.snapshot, SeedOutcome.USED, state.text_bytes, state)
            for execution_id, state in hot.items()
            if places.get(execution_id) == state.place
        }
        others = [execution_id for execution_id in ids if execution_id not in found]
        if others:
            for execution_id, stored in (await projections.read_snapshots(conn, tenant, others)).items():
                found[execution_id] = _Found(
                    *self._seeds.prove(stored), text_bytes=len(stored.row.snapshot_json or "")
                )
        return log_snapshot, found

    async def _save(
        self, pool: Pool, tenant: Tenant, drafts: Sequence[_Draft]
    ) -> tuple[Mapping[int, str], Mapping[int, Coverage]]:
        """Where each was written, and how far those reach that had been overtaken."""
        if not drafts:
            return {}, {}
        covered: Mapping[int, Coverage] = {}
        async with pool.acquire() as conn:
            places = await projections.save_snapshots(conn, tenant, [draft.row for draft in drafts])
            left = [draft for draft in drafts if draft.row.execution_id not in places]
            if left:
                # Overtaken, or the document that a state was to be kept beside is another one by now.
                whole = [snapshots.write(await in_steps(snapshots.whole(draft.folded))) for draft in left]
                places |= await projections.save_snapshots(conn, tenant, whole)
                overtaken = [row.execution_id for row in whole if row.execution_id not in places]
                covered = await projections.covered_versions(conn, tenant, overtaken)
        return places, covered

    def _keep_hot(
        self,
        tenant: Tenant,
        foldings: Mapping[int, _Folding],
        found: Mapping[int, _Found],
        drafts: Sequence[_Draft],
        places: Mapping[int, str],
    ) -> None:
        for execution_id, one in found.items():
            folding = foldings[execution_id]
            if one.hot is not None and folding.seed is one.snapshot and not folding.is_news:
                self._hot.put(tenant, one.hot)
        for draft in drafts:
            if draft.row.execution_id in places:
                place = places[draft.row.execution_id]
                self._hot.put(tenant, HotState(place, draft.folded.snapshot, draft.folded.text_bytes))

    def _outcomes(
        self,
        foldings: Mapping[int, _Folding],
        written: Container[int],
        covered: Mapping[int, Coverage],
    ) -> list[Advanced | NotAdvanced]:
        outcomes: list[Advanced | NotAdvanced] = []
        for execution_id, folding in foldings.items():
            state = folding.fold.state
            if not state["event_count"]:
                outcomes.append(
                    NotAdvanced(execution_id, "NO_EVENTS", "the log holds no event of this execution")
                )
                continue
            reached = covered.get(execution_id)
            outcomes.append(
                Advanced(
                    execution_id=execution_id,
                    version=reached.version if reached else state["last_event_id"],
                    events=reached.event_count if reached else state["event_count"],
                    changed=execution_id in written,
                    rebuilt=folding.seed is None and folding.seed_outcome is not SeedOutcome.ABSENT,
                )
            )
        advanced = [outcome for outcome in outcomes if isinstance(outcome, Advanced)]
        self._metrics.projection_advanced.inc(sum(outcome.changed for outcome in advanced))
        self._metrics.projection_rebuilt.inc(sum(outcome.rebuilt for outcome in advanced))
        return outcomes

    async def get(self, tenant: Tenant, execution_id: int) -> Projection:
        """The stored snapshot; one that proves false is not handed out."""
        async with self._shards.pool_for(execution_id).acquire() as conn:
            stored = (await projections.read_snapshots(conn, tenant, [execution_id])).get(execution_id)
        if stored is not None:
            snapshot, outcome = self._seeds.prove(stored)
            if snapshot is not None and outcome is SeedOutcome.USED:
                return Projection(snapshot, await in_steps(checksums_of(snapshot.state)), stored.updated_at)
        raise NotFound(
            f"execution {execution_id} has no usable snapshot; AdvanceProjections makes one",
            reason="PROJECTION_NOT_FOUND",
            metadata={"execution_id": execution_id},
        )

    async def stored_version(self, tenant: Tenant, execution_id: int) -> int:
        """The version of the stored snapshot, 0 where there is none."""
        async with self._shards.pool_for(execution_id).acquire() as conn:
            covered = await projections.covered_versions(conn, tenant, [execution_id])
        return covered[execution_id].version if execution_id in covered else 0

    async def verify(self, tenant: Tenant, execution_ids: Sequence[int], *, repair: bool) -> list[Verified]:
        """Fold each execution from its first event and compare; mend what differs if asked."""
        results = []
        for execution_id in dict.fromkeys(execution_ids):
            result = await self._verify_one(tenant, execution_id, repair=repair)
            for _ in range(TRIES_MAX - 1):
                if not repair or result.repaired or result.outcome is Check.SAME:
                    break
                # It changed while it was being mended.
                result = await self._verify_one(tenant, execution_id, repair=repair)
            results.append(result)
        return results

    async def executions_behind(self, tenant: Tenant, *, behind: int, limit: int) -> list[int]:
        """The next executions that have events, over all shards, in order of their ids."""

        async def ask(pool: Pool) -> list[int]:
            async with pool.acquire() as conn:
                return await projections.next_executions(conn, tenant, behind=behind, limit=limit)

        found = await asyncio.gather(*(ask(pool) for pool in self._shards.pools))
        return sorted(execution_id for ids in found for execution_id in ids)[:limit]

    async def count_behind(self, tenant: Tenant, *, behind: int) -> int:
        """How many executions are still to come."""

        async def ask(pool: Pool) -> int:
            async with pool.acquire() as conn:
                return await projections.count_executions(
                    conn, tenant, behind=behind, limit=COUNTED_EXECUTIONS_MAX
                )

        return sum(await asyncio.gather(*(ask(pool) for pool in self._shards.pools)))

    async def _verify_one(self, tenant: Tenant, execution_id: int, *, repair: bool) -> Verified:
        pool = self._shards.pool_for(execution_id)
        async with self._folding:
            async with pool.transaction(isolation="repeatable_read", readonly=True) as conn:
                log_snapshot, _ = await projections.read_places(conn, tenant, [])
                stored = (await projections.read_snapshots(conn, tenant, [execution_id])).get(execution_id)
                foldings = await self._fold(
                    conn, tenant, [execution_id], {}, has_xact_id=log_snapshot is not None
                )
            fold = foldings[execution_id].fold
            folded = await in_steps(snapshots.folded_of(fold, log_snapshot=log_snapshot))
        snapshot, seed_outcome = self._seeds.prove(stored) if stored else (None, SeedOutcome.ABSENT)
        stored_checksum = await in_steps(_checksum_of(stored, snapshot))
        log_checksum = await in_steps(snapshots.checksum_of(folded.snapshot))
        if stored is None:
            outcome = Check.MISSING
        elif snapshot is None or seed_outcome is not SeedOutcome.USED:
            outcome = Check.DIFFERENT
        elif stored_checksum == log_checksum:
            outcome = Check.SAME
        else:
            is_behind = snapshot.event_count < folded.snapshot.event_count
            outcome = Check.STALE if is_behind else Check.DIFFERENT
        repaired = False
        if repair and outcome is not Check.SAME and fold.state["event_count"]:
            mended = snapshots.write(folded)
            async with pool.transaction() as conn:
                if stored is None or outcome is Check.STALE:
                    repaired = bool(await projections.save_snapshots(conn, tenant, [mended]))
                else:
                    repaired = await projections.repair_snapshot(
                        conn, tenant, found=stored.row, mended=mended
                    )
        return Verified(
            execution_id=execution_id,
            outcome=outcome,
            stored_checksum=stored_checksum,
            log_checksum=log_checksum,
            repaired=repaired,
        )

    async def _fold(
        self,
        conn: Connection,
        tenant: Tenant,
        ids: Sequence[int],
        found: Mapping[int, _Found],
        *,
        has_xact_id: bool,
    ) -> dict[int, _Folding]:
        """Fold each execution up to what the transaction sees, going on from its snapshot where that may be."""
        usable = [one.snapshot for one in found.values() if one.snapshot and one.outcome is SeedOutcome.USED]
        late = await projections.executions_with_stragglers(conn, tenant, usable, has_xact_id=has_xact_id)
        with collector_held():
            foldings = {
                execution_id: self._begin(
                    tenant, execution_id, found.get(execution_id), has_straggler=execution_id in late
                )
                for execution_id in ids
            }
        await self._go_on(conn, tenant, foldings)
        return foldings

    def _begin(
        self, tenant: Tenant, execution_id: int, found: _Found | None, *, has_straggler: bool
    ) -> _Folding:
        """A fold that goes on from what was found, or starts anew."""
        outcome = found.outcome if found else SeedOutcome.ABSENT
        if has_straggler:
            outcome = SeedOutcome.STRAGGLER
        seed = found.snapshot if found and outcome is SeedOutcome.USED else None
        fold = Fold(
            Identity(
                execution_id=execution_id,
                tenant_id=tenant.tenant_id,
                organization_id=tenant.organization_id,
                upcaster_registry_digest=self._registry.digest,
            ),
            RULES,
            seed.state if seed else None,
            takes_base=True,
        )
        if seed:
            fold.recall_warnings(seed.warnings, seed.warnings_left_out)
        return _Folding(fold, seed, outcome)

    async def _go_on(self, conn: Connection, tenant: Tenant, foldings: Mapping[int, _Folding]) -> None:
        behind = {item: folding.seed.version if folding.seed else START for item, folding in foldings.items()}
        if self._registry.upcasters:
            # Upcasters see whole events; the short way below reads only what the fold itself needs.
            for execution_id, folding in foldings.items():
                scope = Scope(tenant.tenant_id, tenant.organization_id, execution_id)
                after = behind[execution_id]
                await fold_log(conn, folding.fold, scope, EVERYTHING, self._registry, after_event_id=after)
            return
        folds = {execution_id: folding.fold for execution_id, folding in foldings.items()}
        async for page in projections.events_to_fold(conn, tenant, behind, page_size=PAGE_ROWS):
            with collector_held():
                apply_to_each(folds, page)
            await asyncio.sleep(0)


def _checksum_of(stored: StoredRow | None, snapshot: Snapshot | None) -> Steps[str]:
    """Of the state that is stored; where that does not prove itself, what its row says."""
    if snapshot is not None:
        return (yield from snapshots.checksum_of(snapshot))
    return stored.row.checksum if stored else ""


def _drafts(foldings: Iterable[_Folding], *, log_snapshot: str | None) -> Steps[list[_Draft]]:
    drafts = []
    for folding in foldings:
        folded = yield from snapshots.folded_of(folding.fold, log_snapshot=log_snapshot, since=folding.seed)
        drafts.append(_Draft(folded, snapshots.write(folded)))
        yield
    return drafts
