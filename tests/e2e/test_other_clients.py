"""Clients that are not ours, by the same protos: Node's grpc-js, and buf curl over reflection."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest

from noetl_grpc.server import Server
from tests.conftest import TOKEN

REPOSITORY = Path(__file__).parents[2]


async def _run(*command: str, folder: Path) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdin=asyncio.subprocess.DEVNULL, stdout=PIPE, stderr=PIPE
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode or 0, out.decode(), err.decode()


@pytest.mark.timeout(180)
@pytest.mark.skipif(
    shutil.which("node") is None or shutil.which("npm") is None, reason="node is not installed"
)
async def test_a_node_client_enqueues_claims_and_acknowledges(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    shutil.copytree(Path(__file__).parent / "node", folder)
    code, _, complaint = await _run(
        "npm", "install", "--no-audit", "--no-fund", "--loglevel=error", folder=folder
    )
    assert code == 0, complaint

    code, said, complaint = await _run(
        "node", "client.js", str(REPOSITORY / "protos"), server.address, TOKEN, folder=folder
    )

    assert code == 0, complaint
    found: dict[str, Any] = json.loads(said)
    assert found["info"]["limits"]["batch_items"] == 10_000
    assert found["enqueued"]["enqueued"] == "1"
    (row,) = found["claim"]["rows"]
    assert (row["event_id"], row["execution_id"]) == ("9007199254740993", "9007199254740993")
    assert (json.loads(row["payload_json"]), row["headers"]) == ({"from": "node"}, {"a": "b"})
    assert found["marked"]["marked"] == "1"
    assert found["refused"] == 16
    assert "limit" in found["invalid"]


async def _buf_curl(
    server: Server, method: str, request: object, *more: str, folder: Path
) -> tuple[int, Any, str]:
    code, said, complaint = await _run(
        str(Path(sys.executable).parent / "buf"),
        *("curl", "--protocol", "grpc", "--http2-prior-knowledge", *more),
        *("-d", json.dumps(request), f"http://{server.address}/noetlpb.v1.{method}"),
        folder=folder,
    )
    return code, json.loads(said) if said else None, complaint


@pytest.mark.timeout(60)
async def test_buf_curl_calls_by_reflection(server: Server, tmp_path: Path) -> None:
    token = ("-H", f"authorization: Bearer {TOKEN}")
    message = {"eventId": "9007199254740993", "payloadJson": "{}"}

    enqueued = await _buf_curl(
        server, "OutboxService/EnqueueOutbox", {"messages": [message]}, *token, folder=tmp_path
    )
    claimed = await _buf_curl(server, "OutboxService/ClaimOutboxBatch", {}, *token, folder=tmp_path)
    refused = await _buf_curl(server, "OutboxService/GetOutboxStats", {}, folder=tmp_path)

    assert enqueued[0] == 0
    assert claimed[1]["rows"][0]["eventId"] == "9007199254740993"
    assert refused[0] != 0
    assert "unauthenticated" in refused[2]
