from collections.abc import Callable
from typing import Any

import pytest

from noetl_grpc.core.fold import Identity, fold
from noetl_grpc.core.rules import FoldRules
from noetl_grpc.core.upcast import Registry, UpcastError, upcast_event
from noetl_grpc.errors import EventMalformed


def to(version: Any, **changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda event: {**event, "schema_version": version, **changes}


@pytest.mark.parametrize(
    ("keys", "digest"),
    [
        ([], "4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945"),
        ([("noetl.event", 1)], "ba8b359a633af86b1a56050586c55a342c6d8c70fc6df3453a70bb69747703db"),
        (
            [("noetl.frame.committed", 2), ("noetl.event", 1)],
            "3836620c1c615adb9a936354320eb3956644efd1b30b14c1b583353c184bcbdd",
        ),
        (
            [("noetl.event", 10), ("noetl.event", 9), ("noetl.frame.committed", 2), ("noetl.event", 1)],
            "10bc21d83cb09e75c564bce8f9ab20fd6692a76035fbd2216819d69899237131",
        ),
    ],
)
def test_digest_depends_on_the_keys_and_not_on_their_order(keys: list[tuple[str, int]], digest: str) -> None:
    assert Registry.of((name, version, to(99)) for name, version in keys).digest == digest


@pytest.mark.parametrize(
    ("registrations", "message"),
    [
        ([("", 1, to(2))], "schema_name is required"),
        ([("a", 0, to(2))], "from_version must be >= 1"),
        ([("a", 1, to(2)), ("a", 1, to(3))], "upcaster already registered for a v1"),
    ],
)
def test_registering_is_checked(registrations: list[Any], message: str) -> None:
    with pytest.raises(UpcastError, match=message):
        Registry.of(registrations)


def test_upcasters_are_applied_one_after_the_other() -> None:
    registry = Registry.of([("noetl.event", 1, to(2, a=1)), ("noetl.event", 2, to(3, b=2))])
    given = {"event_id": 1}

    assert registry.upcast(given) == {
        "event_id": 1,
        "a": 1,
        "b": 2,
        "schema_name": "noetl.event",
        "schema_version": 3,
    }
    assert given == {"event_id": 1}


def test_an_event_without_schema_gets_the_defaults() -> None:
    assert Registry.of().upcast({"schema_name": ""}) == {"schema_name": "noetl.event", "schema_version": 1}


def test_a_renaming_upcaster_may_keep_the_version() -> None:
    registry = Registry.of([("old", 1, to(1, schema_name="new"))])

    assert registry.upcast({"schema_name": "old"})["schema_name"] == "new"


@pytest.mark.parametrize(
    ("registrations", "event", "message"),
    [
        ([("noetl.event", 1, to(1))], {}, "upcaster for noetl.event v1 did not advance schema_version"),
        (
            [("a", 1, to(1, schema_name="b")), ("b", 1, to(1, schema_name="a"))],
            {"schema_name": "a"},
            "circle",
        ),
        ([], {"schema_version": "x"}, "invalid schema_version: 'x'"),
        ([], {"schema_version": 0}, "schema_version must be >= 1"),
        ([("noetl.event", 1, lambda event: event["gone"])], {}, "gone"),
    ],
)
def test_an_upcast_that_fails_names_the_event(registrations: list[Any], event: Any, message: str) -> None:
    with pytest.raises(EventMalformed, match=message) as refused:
        upcast_event(Registry.of(registrations), {"event_id": 7, **event})

    assert refused.value.metadata["event_id"] == "7"


def test_upcast_events_are_folded_as_what_they_have_become() -> None:
    registry = Registry.of([("legacy.execution.finished", 1, to(2, event_type="execution.completed"))])
    log = [{"event_id": 1, "event_type": "finished", "schema_name": "legacy.execution.finished"}]

    events = [registry.upcast(each) for each in log]
    state = fold(events, Identity(1, upcaster_registry_digest=registry.digest), FoldRules.UNION).state

    assert state["execution"]["status"] == "COMPLETED"
    assert state["last_event_type"] == "execution.completed"
    assert state["upcaster_registry_digest"] == registry.digest
