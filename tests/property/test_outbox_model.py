"""Random histories of one outbox on real PostgreSQL, step by step beside a model that fits on a page."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import asyncpg
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from noetl_grpc.core.outbox import DeadFilter, Failure, Message, Outcome
from noetl_grpc.metrics import Metrics
from noetl_grpc.services.chores import Chores
from noetl_grpc.services.outbox_shard import Claim, OutboxShard, Terms
from noetl_grpc.storage.pool import create_pool

ATTEMPTS_MAX = 3
LEASE = timedelta(hours=1)
#: What may happen next; claims and failures more often than the rest.
ACTS = [
    "enqueue",
    "claim",
    "claim",
    "claim",
    "publish",
    "publish_all_held",
    "publish_without_token",
    "fail",
    "fail",
    "release",
    "extend",
    "break_off",
    "expire",
    "let_time_pass",
    "requeue",
]


@dataclass(slots=True)
class Row:
    """What a row should be."""

    execution: int | None
    state: str = "pending"  # delayed, in_flight, dead, published
    attempts: int = 0
    #: The claim that holds it, or held it when it was published.
    holder: int | None = None
    expired: bool = False

    @property
    def is_due(self) -> bool:
        return self.state == "pending" or (self.state == "in_flight" and self.expired)

    @property
    def is_live(self) -> bool:
        return self.state in ("pending", "delayed", "in_flight")

    def give_back(self, state: str = "pending", *, attempt: int = 0) -> None:
        self.state, self.holder, self.expired = state, None, False
        self.attempts -= attempt


@dataclass(slots=True)
class Token:
    """A claim that was made."""

    number: int
    claim: Claim
    ordered: bool
    outbox_ids: list[int] = field(default_factory=list)


class OutboxMachine(RuleBasedStateMachine):
    """One shard, several claimers."""

    url = ""
    any_rows = st.lists(st.integers(1, 14), min_size=1, max_size=5, unique=True)

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.rows: dict[int, Row] = {}
        self.claims = 0
        self.ordered_claims: set[int | None] = set()
        self.events = 0
        self.tokens: list[Token] = []

    def run(self, job: Any) -> Any:
        return self.runner.run(job)

    @initialize()
    def start(self) -> None:
        async def open_shard() -> None:
            self.conn = await asyncpg.connect(self.url)
            await self.conn.execute("TRUNCATE noetl.outbox RESTART IDENTITY")
            self.pool = await create_pool(self.url, name="0")
            self.shard = OutboxShard(
                0, self.pool, attempts_max=ATTEMPTS_MAX, metrics=Metrics(), chores=Chores()
            )

        self.run(open_shard())
        self.add([1, 2, 1, None, 1, 2, 1, None, 2, 1])

    def teardown(self) -> None:
        async def close() -> None:
            await self.pool.close()
            await self.conn.close()

        if hasattr(self, "pool"):
            self.run(close())
        self.runner.close()

    # One rule for everything: with a rule each, most of a run would be switched off by Hypothesis' swarm testing.
    @rule(
        act=st.sampled_from(ACTS),
        data=st.data(),
    )
    def act(self, act: str, data: st.DataObject) -> None:
        getattr(self, act)(data)

    def token(self, data: st.DataObject) -> Token | None:
        """One of the latest claims."""
        return data.draw(st.sampled_from(self.tokens[-4:])) if self.tokens else None

    def some_rows(self, token: Token, data: st.DataObject) -> list[int]:
        """Mostly rows that the claim got; a few that it never had."""
        return data.draw(
            st.one_of(
                st.lists(st.sampled_from(token.outbox_ids), min_size=1, max_size=3, unique=True),
                self.any_rows,
            )
        )

    def held(self, token: Token) -> set[int]:
        return {
            number
            for number, row in self.rows.items()
            if row.state == "in_flight" and row.holder == token.number
        }

    def give_back_behind(self, oldest: Iterable[int], holder: int | None) -> set[int]:
        """What an ordered claim loses behind rows that went back."""
        lost = set()
        for number in oldest:
            for other, row in self.rows.items():
                if (
                    other > number
                    and row.execution is not None
                    and row.execution == self.rows[number].execution
                    and row.state == "in_flight"
                    and row.holder == holder
                ):
                    lost.add(other)
        for other in lost:
            self.rows[other].give_back(attempt=1)
        return lost

    def enqueue(self, data: st.DataObject) -> None:
        self.add(data.draw(st.lists(st.sampled_from([1, 1, 2, None]), min_size=1, max_size=4)))

    def add(self, executions: list[int | None]) -> None:
        messages = []
        for execution in executions:
            self.events += 1
            messages.append(Message(self.events, execution, None, "{}", "json", None, None))

        added, outbox_ids = self.run(self.shard.enqueue([*messages, messages[0]]))

        assert added == len(messages)
        assert outbox_ids[-1] == outbox_ids[0]
        for outbox_id, execution in zip(outbox_ids, executions, strict=False):
            self.rows[outbox_id] = Row(execution)

    def claim(self, data: st.DataObject) -> None:
        limit = data.draw(st.sampled_from([1, 4, 10]))
        ordered = data.draw(st.sampled_from([True, True, False]))
        claim = self.run(self.shard.claim(Terms(limit, 10**6, LEASE, ordered)))

        due = sorted(number for number, row in self.rows.items() if row.is_due)
        taken = [row.outbox_id for row in claim.rows] if claim else []
        if ordered:
            self.check_runs(taken, limit)
        else:
            assert taken == sorted(set(taken) & set(due))
            assert len(taken) == min(limit, len(due))
            # Of more expired rows than fit, those come whose lease ended first.
            if sum(self.rows[number].state == "in_flight" for number in due) <= limit:
                assert taken == due[:limit]
        if claim is None:
            return
        self.claims += 1
        if ordered:
            self.ordered_claims.add(self.claims)
        for row in claim.rows:
            known = self.rows[row.outbox_id]
            known.attempts += 1
            known.state, known.holder, known.expired = "in_flight", self.claims, False
            assert (row.attempts, row.execution_id) == (known.attempts, known.execution)
        self.tokens.append(Token(self.claims, claim, ordered, taken))

    def check_runs(self, taken: list[int], limit: int) -> None:
        assert len(taken) <= limit
        assert taken == sorted(taken)
        lanes: dict[int, list[int]] = {}
        for number, row in sorted(self.rows.items()):
            if row.is_live and row.execution is not None:
                lanes.setdefault(row.execution, []).append(number)
        for lane in lanes.values():
            mine = [number for number in taken if number in lane]
            assert mine == lane[: len(mine)]
        assert all(self.rows[number].is_due for number in taken)
        heads = [lane[0] for lane in lanes.values() if self.rows[lane[0]].is_due]
        loose = [number for number, row in self.rows.items() if row.execution is None and row.is_due]
        assert bool(taken) is bool(heads or loose)

    def publish(self, data: st.DataObject) -> None:
        if token := self.token(data):
            self.publish_these(token, self.some_rows(token, data))

    def publish_these(self, token: Token, numbers: list[int]) -> None:
        published = self.run(self.shard.mark_published(numbers, token.claim.token.claim))

        held = self.held(token) & set(numbers)
        known = [number for number in numbers if number in self.rows]
        repeated = {
            number
            for number in known
            if self.rows[number].state == "published" and self.rows[number].holder == token.number
        }
        assert published.marked == len(held)
        assert set(published.stale_ids) == set(known) - held - repeated
        assert set(published.unknown_ids) == set(numbers) - set(known)
        for number in held:
            self.rows[number].state = "published"

    def publish_all_held(self, data: st.DataObject) -> None:
        if (token := self.token(data)) and (held := self.held(token)):
            self.publish_these(token, sorted(held))

    def publish_without_token(self, data: st.DataObject) -> None:
        numbers = data.draw(self.any_rows)
        published = self.run(self.shard.mark_published(numbers, None))

        known = [number for number in numbers if number in self.rows]
        marked = [number for number in known if self.rows[number].state != "published"]
        assert (published.marked, list(published.stale_ids)) == (len(marked), [])
        for number in marked:
            self.rows[number].state = "published"

    def fail(self, data: st.DataObject) -> None:
        token = self.token(data)
        if token is None:
            return
        numbers = self.some_rows(token, data)
        with_token = data.draw(st.sampled_from([True, True, False]))
        failures = [Failure(number, "no", 0, 300) for number in numbers]
        claim = token.claim.token.claim if with_token else None
        verdicts, released = self.run(self.shard.fail(failures, claim))

        went_back: dict[int | None, list[int]] = {}
        for verdict in verdicts:
            row = self.rows.get(verdict.outbox_id)
            held = row is not None and row.state == "in_flight" and row.holder == token.number
            if row is None:
                expected = Outcome.UNKNOWN
            elif row.state == "published":
                is_mine = not with_token or row.holder == token.number
                expected = Outcome.ALREADY_PUBLISHED if is_mine else Outcome.STALE
            elif with_token and not held:
                expected = Outcome.STALE
            else:
                expected = (
                    Outcome.DEAD if row.state == "dead" or row.attempts >= ATTEMPTS_MAX else Outcome.FAILED
                )
                if row.state == "in_flight":
                    went_back.setdefault(row.holder, []).append(verdict.outbox_id)
                row.give_back("dead" if expected is Outcome.DEAD else "delayed")
            assert verdict.outcome is expected
        behind = set()
        for holder, oldest in went_back.items():
            if holder in self.ordered_claims:
                behind |= self.give_back_behind(oldest, holder)
        assert set(released) == behind

    def release(self, data: st.DataObject) -> None:
        token = self.token(data)
        if token is None:
            return
        numbers = self.some_rows(token, data)
        everything = data.draw(st.sampled_from([False, False, True]))
        released = self.run(self.shard.release(token.claim.token, [] if everything else numbers))

        held = self.held(token)
        mine = held if everything else held & set(numbers)
        for number in mine:
            self.rows[number].give_back(attempt=1)
        behind = self.give_back_behind(mine, token.number) if token.ordered else set()
        assert released.rows == len(mine) + len(behind)
        assert set(released.younger_ids) == behind
        lost = set() if everything else set(numbers) - mine - behind
        assert set(released.lost_ids) == lost

    def extend(self, data: st.DataObject) -> None:
        token = self.token(data)
        if token is None:
            return
        numbers = self.some_rows(token, data)
        everything = data.draw(st.sampled_from([False, False, True]))
        extended = self.run(self.shard.extend(token.claim.token, [] if everything else numbers, lease=LEASE))

        held = self.held(token)
        mine = held if everything else held & set(numbers)
        assert extended.extended == len(mine)
        assert set(extended.lost_ids) == (set() if everything else set(numbers) - mine)
        for number in mine:
            self.rows[number].expired = False

    def break_off(self, data: st.DataObject) -> None:
        """A stream breaks: its rows go back with the attempt counted."""
        token = self.token(data)
        if token is None:
            return
        held = self.held(token)
        self.run(self.shard.abandon(token.claim.token.claim, sorted(held), error="broke"))

        for number in held:
            row = self.rows[number]
            row.give_back("dead" if row.attempts >= ATTEMPTS_MAX else "pending")

    def expire(self, data: st.DataObject) -> None:
        numbers = data.draw(self.any_rows)
        self.run(
            self.conn.execute(
                "UPDATE noetl.outbox SET lease_expires_at = now() - interval '1 ms'"
                " WHERE status = 'IN_FLIGHT' AND outbox_id = ANY($1)",
                numbers,
            )
        )
        for number in numbers:
            if number in self.rows and self.rows[number].state == "in_flight":
                self.rows[number].expired = True

    def let_time_pass(self, data: st.DataObject) -> None:
        self.run(
            self.conn.execute("UPDATE noetl.outbox SET available_at = now() WHERE available_at < 'infinity'")
        )
        for row in self.rows.values():
            if row.state == "delayed":
                row.state = "pending"

    def requeue(self, data: st.DataObject) -> None:
        dead = [row for row in self.rows.values() if row.state == "dead"]
        assert self.run(self.shard.count_dead(DeadFilter())) == len(dead)
        assert self.run(self.shard.requeue(DeadFilter())) == len(dead)
        for row in dead:
            row.state, row.attempts = "pending", 0

    @invariant()
    def every_row_is_where_the_model_has_it(self) -> None:
        if not hasattr(self, "shard"):
            return
        stats = self.run(self.shard.stats())
        counted = {
            "pending": stats.pending,
            "delayed": stats.delayed,
            "in_flight": stats.in_flight,
            "expired": stats.expired,
            "dead": stats.dead,
        }
        expected = dict.fromkeys(counted, 0)
        for row in self.rows.values():
            if row.state != "published":
                expected["expired" if row.expired and row.state == "in_flight" else row.state] += 1
        assert counted == expected
        assert self.run(self.shard.count_pending()) == expected["pending"] + expected["expired"]


def test_any_history_leaves_the_outbox_as_the_model_has_it(database_url: str) -> None:
    OutboxMachine.url = database_url
    run_state_machine_as_test(
        OutboxMachine,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
