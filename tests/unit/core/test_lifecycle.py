"""The transition table and the decisions around it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from noetl_grpc.core import lifecycle
from noetl_grpc.core.lifecycle import (
    EVENT_TYPES,
    TRANSITIONS,
    Action,
    Cause,
    Report,
    Runtime,
    State,
    Subscription,
)
from noetl_grpc.errors import EtagMismatch, IllegalTransition, InvalidRequest, LeaseHeld

NOW = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)


def make_subscription(state: State = State.ACTIVE, runtime: Runtime | None = None) -> Subscription:
    return Subscription(
        subscription_id=42,
        path="jobs/listen",
        catalog_id=7,
        state=state,
        last_event_type="subscription.activated",
        last_event_id=1000,
        updated_at=NOW,
        runtime=runtime,
    )


def make_runtime(*, alive: bool) -> Runtime:
    return Runtime(
        runtime_id="first",
        last_heartbeat_at=NOW - timedelta(seconds=10),
        lease_expires_at=NOW + timedelta(seconds=20 if alive else -1),
        alive=alive,
    )


def test_where_each_action_leads() -> None:
    assert {action.value: transition.to.value for action, transition in TRANSITIONS.items()} == {
        "activate": "ACTIVE",
        "pause": "PAUSED",
        "resume": "ACTIVE",
        "drain": "DRAINING",
        "deactivate": "DEACTIVATED",
    }
    assert "bogus" not in {action.value for action in Action}


def test_pause_only_from_active_or_again() -> None:
    assert TRANSITIONS[Action.PAUSE].allowed_from == (State.ACTIVE, State.PAUSED)


def test_resume_only_from_paused_or_again() -> None:
    assert TRANSITIONS[Action.RESUME].allowed_from == (State.PAUSED, State.ACTIVE)


def test_draining_ends_only_in_deactivation() -> None:
    leaving = {
        action for action, transition in TRANSITIONS.items() if State.DRAINING in transition.allowed_from
    }

    assert leaving == {Action.DRAIN, Action.DEACTIVATE}


def test_the_words_in_the_log_are_the_states() -> None:
    for state in State:
        assert State(state.value) is state
    with pytest.raises(ValueError, match="NOPE"):
        State("NOPE")


def test_six_types_of_events_count() -> None:
    assert EVENT_TYPES == (
        "subscription.registered",
        "subscription.activated",
        "subscription.paused",
        "subscription.resumed",
        "subscription.draining",
        "subscription.deactivated",
    )


def test_an_illegal_transition_says_what_would_be_allowed() -> None:
    with pytest.raises(IllegalTransition) as raised:
        lifecycle.advance(make_subscription(State.DRAINING), Action.RESUME, event_id=2000, now=NOW)

    assert "cannot resume subscription 42: it is DRAINING" in raised.value.message
    assert raised.value.metadata == {
        "subscription_id": "42",
        "state": "DRAINING",
        "action": "resume",
        "allowed_from": "PAUSED, ACTIVE",
    }


@pytest.mark.parametrize(("minted", "stored"), [(2000, 2000), (1001, 1001), (1000, 1001), (3, 1001)])
def test_an_event_comes_after_the_last_one_whatever_the_clock_says(minted: int, stored: int) -> None:
    event = lifecycle.advance(make_subscription(), Action.PAUSE, event_id=minted, now=NOW)

    assert event.event_id == stored


def test_an_event_carries_what_was_said_and_nothing_else() -> None:
    said = lifecycle.advance(
        make_subscription(), Action.PAUSE, event_id=2000, now=NOW, cause=Cause(actor="ann", reason="lunch")
    )
    unsaid = lifecycle.advance(make_subscription(), Action.PAUSE, event_id=2000, now=NOW)

    assert said.meta() == {
        "emitted_at": "2026-03-01T12:00:00.123456+00:00",
        "emitter": "control_plane",
        "subscription_lifecycle": True,
        "actor": "ann",
        "reason": "lunch",
    }
    assert unsaid.meta().keys() == {"emitted_at", "emitter", "subscription_lifecycle"}
    assert said.context() == {"subscription_id": "42", "path": "jobs/listen", "catalog_id": "7"}


@pytest.mark.parametrize("etag", ["999", "01000", "x", " 1000"])
def test_only_the_present_etag_is_current(etag: str) -> None:
    lifecycle.require_etag(make_subscription(), "")
    lifecycle.require_etag(make_subscription(), "1000")

    with pytest.raises(EtagMismatch) as raised:
        lifecycle.require_etag(make_subscription(), etag)

    assert raised.value.metadata["current_etag"] == "1000"


def test_a_request_id_is_not_for_two_actions() -> None:
    paused = lifecycle.advance(make_subscription(), Action.PAUSE, event_id=2000, now=NOW)

    lifecycle.require_repeat(paused, Action.PAUSE)
    with pytest.raises(InvalidRequest, match=r"request_id was used before.*subscription\.paused"):
        lifecycle.require_repeat(paused, Action.DRAIN)


@pytest.mark.parametrize(
    ("state", "alive", "draining_seconds", "wedged"),
    [
        (State.DRAINING, None, 299, False),
        (State.DRAINING, None, 300, True),
        (State.DRAINING, True, 9999, False),
        (State.DRAINING, False, 0, True),
        (State.ACTIVE, False, 9999, False),
        (State.DEACTIVATED, None, 9999, False),
    ],
)
def test_draining_is_wedged_when_nobody_is_left_to_end_it(
    state: State, alive: bool | None, draining_seconds: int, wedged: bool
) -> None:
    runtime = None if alive is None else make_runtime(alive=alive)

    assert wedged is lifecycle.is_wedged(
        make_subscription(state, runtime),
        draining_since=NOW - timedelta(seconds=draining_seconds),
        drain_timeout=timedelta(seconds=300),
        now=NOW,
    )


def test_a_drain_timeout_of_nothing_is_over_at_once() -> None:
    assert lifecycle.is_wedged(
        make_subscription(State.DRAINING), draining_since=NOW, drain_timeout=timedelta(0), now=NOW
    )


def test_a_lease_is_renewed_by_its_holder_and_taken_over_when_it_has_expired() -> None:
    report = Report(runtime_id="second", lease=timedelta(seconds=30), in_flight=3)

    first = replace(report, runtime_id="first")
    for runtime, by in (
        (None, report),
        (make_runtime(alive=False), report),
        (make_runtime(alive=True), first),
    ):
        renewed = lifecycle.renew(make_subscription(runtime=runtime), by, now=NOW)
        assert renewed == Runtime(
            runtime_id=by.runtime_id,
            last_heartbeat_at=NOW,
            lease_expires_at=NOW + timedelta(seconds=30),
            alive=True,
            in_flight=3,
            backlog=None,
        )

    with pytest.raises(LeaseHeld) as raised:
        lifecycle.renew(make_subscription(runtime=make_runtime(alive=True)), report, now=NOW)
    assert raised.value.metadata["runtime_id"] == "first"


@pytest.mark.parametrize(
    ("state", "in_flight", "drained"),
    [
        (State.DRAINING, 0, True),
        (State.DRAINING, 1, False),
        (State.DRAINING, None, False),
        (State.ACTIVE, 0, False),
        (State.DEACTIVATED, 0, False),
    ],
)
def test_only_an_explicit_nothing_ends_the_draining(
    state: State, in_flight: int | None, drained: bool
) -> None:
    report = Report(runtime_id="first", lease=timedelta(seconds=30), in_flight=in_flight)

    assert lifecycle.has_drained(make_subscription(state), report) is drained
