"""Payloads behind a state: found, checked against what was recorded, and never beyond the bounds."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import grpc
import pytest

from noetl_grpc.core.canonical import checksum
from noetl_grpc.server import Server
from noetl_grpc.services import payloads
from noetl_grpc.services.payloads import FileResolver, PayloadError, resolve_payloads
from noetl_grpc.settings import Settings
from tests.conftest import settings_for
from tests.events import add_catalog_entry, write_events
from tests.logs import event, fold_events
from tests.replay_api import ReplayApi

ROWS = b'[{"a": 1}, {"a": 2}]'


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def store(root: Path, content: bytes, name: str = "") -> str:
    path = root / (name or digest(content))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return digest(content)


async def test_a_replay_tells_which_payloads_are_what_they_should_be(
    tmp_path: Path,
    database_url: str,
    conn: asyncpg.Connection,
    start_server: Callable[[Settings], Awaitable[Server]],
    channel_to: Callable[[str], Awaitable[grpc.aio.Channel]],
) -> None:
    await add_catalog_entry(conn)
    good = store(tmp_path, ROWS)
    uri = f"noetl://tenant/default/org/default/payloads/sha256/{good}"
    await write_events(
        conn,
        4,
        [
            event(1, "frame.committed", frame_id=9, payload_ref={"uri": uri, "sha256": good}),
            event(2, "note", payload_ref={"uri": "s3://bucket/key", "sha256": good}),
        ],
    )
    server = await start_server(settings_for(database_url, payload_root=tmp_path))
    api = ReplayApi(await channel_to(server.address))

    state = await api.state(4, resolve_payloads=True)
    plain = await api.state(4)

    report = json.loads(state.payload_resolution_json)
    assert [row["scope"] for row in report["payload_resolution"]] == ["execution", "execution", "frame"]
    first, foreign, frame = (row["resolution"] for row in report["payload_resolution"])
    assert first == frame
    assert first == {
        "ref": uri,
        "resolved": True,
        "checksum": checksum(json.loads(ROWS)),
        "size_bytes": len(b'[{"a":1},{"a":2}]'),
        "row_count": 2,
        "value_type": "list",
        "error": None,
    }
    assert (foreign["resolved"], foreign["error"]) == (False, "no resolver for this locator")
    summary = report["payload_resolution_summary"]
    assert (summary["total"], summary["resolved"], summary["unique_refs"]) == (3, 2, 2)
    assert not plain.HasField("payload_resolution_json")
    assert plain.checksum == state.checksum


async def resolution_of(reference: Any, *resolvers: Any) -> dict[str, Any]:
    state = fold_events(event(1, payload_ref=reference)).state
    report = json.loads(await resolve_payloads(state, resolvers))
    (row,) = report["payload_resolution"]
    resolution: dict[str, Any] = row["resolution"]
    return resolution


@pytest.mark.parametrize("place", ["{0}", "{1}/{0}", "sha256/{0}"])
@pytest.mark.parametrize("locator", ["{0}", "sha256:{0}", "noetl://x/y/sha256/{0}"])
async def test_files_are_found_by_their_digest(tmp_path: Path, place: str, locator: str) -> None:
    content = b"\x00binary"
    name = digest(content)
    store(tmp_path, content, place.format(name, name[:2]))

    found = await resolution_of({"ref": locator.format(name), "sha256": name.upper()}, FileResolver(tmp_path))
    bare = await resolution_of(locator.format(name), FileResolver(tmp_path))

    assert (found["resolved"], found["value_type"]) == (True, "bytes")
    assert found["checksum"] == checksum(content.hex())
    assert bare["resolved"]


async def test_what_is_not_what_was_recorded_is_not_resolved(tmp_path: Path) -> None:
    wrong = digest(b"what was recorded")
    store(tmp_path, ROWS, wrong)
    other = store(tmp_path, b"other")

    tampered = await resolution_of({"ref": wrong, "sha256": wrong}, FileResolver(tmp_path))
    mismatch = await resolution_of({"ref": other, "sha256": wrong}, FileResolver(tmp_path))
    unknown = await resolution_of({"ref": other, "sha256": None}, FileResolver(tmp_path))
    missing = await resolution_of({"ref": digest(b"none"), "sha256": digest(b"none")}, FileResolver(tmp_path))
    no_locator = await resolution_of({"sha256": other}, FileResolver(tmp_path))

    assert [each["resolved"] for each in (tampered, mismatch, unknown, missing, no_locator)] == [False] * 5
    assert tampered["error"] == f"payload has sha256 {digest(ROWS)}, recorded is {wrong}"
    assert unknown["error"] == "no sha256 is recorded, so the payload can't be checked"
    assert missing["error"] == "payload not found"
    assert no_locator["error"] == "payload reference has no resolvable locator"


async def test_nothing_outside_the_folder_is_read(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    name = store(outside, ROWS)
    (inside / name).symlink_to(outside / name)

    linked = await resolution_of({"ref": name, "sha256": name}, FileResolver(inside))
    climbing = await resolution_of({"ref": f"../outside/{name}", "sha256": name}, FileResolver(inside))

    assert (linked["resolved"], linked["error"]) == (False, "payload not found")
    assert (climbing["resolved"], climbing["error"]) == (False, "no resolver for this locator")


class Remote:
    """A resolver of a deployment."""

    def __init__(self, content: bytes | Exception = ROWS) -> None:
        self.content = content
        self.running = self.most = self.fetched = 0
        self.gate = asyncio.Event()
        self.gate.set()

    def accepts(self, locator: str) -> bool:
        return locator.startswith("remote://")

    async def fetch(self, locator: str, reference: Any, *, bytes_max: int) -> bytes:
        self.running += 1
        self.fetched += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            await self.gate.wait()
        finally:
            self.running -= 1
        if isinstance(self.content, Exception):
            raise self.content
        return self.content


async def test_each_payload_is_fetched_once_and_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "PAYLOADS_MAX", 10)
    remote = Remote()
    references = [{"ref": f"remote://{number % 12}", "sha256": digest(ROWS)} for number in range(24)]
    state = fold_events(*(event(i + 1, payload_ref=each) for i, each in enumerate(references))).state

    report = json.loads(await resolve_payloads(state, [remote]))

    assert remote.fetched == 10
    assert remote.most <= payloads.CONCURRENCY
    summary = report["payload_resolution_summary"]
    assert (summary["total"], summary["resolved"], summary["unique_refs"]) == (24, 20, 12)
    assert report["payload_resolution"][-1]["resolution"]["error"].startswith("not looked up: more than 10")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (PayloadError("the store says no"), "the store says no"),
        (RuntimeError("secret host name"), "the payload resolver failed"),
        (b"x" * 101, "payload is larger than 100 bytes"),
    ],
)
async def test_a_resolver_that_fails_costs_only_its_own_row(
    content: Any, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "PAYLOAD_BYTES_MAX", 100)

    resolution = await resolution_of({"ref": "remote://1", "sha256": digest(ROWS)}, Remote(content))

    assert (resolution["resolved"], resolution["error"]) == (False, error)


async def test_a_payload_that_does_not_come_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "PAYLOAD_SECONDS_MAX", 0.01)
    monkeypatch.setattr(payloads, "SECONDS_MAX", 0.02)
    remote = Remote()
    remote.gate.clear()
    references = [{"ref": f"remote://{number}", "sha256": digest(ROWS)} for number in range(20)]
    state = fold_events(*(event(i + 1, payload_ref=each) for i, each in enumerate(references))).state

    report = json.loads(await resolve_payloads(state, [remote]))

    errors = [row["resolution"]["error"] for row in report["payload_resolution"]]
    assert errors[0] == "payload did not come within 0.01 s"
    assert errors[-1].startswith("not looked up: the others took")
    assert report["payload_resolution_summary"]["resolved"] == 0
