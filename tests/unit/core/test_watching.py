"""The tokens of watches."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

import orjson
import pytest

from noetl_grpc.core import watching
from noetl_grpc.core.following import Key, Page, Position
from noetl_grpc.core.lifecycle import State, Subscription
from noetl_grpc.core.watching import Place, Target
from noetl_grpc.errors import InvalidRequest

ALL = Target()
TWO = (Position("10:20:11,12"), Position("5:9:", "7:12:", 8, 1234))


def make_subscription(subscription_id: int, path: str) -> Subscription:
    return Subscription(
        subscription_id=subscription_id,
        path=path,
        catalog_id=1,
        state=State.ACTIVE,
        last_event_type="subscription.activated",
        last_event_id=9,
        updated_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


@pytest.mark.parametrize("place", [Place(TWO), Place(TWO, told=0), Place(TWO, told=2**63 - 1), Place(())])
def test_a_place_survives_its_token(place: Place) -> None:
    token = watching.encode(place, ALL)

    assert watching.decode(token, ALL, shards=2) == place
    assert set(token) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


@pytest.mark.parametrize(
    "other", [Target(subscription_id=1), Target(path_prefix="a"), Target(subscription_id=2)]
)
def test_a_token_belongs_to_its_target(other: Target) -> None:
    token = watching.encode(Place(TWO), Target(subscription_id=7))

    with pytest.raises(InvalidRequest, match="resume_token"):
        watching.decode(token, other, shards=2)


def test_a_token_belongs_to_its_shards() -> None:
    with pytest.raises(InvalidRequest, match="resume_token"):
        watching.decode(watching.encode(Place(TWO), ALL), ALL, shards=3)


@pytest.mark.parametrize(
    "values",
    [
        [],
        {},
        7,
        [ALL.digest(), None],
        [ALL.digest(), None, [["x", None, 0, 0]]],
        [ALL.digest(), None, [["1:2:", None, 0, "0"]]],
        [ALL.digest(), -1, [["1:2:", None, 0, 0]]],
        [ALL.digest(), 2**63, [["1:2:", None, 0, 0]]],
        [ALL.digest(), "0", [["1:2:", None, 0, 0]]],
        [ALL.digest(), None, [["1:2:", None, 0, 0], ["1:2:", None, 0, 0]]],
        ["0" * 16, None, [["1:2:", None, 0, 0]]],
    ],
)
def test_what_is_no_place_is_refused(values: object) -> None:
    token = base64.urlsafe_b64encode(orjson.dumps(values)).decode().rstrip("=")

    with pytest.raises(InvalidRequest, match="resume_token"):
        watching.decode(token, ALL, shards=1)


@pytest.mark.parametrize("token", ["x", "ü", "====", "bm8", " "])
def test_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequest, match="resume_token"):
        watching.decode(token, ALL, shards=1)


def test_a_target_is_one_or_those_of_a_beginning() -> None:
    one, other = make_subscription(1, "a/b"), make_subscription(2, "a%")

    assert [Target(subscription_id=1).includes(each) for each in (one, other)] == [True, False]
    assert [Target(path_prefix="a").includes(each) for each in (one, other)] == [True, True]
    assert [Target(path_prefix="a%").includes(each) for each in (one, other)] == [False, True]


def test_behind_an_event_that_shares_its_place_is_before_the_place() -> None:
    """Going on behind it would pass over the other one."""
    before = Position("1:5:", "6:9:")
    keys = [Key(6, 50, 1, "t"), Key(7, 60, 1, "t"), Key(7, 60, 2, "t"), Key(8, 10, 3, "t")]
    page = Page(keys, before, Position("6:9:"))

    assert watching.positions_behind(page) == [
        Position("1:5:", "6:9:", 6, 50),
        Position("1:5:", "6:9:", 6, 50),
        Position("1:5:", "6:9:", 7, 60),
        Position("6:9:"),
    ]


def test_a_place_moves_by_shard() -> None:
    moved = Place(TWO).moved(1, Position("9:9:"))

    assert moved == Place((TWO[0], Position("9:9:")))


def test_an_event_behind_a_higher_one_changed_nothing() -> None:
    keys = [
        Key(6, 50, 1, "t"),
        Key(7, 40, 1, "t"),
        Key(8, 60, 1, "t"),
        Key(8, 70, 2, "t"),
        Key(9, 71, 2, "t"),
    ]
    page = Page(keys, Position("1:5:", "6:9:"), Position("6:9:"))
    read = {(key.execution_id, key.event_id): make_subscription(key.execution_id, "p") for key in keys[:4]}

    told = watching.changes(page, read, {1: 45, 2: 70})

    assert [change is not None for change in told] == [True, False, True, False, False]
