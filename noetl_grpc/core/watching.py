"""Where a watch of subscriptions stands, as the token that a caller gives back to go on from there."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import orjson

from noetl_grpc.core.following import Page, Position
from noetl_grpc.core.lifecycle import Subscription
from noetl_grpc.errors import InvalidRequest

_RULE = "is not a resume_token of this watch with the same target"
_ID_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Target:
    """Which subscriptions are watched: one, or those whose path begins so."""

    subscription_id: int | None = None
    path_prefix: str = ""

    def includes(self, subscription: Subscription) -> bool:
        """Whether a subscription is watched."""
        if self.subscription_id is not None:
            return subscription.subscription_id == self.subscription_id
        return subscription.path.startswith(self.path_prefix)

    def digest(self) -> str:
        """What a token remembers of it."""
        text = orjson.dumps([self.subscription_id, self.path_prefix])
        return hashlib.sha256(text).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Place:
    """How far a watch has come, with a position per shard; none where the log can't be followed by snapshots."""

    positions: tuple[Position, ...]
    #: The last subscription told of the present, which is what the positions show; None once all of it is told.
    told: int | None = None

    def moved(self, number: int, position: Position) -> Place:
        """The place after one of the shards' positions has moved on."""
        positions = (*self.positions[:number], position, *self.positions[number + 1 :])
        return replace(self, positions=positions)


def positions_behind(page: Page) -> list[Position]:
    """Where to go on behind each event of a page.

    Ids are unique within an execution only, so two events may share a place; behind the first of them is then before
    the place, for going on behind it would pass over the second.
    """
    positions: list[Position] = []
    before = page.before
    for number, key in enumerate(page.keys):
        following = page.keys[number + 1] if number + 1 < len(page.keys) else None
        if following is None:
            before = page.after
        elif (key.xact_id, key.event_id) != (following.xact_id, following.event_id):
            before = page.behind(key)
        positions.append(before)
    return positions


def changes(
    page: Page, read: Mapping[tuple[int, int], Subscription], last_event_ids: Mapping[int, int]
) -> list[Subscription | None]:
    """The subscription as of each event of a page; None where the event does not count.

    An event that became visible later than one with a higher id changed nothing: the state was never its.
    """
    last = dict(last_event_ids)
    told: list[Subscription | None] = []
    for key in page.keys:
        change = read.get((key.execution_id, key.event_id))
        if change is None or key.event_id <= last.get(key.execution_id, 0):
            told.append(None)
        else:
            told.append(change)
            last[key.execution_id] = key.event_id
    return told


def encode(place: Place, target: Target) -> str:
    """The token of a place."""
    positions = [position.as_list() for position in place.positions]
    text = orjson.dumps([target.digest(), place.told, positions])
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


def decode(token: str, target: Target, *, shards: int) -> Place:
    """The place of a token, if it is one of a watch of this target over so many shards."""
    try:
        values = orjson.loads(base64.b64decode(token + "=" * (-len(token) % 4), b"-_", validate=True))
    except (binascii.Error, ValueError):
        raise InvalidRequest("resume_token", _RULE) from None
    match values:
        case [str(digest), None | int() as told, list(listed)] if digest == target.digest():
            positions = tuple(Position.from_list(values) for values in listed)
        case _:
            raise InvalidRequest("resume_token", _RULE)
    known = tuple(position for position in positions if position is not None)
    if len(known) != len(positions) or len(known) not in (0, shards) or not 0 <= (told or 0) <= _ID_MAX:
        raise InvalidRequest("resume_token", _RULE)
    return Place(known, told)
