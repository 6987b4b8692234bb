"""The control of `bench rpc`: grpc.aio with nothing around it. Run as a module; prints its port."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from noetlpb.v1 import operations_pb2 as pb
from noetlpb.v1 import operations_pb2_grpc as rpc


class _Hello(rpc.OperationsServiceServicer):
    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(version="0")


async def _main() -> None:
    server = grpc.aio.server()
    rpc.add_OperationsServiceServicer_to_server(_Hello(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)  # noqa: T201  # the parent reads it
    await server.wait_for_termination()


if __name__ == "__main__":
    try:
        import uvloop

        uvloop.run(_main())
    except ImportError:
        asyncio.run(_main())
