"""The read model through gRPC: advance, get, wait, verify, and replays that begin at a snapshot."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from noetlpb.v1 import projection_pb2 as pb
from noetlpb.v1 import projection_pb2_grpc as rpc
from noetlpb.v1 import state_pb2

from noetl_grpc.checks import read_model
from noetl_grpc.checks.frame import silent
from noetl_grpc.errors import InvalidRequest, NotFound
from noetl_grpc.status import from_rpc_error
from tests.conftest import AUTHORIZATION
from tests.events import add_catalog_entry, copy_log
from tests.logs import vectors
from tests.replay_api import STRICT, ReplayApi, timestamp


class ProjectionApi:
    """The service with a token on every call; failures are our exceptions."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = rpc.ProjectionServiceStub(channel)

    async def __call__(self, request: Any) -> Any:
        name = type(request).__name__.removesuffix("Request")
        try:
            return await getattr(self._stub, name)(request, metadata=AUTHORIZATION, timeout=15)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None


@pytest.fixture
async def api(channel: grpc.aio.Channel, conn: asyncpg.Connection) -> ProjectionApi:
    await add_catalog_entry(conn)
    return ProjectionApi(channel)


@pytest.fixture
def replay(channel: grpc.aio.Channel) -> ReplayApi:
    return ReplayApi(channel)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.AdvanceProjectionsRequest(execution_ids=[1] * 1001), "execution_ids"),
        (pb.AdvanceProjectionsRequest(execution_ids=[1, 0]), "execution_ids[1]"),
        (pb.AdvanceProjectionsRequest(execution_ids=[-(2**63)]), "execution_ids[0]"),
        (pb.AdvanceProjectionsRequest(execution_ids=[1], tenant_id="a\0b"), "tenant_id"),
        (pb.GetProjectionRequest(), "execution_id"),
        (pb.GetProjectionRequest(execution_id=-5), "execution_id"),
        (pb.WaitForProjectionRequest(execution_id=1), "event_id"),
        (pb.WaitForProjectionRequest(execution_id=1, event_id=1, timeout=Duration(seconds=61)), "timeout"),
        (pb.WaitForProjectionRequest(execution_id=1, event_id=1, timeout=Duration(seconds=-1)), "timeout"),
        (pb.VerifyProjectionsRequest(page_size=-1), "page_size"),
        (pb.VerifyProjectionsRequest(page_token="nonsense"), "page_token"),
        (pb.VerifyProjectionsRequest(execution_ids=[1], page_token="x"), "page_token"),
        (pb.VerifyProjectionsRequest(execution_ids=[1] * 1001), "execution_ids"),
        (pb.VerifyProjectionsRequest(execution_ids=[1], count_executions=True), "count_executions"),
    ],
)
async def test_bad_input_is_named(api: ProjectionApi, request_: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await api(request_)

    assert raised.value.violations[0][0] == field


async def test_an_empty_list_gives_empty_lists(api: ProjectionApi) -> None:
    assert await api(pb.AdvanceProjectionsRequest()) == pb.AdvanceProjectionsResponse()


async def test_an_unknown_projection_is_not_found(api: ProjectionApi) -> None:
    with pytest.raises(NotFound) as raised:
        await api(pb.GetProjectionRequest(execution_id=404))

    assert (raised.value.reason, raised.value.metadata["execution_id"]) == ("PROJECTION_NOT_FOUND", "404")


async def test_a_wait_that_is_over_says_what_is_stored(api: ProjectionApi, conn: asyncpg.Connection) -> None:
    (case, *_) = vectors("replay-union")
    log = case["input"] | {"tenant_id": "default", "organization_id": "default"}
    await copy_log(conn, log)
    await api(pb.AdvanceProjectionsRequest(execution_ids=[log["execution_id"]]))
    last = max(event["event_id"] for event in log["events"])

    included = await api(pb.WaitForProjectionRequest(execution_id=log["execution_id"], event_id=last))
    missing = await api(
        pb.WaitForProjectionRequest(
            execution_id=log["execution_id"], event_id=last + 1, timeout=Duration(nanos=50_000_000)
        )
    )

    assert (included.included, included.version) == (True, last)
    assert (missing.included, missing.version) == (False, last)


def _without_seed(state: state_pb2.ReplayedState) -> state_pb2.ReplayedState:
    copy = state_pb2.ReplayedState()
    copy.CopyFrom(state)
    copy.ClearField("seed")
    return copy


@pytest.mark.timeout(120)
async def test_a_seeded_replay_equals_an_unseeded_one_at_every_cutoff(
    api: ProjectionApi, replay: ReplayApi, conn: asyncpg.Connection
) -> None:
    seeded = 0
    for number, case in enumerate(vectors("replay-union")):
        if number % 4:
            continue
        log = case["input"]
        tenant = {"tenant_id": log["tenant_id"], "organization_id": log["organization_id"]}
        events = sorted(log["events"], key=lambda event: event["event_id"])
        half = len(events) // 2
        for part in (events[: half - 1], events[half - 1 : half]):
            await copy_log(conn, log | {"events": part})
            await api(pb.AdvanceProjectionsRequest(execution_ids=[log["execution_id"]], **tenant))
        await copy_log(conn, log | {"events": events[half:]})
        if number % 8:
            # A row that anybody has touched is read and proven; otherwise the server has it at hand.
            await conn.execute("UPDATE noetl.projection_snapshot SET updated_at = now()")

        for event in events[max(0, half - 2) :: 3]:
            for projection in (state_pb2.REPLAY_PROJECTION_ALL, state_pb2.REPLAY_PROJECTION_STAGE):
                asked = {
                    "as_of_event_id": event["event_id"],
                    "projection": projection,
                    "include_canonical_json": True,
                    **tenant,
                }
                with_seed = await replay.state(log["execution_id"], **asked)
                without = await replay.state(log["execution_id"], use_snapshot=False, **asked)
                assert _without_seed(with_seed) == without
                assert not without.HasField("seed")
                seeded += with_seed.HasField("seed")

    assert seeded > 100


async def test_replays_and_advances_at_once_leave_each_other_s_states_alone(
    api: ProjectionApi, replay: ReplayApi, conn: asyncpg.Connection
) -> None:
    (case, *_) = (case for case in vectors("replay-union") if len(case["input"]["events"]) > 40)
    log = case["input"] | {"tenant_id": "default", "organization_id": "default"}
    events = sorted(log["events"], key=lambda event: event["event_id"])
    execution_id = log["execution_id"]
    await copy_log(conn, log | {"events": events[:20]})
    await api(pb.AdvanceProjectionsRequest(execution_ids=[execution_id]))

    for event in events[20:40]:
        await copy_log(conn, log | {"events": [event]})
        states = [replay.state(execution_id, include_canonical_json=True) for _ in range(3)]
        advance = api(pb.AdvanceProjectionsRequest(execution_ids=[execution_id]))
        first, second, advanced, third = await asyncio.gather(*states[:2], advance, states[2])

        whole = await replay.state(execution_id, include_canonical_json=True, use_snapshot=False)
        assert [_without_seed(state) for state in (first, second, third)] == [whole] * 3
        assert first.HasField("seed")
        assert [(item.events, item.rebuilt) for item in advanced.advanced] == [(whole.event_count, False)]

    verified = await api(pb.VerifyProjectionsRequest(execution_ids=[execution_id]))
    assert [item.outcome for item in verified.results] == [pb.PROJECTION_CHECK_SAME]


async def test_a_time_cutoff_uses_a_seed_only_if_it_leaves_nothing_out(
    api: ProjectionApi, replay: ReplayApi, conn: asyncpg.Connection
) -> None:
    noon = datetime(2026, 5, 20, 12, tzinfo=UTC)
    await conn.executemany(
        "INSERT INTO noetl.event (execution_id, event_id, catalog_id, event_type, event_time)"
        " SELECT 77, $1, catalog_id, 'step.enter', $2 FROM noetl.catalog LIMIT 1",
        [(event_id, noon + timedelta(minutes=-event_id % 5)) for event_id in range(1, 9)],
    )
    await api(pb.AdvanceProjectionsRequest(execution_ids=[77]))

    seeded = set()
    for minute in range(6):
        moment = timestamp(noon + timedelta(minutes=minute))
        with_seed = await replay.state(77, as_of_time=moment)
        without = await replay.state(77, as_of_time=moment, use_snapshot=False)
        assert _without_seed(with_seed) == without
        if with_seed.HasField("seed"):
            seeded.add(minute)

    assert seeded == {4, 5}


async def test_strict_rules_and_limits_never_begin_at_a_snapshot(
    api: ProjectionApi, replay: ReplayApi, conn: asyncpg.Connection
) -> None:
    (case, *_) = vectors("replay-python-4.26")
    log = case["input"] | {"tenant_id": "default", "organization_id": "default"}
    await copy_log(conn, log)
    await api(pb.AdvanceProjectionsRequest(execution_ids=[log["execution_id"]]))

    assert not (await replay.state(log["execution_id"], rules=STRICT)).HasField("seed")
    assert not (await replay.state(log["execution_id"], limit=100_000)).HasField("seed")
    assert (await replay.state(log["execution_id"])).HasField("seed")


async def test_a_projection_is_what_a_replay_answers(
    api: ProjectionApi, replay: ReplayApi, conn: asyncpg.Connection
) -> None:
    for case in list(vectors("replay-union"))[:20]:
        log = case["input"]
        tenant = {"tenant_id": log["tenant_id"], "organization_id": log["organization_id"]}
        await copy_log(conn, log)
        advanced = await api(pb.AdvanceProjectionsRequest(execution_ids=[log["execution_id"]], **tenant))

        stored = await api(pb.GetProjectionRequest(execution_id=log["execution_id"], **tenant))
        folded = await replay.state(log["execution_id"], use_snapshot=False, **tenant)

        assert stored.state == folded
        assert (stored.version, stored.event_count) == (
            advanced.advanced[0].version,
            advanced.advanced[0].events,
        )


async def test_verify_pages_over_everything_and_repairs_just_what_differs(
    api: ProjectionApi, conn: asyncpg.Connection
) -> None:
    ids = []
    for case in list(vectors("replay-union"))[:9]:
        log = case["input"] | {"tenant_id": "default", "organization_id": "default"}
        await copy_log(conn, log)
        ids.append(log["execution_id"])
    ids.sort()
    await api(pb.AdvanceProjectionsRequest(execution_ids=ids[:-1]))
    await conn.execute(
        "UPDATE noetl.projection_snapshot SET snapshot = snapshot || '{\"event_count\": 7}' WHERE aggregate_id = $1",
        f"execution/{ids[3]}/all",
    )

    to_come = []

    async def verify_all(**more: Any) -> dict[int, Any]:
        results: dict[int, Any] = {}
        token = ""
        while True:
            answer = await api(pb.VerifyProjectionsRequest(page_size=4, page_token=token, **more))
            if answer.HasField("executions"):
                to_come.append(answer.executions)
            results |= {item.execution_id: item for item in answer.results}
            token = answer.next_page_token
            if not token:
                return results

    found = await verify_all(count_executions=True)
    mended = await verify_all(repair=True)
    clean = await verify_all()

    assert sorted(found) == ids
    assert to_come == [9, 5, 1]
    odd = {
        item: result.outcome for item, result in found.items() if result.outcome != pb.PROJECTION_CHECK_SAME
    }
    assert odd == {ids[3]: pb.PROJECTION_CHECK_DIFFERENT, ids[-1]: pb.PROJECTION_CHECK_MISSING}
    assert {item for item, result in mended.items() if result.repaired} == set(odd)
    assert {result.outcome for result in clean.values()} == {pb.PROJECTION_CHECK_SAME}


@pytest.mark.timeout(60)
async def test_the_scenario_holds_at_its_small_size() -> None:
    verdict = await read_model.run(size="small", seed=7, progress=silent)

    assert verdict.violations == []
    assert verdict.figures["answered_waits"] > 0
