from dataclasses import replace

from noetl_grpc.core import snapshots
from noetl_grpc.core.access import Tenant
from noetl_grpc.core.checksums import finish
from noetl_grpc.core.fold import Fold, Identity
from noetl_grpc.services.hot_states import HotState, HotStates

TENANT = Tenant("default", "default")
OTHER = Tenant("acme", "default")


def _state(execution_id: int, text_bytes: int = 10) -> HotState:
    fold = Fold(Identity(execution_id=execution_id), snapshots.RULES)
    folded = finish(snapshots.folded_of(fold, log_snapshot=None))
    return HotState(f"place-{execution_id}", folded.snapshot, text_bytes)


def test_who_takes_a_state_owns_it() -> None:
    states = HotStates()
    states.put(TENANT, _state(1))

    assert set(states.take(TENANT, [1, 2])) == {1}
    assert states.take(TENANT, [1, 2]) == {}


def test_who_peeks_at_a_state_leaves_it_there() -> None:
    states = HotStates()
    states.put(TENANT, _state(1))

    assert states.peek(TENANT, 1) is states.peek(TENANT, 1) is not None
    assert states.peek(OTHER, 1) is None
    assert set(states.take(TENANT, [1])) == {1}
    assert states.peek(TENANT, 1) is None


def test_tenants_do_not_share_states() -> None:
    states = HotStates()
    states.put(TENANT, _state(1))

    assert states.take(OTHER, [1]) == {}


def test_the_least_recently_used_make_room() -> None:
    states = HotStates(text_bytes_max=30)
    for number in (1, 2, 3):
        states.put(TENANT, _state(number))
    states.put(TENANT, states.take(TENANT, [1])[1])
    states.put(TENANT, _state(4))

    assert set(states.take(TENANT, [1, 2, 3, 4])) == {1, 3, 4}


def test_a_state_is_replaced_and_weighed_once() -> None:
    states = HotStates(text_bytes_max=30)
    for _ in range(5):
        states.put(TENANT, _state(1, 20))
    states.put(TENANT, replace(_state(2), place="newer"))

    assert set(states.take(TENANT, [1, 2])) == {1, 2}


def test_one_that_is_too_large_is_not_kept() -> None:
    states = HotStates(text_bytes_max=30)
    states.put(TENANT, _state(1, 31))

    assert states.take(TENANT, [1]) == {}
