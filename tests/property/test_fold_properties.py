"""What holds for every log: order, cuts, differences and blame."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from noetl_grpc.core.difference import (
    MISSING,
    Blame,
    Change,
    Missing,
    Path,
    differences,
    lookup,
    noted_event_id,
)
from noetl_grpc.core.fold import Fold, FoldEvent, Identity, fold
from noetl_grpc.core.rules import FoldRules
from noetl_grpc.errors import EventMalformed
from tests.logs import Event, checksums, logs, metas

HERE = Identity(1, upcaster_registry_digest="d")
UNION = FoldRules.UNION

# Random logs are large values; time per example says nothing on a busy machine.
few = settings(max_examples=40, deadline=None)


def text_of(state: Any) -> bytes:
    text = checksums(state).canonical_json
    assert text is not None
    return text


def strict_outcome(events: list[Event], base: Any = None) -> bytes | str:
    try:
        return text_of(fold(events, HERE, FoldRules.PYTHON_4_26, base).state)
    except EventMalformed as malformed:
        return malformed.reason


@few
@given(logs(), st.randoms())
def test_any_order_of_input_gives_the_same_state(log: list[Event], random: Any) -> None:
    shuffled = random.sample(log, len(log))

    assert text_of(fold(shuffled, HERE, UNION).state) == text_of(fold(log, HERE, UNION).state)
    assert strict_outcome(shuffled) == strict_outcome(log)


@few
@given(logs(), st.data())
def test_folding_a_prefix_and_going_on_equals_folding_all(log: list[Event], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(log)))
    whole = checksums(fold(log, HERE, UNION).state)

    # A base that went through JSON, as a stored one does.
    base = json.loads(json.dumps(fold(log[:cut], HERE, UNION).state))
    continued = checksums(fold(log[cut:], HERE, UNION, base).state)

    assert continued == whole


@few
@given(logs(), st.data())
def test_folding_page_by_page_from_text_equals_folding_values(log: list[Event], data: st.DataObject) -> None:
    whole = fold(log, HERE, UNION)
    paged = Fold(HERE, UNION)
    rows = [row_of(event) for event in log]

    while rows:
        size = data.draw(st.integers(1, len(rows)))
        paged.apply_rows(rows[:size])
        rows = rows[size:]

    assert text_of(paged.state) == text_of(whole.state)
    assert paged.warnings == whole.warnings


def row_of(event: Event) -> tuple[Any, ...]:
    columns = list(FoldEvent.of(event))
    columns[4], columns[5] = (None if value is None else json.dumps(value) for value in columns[4:6])
    return tuple(columns)


@few
@given(logs())
def test_strict_and_union_differ_only_where_they_say(log: list[Event]) -> None:
    strict = strict_outcome(log)
    if isinstance(strict, str):
        return

    changes = differences(json.loads(strict), json.loads(text_of(fold(log, HERE, UNION).state)))

    for change in changes:
        match change.path:
            case ("execution", "status" | "last_node_name"):
                pass
            case ("business_objects", _, "status" | "deleted_event_id"):
                pass
            case _:
                raise AssertionError(change)


def applied(state: Any, changes: list[Change]) -> Any:
    """The state after making the changes one by one, as a reader of a diff would."""
    document = json.loads(json.dumps(state))
    for change in changes:
        parent = lookup(document, change.path[:-1])
        last: Any = int(change.path[-1]) if isinstance(parent, list) else change.path[-1]
        if isinstance(change.after, Missing):
            del parent[last]
        elif isinstance(parent, list) and last == len(parent):
            parent.append(change.after)
        else:
            parent[last] = change.after
    return document


@few
@given(logs(), st.data())
def test_changes_lead_from_one_state_to_the_other_and_name_their_event(
    log: list[Event], data: st.DataObject
) -> None:
    # Subsets of the log, because cutoffs by time need not be prefixes.
    times = {event["event_id"]: data.draw(st.integers(0, 3)) for event in log}
    start, end = data.draw(st.integers(-1, 3)), data.draw(st.integers(-1, 3))
    before = [event for event in log if times[event["event_id"]] <= start]
    after = [event for event in log if times[event["event_id"]] <= end]
    first, second = fold(before, HERE, UNION).state, fold(after, HERE, UNION).state

    changes = list(differences(first, second))

    assert text_of(applied(first, changes)) == text_of(second)
    events = blame(after, changes) | {
        path: event_id
        for path, event_id in blame(before, changes).items()
        if path not in blame(after, changes)
    }
    for change in changes:
        expected = noted_event_id(change) or events[change.path]
        assert expected in causes_by_brute_force(after, change.path)[-1:] or (
            not causes_by_brute_force(after, change.path)
            and expected == causes_by_brute_force(before, change.path)[-1]
        )


def blame(log: list[Event], changes: list[Change]) -> dict[Path, int]:
    watched = Blame(Fold(HERE, UNION), [change.path for change in changes])
    return {cause.path: cause.event_id for cause in watched.apply(FoldEvent.of(event) for event in log)}


def causes_by_brute_force(log: list[Event], path: Path) -> list[int]:
    causes, last = [], lookup(Fold(HERE, UNION).state, path)
    for size in range(1, len(log) + 1):
        value = lookup(fold(log[:size], HERE, UNION).state, path)
        if not (value is MISSING and last is MISSING) and repr(value) != repr(last):
            causes.append(log[size - 1]["event_id"])
        last = value
    return causes


def every_path(value: Any, path: Path = ()) -> list[Path]:
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = ((str(index), item) for index, item in enumerate(value))
    else:
        return [path]
    return [path] + [deeper for key, item in inner for deeper in every_path(item, (*path, key))]


@few
@given(logs(max_size=8), st.data())
def test_blame_agrees_with_a_search_over_all_prefixes(log: list[Event], data: st.DataObject) -> None:
    states = [fold(log[:size], HERE, UNION).state for size in range(len(log) + 1)]
    path = data.draw(st.sampled_from(sorted({path for state in states for path in every_path(state)})))

    causes = list(Blame(Fold(HERE, UNION), [path]).apply(FoldEvent.of(event) for event in log))

    assert [cause.event_id for cause in causes] == causes_by_brute_force(log, path)
    for cause in causes:
        size = 1 + [event["event_id"] for event in log].index(cause.event_id)
        value = lookup(states[size], path)
        assert cause.value_json is None if value is MISSING else json.loads(cause.value_json or b"") == value


@given(metas)
def test_no_meta_can_fail_a_fold_under_union(meta: Any) -> None:
    for event_type in ("stage.closed", "frame.dispatched", "frame.committed", "loop.done", "thing.updated"):
        event = {"event_id": 1, "event_type": event_type, "stage_id": 1, "frame_id": 1, "meta": meta}
        assert checksums(fold([event], HERE, UNION).state).value
