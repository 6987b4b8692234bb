"""A server whose ids are made by a wrong clock. `python -m noetl_grpc.checks._server URL TOKEN SECONDS_OFF`"""

from __future__ import annotations

import asyncio
import sys
import time

from noetl_grpc import server
from noetl_grpc.settings import Settings


async def main(url: str, token: str, seconds_off: float) -> None:
    """Serve until SIGTERM; the address is printed when it is ready."""
    settings = Settings(
        grpc_host="127.0.0.1",
        grpc_port=0,
        metrics_address=None,
        api_token=token,
        database_url=url,
        drain_seconds=0.0,
    )

    def ready(running: server.Server) -> None:
        sys.stdout.write(running.address + "\n")
        sys.stdout.flush()

    await server.run(settings, ready=ready, clock=lambda: time.time() + seconds_off)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
