"""The lifecycle of a subscription: its states, the transition table as data, and what may follow.

A subscription has no state of its own. Its state is the status of the last event, by event_id, whose type is one
of the six here and whose status is one of the five states; every other event under its id is none of our business.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum

from noetl_grpc.errors import EtagMismatch, IllegalTransition, InvalidRequest, LeaseHeld

#: Who is named in events that nobody asked for.
OURSELVES = "noetl_grpc"

REGISTERED_EVENT = "subscription.registered"
CATALOG_KIND = "subscription"


class State(Enum):
    """Where a subscription stands; the values are the words in the log."""

    REGISTERED = "REGISTERED"
    ACTIVE = "ACTIVE"
    PAUSED = "PAUSED"
    DRAINING = "DRAINING"
    DEACTIVATED = "DEACTIVATED"


class Action(Enum):
    """What a caller may ask for."""

    ACTIVATE = "activate"
    PAUSE = "pause"
    RESUME = "resume"
    DRAIN = "drain"
    DEACTIVATE = "deactivate"


@dataclass(frozen=True, slots=True)
class Transition:
    """What an action writes, where it leads, and where it may start."""

    event_type: str
    to: State
    allowed_from: tuple[State, ...]


TRANSITIONS: dict[Action, Transition] = {
    Action.ACTIVATE: Transition(
        "subscription.activated",
        State.ACTIVE,
        (State.REGISTERED, State.PAUSED, State.DEACTIVATED, State.ACTIVE),
    ),
    Action.PAUSE: Transition("subscription.paused", State.PAUSED, (State.ACTIVE, State.PAUSED)),
    Action.RESUME: Transition("subscription.resumed", State.ACTIVE, (State.PAUSED, State.ACTIVE)),
    Action.DRAIN: Transition(
        "subscription.draining", State.DRAINING, (State.ACTIVE, State.PAUSED, State.DRAINING)
    ),
    Action.DEACTIVATE: Transition("subscription.deactivated", State.DEACTIVATED, tuple(State)),
}

#: The types of events that have a say in the state.
EVENT_TYPES = (REGISTERED_EVENT, *(transition.event_type for transition in TRANSITIONS.values()))


@dataclass(frozen=True, slots=True)
class Cause:
    """Who wanted a change, why, and under which id of theirs; each may be empty."""

    actor: str = ""
    reason: str = ""
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class LifecycleEvent:
    """One step in the life of a subscription."""

    subscription_id: int
    event_id: int
    event_type: str
    state: State
    path: str
    catalog_id: int
    created_at: datetime
    cause: Cause = Cause()

    def context(self) -> dict[str, str]:
        """The event's context, as NoETL's own server writes it."""
        return {
            "subscription_id": str(self.subscription_id),
            "path": self.path,
            "catalog_id": str(self.catalog_id),
        }

    def meta(self) -> dict[str, str | bool]:
        """The event's meta, as NoETL's own server writes it, and who, why and which request where that was said."""
        said = {
            "actor": self.cause.actor,
            "reason": self.cause.reason,
            "request_id": self.cause.request_id,
        }
        return {
            "emitted_at": self.created_at.isoformat(),
            "emitter": "control_plane",
            "subscription_lifecycle": True,
            **{key: value for key, value in said.items() if value},
        }


@dataclass(frozen=True, slots=True)
class Runtime:
    """The process that runs a subscription, by its last heartbeat."""

    runtime_id: str
    last_heartbeat_at: datetime
    lease_expires_at: datetime
    #: Whether the lease still lived when this was read.
    alive: bool
    in_flight: int | None = None
    backlog: int | None = None


@dataclass(frozen=True, slots=True)
class Subscription:
    """A subscription as of one of its events, usually the last."""

    subscription_id: int
    path: str
    catalog_id: int
    state: State
    last_event_type: str
    last_event_id: int
    updated_at: datetime
    runtime: Runtime | None = None

    @property
    def etag(self) -> str:
        """Changes with every lifecycle event and with nothing else."""
        return str(self.last_event_id)


@dataclass(frozen=True, slots=True)
class Report:
    """What a heartbeat says."""

    runtime_id: str
    lease: timedelta
    in_flight: int | None = None
    backlog: int | None = None


def subscription_at(event: LifecycleEvent, runtime: Runtime | None = None) -> Subscription:
    """The subscription as of this event, with what is known of its runtime now."""
    return Subscription(
        subscription_id=event.subscription_id,
        path=event.path,
        catalog_id=event.catalog_id,
        state=event.state,
        last_event_type=event.event_type,
        last_event_id=event.event_id,
        updated_at=event.created_at,
        runtime=runtime,
    )


def register(
    *, subscription_id: int, event_id: int, path: str, catalog_id: int, now: datetime
) -> LifecycleEvent:
    """The first event of a new subscription."""
    return LifecycleEvent(
        subscription_id=subscription_id,
        event_id=event_id,
        event_type=REGISTERED_EVENT,
        state=State.REGISTERED,
        path=path,
        catalog_id=catalog_id,
        created_at=now,
    )


def advance(
    current: Subscription, action: Action, *, event_id: int, now: datetime, cause: Cause = Cause()
) -> LifecycleEvent:
    """The event that this action appends; refused where the table does not allow it.

    The event comes after the last one whatever the clock of the machine says that minted its id.
    """
    transition = TRANSITIONS[action]
    if current.state not in transition.allowed_from:
        allowed = ", ".join(state.value for state in transition.allowed_from)
        raise IllegalTransition(
            f"cannot {action.value} subscription {current.subscription_id}: it is {current.state.value},"
            f" and that is allowed from {allowed}",
            metadata={
                "subscription_id": current.subscription_id,
                "state": current.state.value,
                "action": action.value,
                "allowed_from": allowed,
            },
        )
    return LifecycleEvent(
        subscription_id=current.subscription_id,
        event_id=max(event_id, current.last_event_id + 1),
        event_type=transition.event_type,
        state=transition.to,
        path=current.path,
        catalog_id=current.catalog_id,
        created_at=now,
        cause=cause,
    )


def require_etag(current: Subscription, etag: str) -> None:
    """Refuse to act on a subscription that has changed since the caller saw it; empty means whatever it is."""
    if etag and etag != current.etag:
        raise EtagMismatch(
            f"subscription {current.subscription_id} has changed: its etag is {current.etag}, not {etag}",
            metadata={
                "subscription_id": current.subscription_id,
                "etag": etag,
                "current_etag": current.etag,
                "state": current.state.value,
            },
        )


def require_repeat(earlier: LifecycleEvent, action: Action) -> None:
    """A request id names one request: refuse it for another action than the one it was used for."""
    if earlier.event_type != TRANSITIONS[action].event_type:
        raise InvalidRequest(
            "request_id",
            f"was used before for another action, which wrote {earlier.event_type}; give each request its own",
        )


def is_wedged(
    current: Subscription, *, draining_since: datetime, drain_timeout: timedelta, now: datetime
) -> bool:
    """Whether nobody is left who could end the draining, so that the path must be freed."""
    if current.state is not State.DRAINING:
        return False
    if current.runtime is not None:
        return not current.runtime.alive
    return now - draining_since >= drain_timeout


def renew(current: Subscription, report: Report, *, now: datetime) -> Runtime:
    """The runtime after its heartbeat; refused while another one's lease lives."""
    holder = current.runtime
    if holder is not None and holder.alive and holder.runtime_id != report.runtime_id:
        raise LeaseHeld(
            f"subscription {current.subscription_id} is held by runtime {holder.runtime_id}"
            f" until {holder.lease_expires_at.isoformat()}",
            metadata={
                "subscription_id": current.subscription_id,
                "runtime_id": holder.runtime_id,
                "lease_expires_at": holder.lease_expires_at.isoformat(),
            },
        )
    return Runtime(
        runtime_id=report.runtime_id,
        last_heartbeat_at=now,
        lease_expires_at=now + report.lease,
        alive=True,
        in_flight=report.in_flight,
        backlog=report.backlog,
    )


def has_drained(current: Subscription, report: Report) -> bool:
    """Whether this heartbeat ends the draining: only a runtime that says so has nothing in flight."""
    return current.state is State.DRAINING and report.in_flight == 0
