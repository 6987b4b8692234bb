"""Stored snapshots as the beginning of a fold: each must prove that folding from nothing would have come to it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from noetl_grpc.core import snapshots
from noetl_grpc.core.access import Tenant
from noetl_grpc.core.canonical import copy_json
from noetl_grpc.core.cutoff import Cutoff, Scope
from noetl_grpc.core.snapshots import RULES, SeedOutcome, Snapshot
from noetl_grpc.core.upcast import Registry
from noetl_grpc.metrics import Metrics
from noetl_grpc.services.hot_states import HotStates
from noetl_grpc.storage import cursors, projections
from noetl_grpc.storage.pool import Connection
from noetl_grpc.storage.projections import StoredRow
from noetl_grpc.storage.replay import collector_held, in_steps


@dataclass(frozen=True, slots=True)
class Seed:
    """A snapshot from which a fold may go on, which changes its state; and what that state's checksum was."""

    snapshot: Snapshot
    checksum: str


class Seeds:
    """Looks for snapshots and believes none before it has checked."""

    def __init__(self, *, registry: Registry, metrics: Metrics) -> None:
        self._registry = registry
        self._metrics = metrics
        #: What was stored a moment ago; whoever stores puts it there.
        self.hot = HotStates()

    def prove(self, stored: StoredRow) -> tuple[Snapshot | None, SeedOutcome]:
        """The snapshot of a row, if it is one of ours, and whether a fold of ours may go on from it."""
        with collector_held():
            snapshot = snapshots.read(stored.row)
        if isinstance(snapshot, SeedOutcome):
            return None, snapshot
        return snapshot, snapshots.usability(snapshot, registry_digest=self._registry.digest, rules=RULES)

    async def find(self, conn: Connection, scope: Scope, cutoff: Cutoff) -> Seed | None:
        """A snapshot from which a fold up to the cutoff may go on; counted, whatever becomes of it."""
        snapshot, outcome = await self._look(conn, scope, cutoff)
        self._metrics.replay_seed.labels(outcome.value).inc()
        if snapshot is None or outcome is not SeedOutcome.USED:
            return None
        return Seed(snapshot, await in_steps(snapshots.checksum_of(snapshot)))

    async def _look(
        self, conn: Connection, scope: Scope, cutoff: Cutoff
    ) -> tuple[Snapshot | None, SeedOutcome]:
        tenant = Tenant(scope.tenant_id, scope.organization_id)
        snapshot, has_xact_id = await self._at_hand(conn, tenant, scope.execution_id)
        if snapshot is None:
            stored = (await projections.read_snapshots(conn, tenant, [scope.execution_id])).get(
                scope.execution_id
            )
            if stored is None or stored.row.version > cutoff.event_id:
                return None, SeedOutcome.ABSENT
            snapshot, outcome = self.prove(stored)
            if snapshot is None or outcome is not SeedOutcome.USED:
                return None, outcome
            has_xact_id = await cursors.can_follow_snapshots(conn)
        if snapshot.version > cutoff.event_id:
            return None, SeedOutcome.ABSENT
        if cutoff.time is not None and await projections.reaches_past(
            conn, tenant, scope.execution_id, version=snapshot.version, moment=cutoff.time
        ):
            # It has folded an event that the cutoff leaves out.
            return None, SeedOutcome.ABSENT
        if await projections.executions_with_stragglers(conn, tenant, [snapshot], has_xact_id=has_xact_id):
            return None, SeedOutcome.STRAGGLER
        return snapshot, SeedOutcome.USED

    async def _at_hand(
        self, conn: Connection, tenant: Tenant, execution_id: int
    ) -> tuple[Snapshot | None, bool]:
        """A copy of what this process stored, if the row still is the one it wrote; and whether the log has xact_id."""
        if self.hot.peek(tenant, execution_id) is None:
            return None, False
        log_snapshot, places = await projections.read_places(conn, tenant, [execution_id])
        # Looked up once more, and copied without a pause: an advance may have taken it meanwhile.
        hot = self.hot.peek(tenant, execution_id)
        if hot is None or hot.place != places.get(execution_id):
            return None, False
        with collector_held():
            copied = replace(hot.snapshot, state=copy_json(hot.snapshot.state))
        return copied, log_snapshot is not None
