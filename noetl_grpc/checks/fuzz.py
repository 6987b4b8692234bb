"""Random and mutated requests to every RPC: nothing but documented answers, and a server that goes on."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from noetl_grpc.checks.frame import Progress, Size, Verdict
from noetl_grpc.dev.child import server_process
from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.postgres import Postgres
from noetl_grpc.server import SERVICES

SUMMARY = "random and mutated requests get documented answers only, and the server's memory stays flat"

TOKEN = "check"
AUTHORIZATION = (("authorization", f"Bearer {TOKEN}"),)
CALLERS = 16
CALL_SECONDS = 0.5
#: What a server may grow by while it is fuzzed: caches and pools fill, nothing piles up.
GROWTH_BYTES_MAX = 192 * 1024 * 1024

REQUESTS: dict[Size, int] = {"small": 4, "full": 2000}
SECONDS_MAX: dict[Size, float] = {"small": 18.0, "full": 3600.0}

DOCUMENTED = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        # The broker, which this server has none of.
        grpc.StatusCode.UNAVAILABLE,
        # The caller's own.
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)

_INTEGERS = (0, 1, -1, 2, 7, 100, 2**31 - 1, -(2**31), 2**53, 2**63 - 1, -(2**63), 381_000_000_000_000_001)
_TEXTS = (
    "",
    " ",
    "default",
    "a",
    "NULL",
    "\x00",
    "a\x00b",
    "\ud7ff\U0001f600\u202e\u0301",
    "'; DROP TABLE noetl.event; --",
    "%s %n {0} ${jndi:ldap://x}",
    "../../etc/passwd",
    "{}",
    "[]",
    "null",
    "1e999",
    '{"a": 1, "a": 2}',
    '{"status": "ok", "context": {"n": 1e400}}',
    '{"a": "\\u0000"}',
    '"\\ud800"',
    "{" * 300,
    "[" * 5000 + "]" * 5000,
    "9" * 400,
    "execution/1/all",
    "/commands/x~1y~2",
)


@dataclass(frozen=True, slots=True)
class Rpc:
    """One method to throw things at."""

    path: str
    request_type: Any
    takes_stream: bool


async def run(*, size: Size, seed: int, progress: Progress) -> Verdict:
    """The scenario on a database server of its own."""
    async with Postgres(durable=False) as postgres:
        url = await create_database(postgres, "noetl")
        return await run_on(url, size=size, seed=seed, progress=progress)


async def run_on(url: str, *, size: Size, seed: int, progress: Progress) -> Verdict:
    """The same number of requests to every RPC, all RPCs mixed, from a few callers at once."""
    verdict, chance = Verdict("fuzz", seed), random.Random(seed)
    calls = [rpc for rpc in every_rpc() for _ in range(REQUESTS[size])]
    chance.shuffle(calls)
    codes: Counter[str] = Counter()
    env = {"POSTGRES_ACQUIRE_TIMEOUT": "5", "NOETL_GRACE_SECS": "1"}
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(server_process(url, token=TOKEN, env=env))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.line))
        async with asyncio.timeout(SECONDS_MAX[size]):
            todo = iter(enumerate(calls))
            warm_bytes = 0

            async def caller(own: random.Random) -> None:
                nonlocal warm_bytes
                for number, rpc in todo:
                    code = await _throw(channel, rpc, own)
                    codes[code.name] += 1
                    verdict.require(code in DOCUMENTED, f"{rpc.path} answered {code.name}")
                    if number == len(calls) // 4:
                        warm_bytes = _resident_bytes(server.pid)
                    if number % 50 == 0:
                        progress("requests", number, len(calls))

            await asyncio.gather(*(caller(random.Random(seed + number)) for number in range(CALLERS)))
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its stubs lack the asynchronous calls
            health = await stub.Check(
                health_pb2.HealthCheckRequest(service=SERVICES[0].full_name), timeout=30
            )
            verdict.require(
                health.status == health_pb2.HealthCheckResponse.SERVING, "the server is not SERVING any more"
            )
            grown = _resident_bytes(server.pid) - warm_bytes
            verdict.require(
                grown <= GROWTH_BYTES_MAX, f"the server grew by {grown} bytes after the first quarter"
            )
    verdict.figures.update(requests=len(calls), rpcs=len(every_rpc()), grown_bytes=grown, **codes)
    return verdict


def every_rpc() -> list[Rpc]:
    """All methods of all services, from the descriptors."""
    return [
        Rpc(
            f"/{service.full_name}/{method.name}",
            message_factory.GetMessageClass(method.input_type),
            bool(method.client_streaming),
        )
        for service in SERVICES
        for method in service.methods
    ]


async def _throw(channel: grpc.aio.Channel, rpc: Rpc, chance: random.Random) -> grpc.StatusCode:
    """Send something, read what comes, and tell how it ended."""
    if rpc.takes_stream:
        return await _throw_several(
            channel, rpc, [_request(rpc, chance) for _ in range(chance.randint(1, 3))]
        )
    method: Any = channel.unary_stream(rpc.path)
    try:
        async for _ in method(_request(rpc, chance), metadata=AUTHORIZATION, timeout=CALL_SECONDS):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def _throw_several(channel: grpc.aio.Channel, rpc: Rpc, raws: list[bytes]) -> grpc.StatusCode:
    """Written one by one: an iterator that the server does not read to its end fails on the client's own side."""
    method: Any = channel.stream_stream(rpc.path)
    call = method(metadata=AUTHORIZATION, timeout=CALL_SECONDS)
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for raw in raws:
            await call.write(raw)
        await call.done_writing()
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    code: grpc.StatusCode = await call.code()
    is_own = code is grpc.StatusCode.INTERNAL and await call.details() == "Internal error from Core"
    return grpc.StatusCode.CANCELLED if is_own else code


