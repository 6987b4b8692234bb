"""Payloads go everywhere, and none into a log line or an error. The check itself runs around every test."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import asyncpg
import grpc
import pytest

from noetl_grpc import status
from noetl_grpc.errors import NotFound
from noetl_grpc.server import Server
from tests import leaks
from tests.conftest import TOKEN
from tests.factories import CATALOG_ID, EVENT_ID, EXECUTION_ID, add_catalog_entry
from tests.rpcs import call, every_rpc

DOCUMENTS = (
    f'{{"status": "ok", "context": {{"secret": "{leaks.PAYLOAD}"}}}}',
    f'{{"secret": "{leaks.PAYLOAD}"',
    f'["{leaks.PAYLOAD}"]',
    f'"\\u0000{leaks.PAYLOAD}"',
)


def _fill(message: Any, document: str, depth: int = 3) -> None:
    """Valid ids, and the document wherever one may stand."""
    ids = {"execution_id": EXECUTION_ID, "event_id": EVENT_ID, "catalog_id": CATALOG_ID, "event_type": "x"}
    for field in message.DESCRIPTOR.fields:
        if field.name in ids:
            setattr(message, field.name, ids[field.name])
        elif field.name.endswith("_json") and field.type == field.TYPE_STRING:
            setattr(message, field.name, document)
        elif field.message_type is not None and field.name in ("events", "messages", "failures") and depth:
            _fill(getattr(message, field.name).add(), document, depth - 1)


@pytest.mark.parametrize("document", DOCUMENTS)
async def test_payloads_reach_every_rpc_and_no_log_or_error(
    channel: grpc.aio.Channel, conn: asyncpg.Connection, document: str
) -> None:
    await add_catalog_entry(conn)

    async def send(rpc: Any) -> None:
        request = rpc.request_type()
        _fill(request, document)
        await call(channel, rpc, request, token=TOKEN, seconds=1.0)
        await call(channel, rpc, request, token="wrong", seconds=1.0)

    async with asyncio.timeout(15):
        await asyncio.gather(*map(send, every_rpc()))


def test_a_leak_would_be_seen(no_leaks: list[str]) -> None:
    with leaks.watched() as found:
        logging.getLogger("noetl_grpc.x").debug("innocent", extra={"field": f"… {leaks.PASSWORD} …"})
        logging.getLogger("asyncio").warning(leaks.TOKEN)
        status.to_status(NotFound(leaks.PAYLOAD))

    assert [leak.partition(":")[0] for leak in found] == ["logged", "logged", "answered"]
    assert len(no_leaks) == 3
    no_leaks.clear()


async def test_a_server_does_not_show_its_secrets(server: Server, settings: Any) -> None:
    shown = repr(settings)

    assert not any(mark in shown for mark in leaks.MARKS)
