"""Upcasters and payload resolvers that a deployment installs beside us."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import asyncpg
import grpc
import pytest

from noetl_grpc.errors import EventMalformed, SettingsError
from noetl_grpc.extensions import load_registry, load_resolvers
from noetl_grpc.server import Server
from noetl_grpc.settings import Settings
from tests.events import add_catalog_entry, write_events
from tests.logs import EMPTY_REGISTRY, event
from tests.replay_api import ReplayApi

CODE = """
def finished(event):
    if event["meta"] == "refuse":
        raise ValueError("no such event")
    return {**event, "schema_version": 2, "event_type": "execution.completed", "meta": {"stage_id": event["node_name"]}}

def upcasters():
    return [("legacy.finished", 1, finished)]

def twice():
    return upcasters() + upcasters()

class Resolver:
    def accepts(self, locator):
        return True

def broken():
    raise RuntimeError("not today")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Puts a distribution with these entry points where the interpreter finds it."""
    (tmp_path / "deployment_extras.py").write_text(CODE)
    info = tmp_path / "deployment_extras-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deployment-extras\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)

    def write(entry_points: str) -> None:
        (info / "entry_points.txt").write_text(entry_points)

    yield write
    sys.modules.pop("deployment_extras", None)


async def test_an_installed_upcaster_lifts_old_events_before_they_are_folded(
    install: Callable[[str], None],
    settings: Settings,
    conn: asyncpg.Connection,
    start_server: Callable[[Settings], Awaitable[Server]],
    channel_to: Callable[[str], Awaitable[grpc.aio.Channel]],
) -> None:
    install("[noetl_grpc.upcasters]\nlegacy = deployment_extras:upcasters\n")
    await add_catalog_entry(conn)
    await write_events(
        conn,
        4,
        [
            event(1, "execution.started"),
            event(2, "finished", node_name="s", schema_name="legacy.finished"),
        ],
    )
    await write_events(
        conn, 5, [event(7, "finished", schema_name="legacy.finished", schema_version=1, meta="refuse")]
    )
    server = await start_server(settings)
    api = ReplayApi(await channel_to(server.address))

    state = await api.state(4)
    causes = await api.explain(4, "/execution/status")

    assert state.execution.status == "COMPLETED"
    assert state.last_event_type == "execution.completed"
    assert list(state.stages) == ["s"]
    assert state.upcaster_registry_digest == load_registry().digest != EMPTY_REGISTRY
    assert [cause.event_type for cause in causes] == ["execution.completed", "execution.started"]
    with pytest.raises(EventMalformed, match="no such event") as refused:
        await api.state(5)
    assert refused.value.metadata["event_id"] == "7"


def test_nothing_installed_is_an_empty_registry() -> None:
    assert load_registry().digest == EMPTY_REGISTRY
    assert load_resolvers() == []


def test_an_installed_resolver_is_made(install: Callable[[str], None]) -> None:
    install("[noetl_grpc.payload_resolvers]\nmine = deployment_extras:Resolver\n")

    (resolver,) = load_resolvers()

    assert resolver.accepts("anything")


@pytest.mark.parametrize(
    ("entry_points", "message"),
    [
        (
            "[noetl_grpc.upcasters]\nx = deployment_extras:twice\n",
            "already registered for legacy.finished v1",
        ),
        ("[noetl_grpc.upcasters]\nx = deployment_extras:broken\n", "x of noetl_grpc.upcasters.*not today"),
        ("[noetl_grpc.upcasters]\nx = deployment_extras:Resolver\n", "gives no list of upcasters"),
        ("[noetl_grpc.upcasters]\nx = deployment_extras:absent\n", "can't be loaded"),
    ],
)
def test_what_cannot_be_used_stops_the_process(
    install: Callable[[str], None], entry_points: str, message: str
) -> None:
    install(entry_points)

    with pytest.raises(SettingsError, match=message):
        load_registry()