def _request(rpc: Rpc, chance: random.Random) -> bytes:
    """Mostly a message with odd values; else one that is cut, flipped, doubled (both of a oneof), or noise."""
    raw: bytes = _message(rpc.request_type, chance).SerializeToString()
    match chance.randrange(10):
        case 0:
            return chance.randbytes(chance.randrange(200))
        case 1:
            return raw[: chance.randrange(len(raw) + 1)]
        case 2 if raw:
            flipped = bytearray(raw)
            flipped[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
            return bytes(flipped)
        case 3:
            return raw + bytes(_message(rpc.request_type, chance).SerializeToString())
    return raw


def _message(message_type: Any, chance: random.Random, depth: int = 4) -> Any:
    message = message_type()
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.4:
            continue
        if field.is_repeated:
            _fill_repeated(message, field, chance, depth)
        elif field.message_type is not None:
            if depth:
                getattr(message, field.name).CopyFrom(
                    _message(message_factory.GetMessageClass(field.message_type), chance, depth - 1)
                )
        else:
            setattr(message, field.name, _value(field, chance))
    return message


def _fill_repeated(message: Any, field: Any, chance: random.Random, depth: int) -> None:
    values = getattr(message, field.name)
    for _ in range(chance.choice((0, 1, 2, 5))):
        if field.message_type is None:
            values.append(_value(field, chance))
        elif field.message_type.GetOptions().map_entry:
            values[chance.choice(_TEXTS)] = chance.choice(_TEXTS)
        elif depth:
            values.append(_message(message_factory.GetMessageClass(field.message_type), chance, depth - 1))


def _value(field: Any, chance: random.Random) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            if field.type == FieldDescriptor.TYPE_BYTES:
                return chance.randbytes(chance.randrange(64))
            return "x" * 200_000 if chance.random() < 0.01 else chance.choice(_TEXTS)
        case FieldDescriptor.CPPTYPE_INT64:
            return chance.choice(_INTEGERS)
        case FieldDescriptor.CPPTYPE_INT32:
            return chance.choice([number for number in _INTEGERS if -(2**31) <= number < 2**31])
        case FieldDescriptor.CPPTYPE_UINT32 | FieldDescriptor.CPPTYPE_UINT64:
            return chance.randrange(2**32)
        case FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return chance.choice([*(value.number for value in field.enum_type.values), 99, -1])
        case _:
            return chance.choice((0.0, -1.0, 1.5, 1e308, float("inf"), float("nan")))


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096
