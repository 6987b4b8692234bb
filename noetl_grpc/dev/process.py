"""How a server process is owned: one folder, one lock, one log, and an end that comes with ours.

Beside each server stands a keeper (`keeper.py`), in a session of its own so that Ctrl-C reaches only us. It
holds the other end of a pipe; whatever way we go, the pipe closes and the server is stopped. Nothing here is
bound to an event loop: a server may be started in one and stopped in another.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
POLL_SECONDS = 0.004
OWNER_LEAVES_SECONDS = 0.3
PORT_TRIES = 10
MEMORY_BYTES_MIN = 2 * 1024**3
KEEPER = Path(__file__).with_name("keeper.py")


class LaunchError(Exception):
    """A server could not be started or stopped; the text says which and why."""


class AlreadyRunning(LaunchError):
    """Somebody else runs a server on this folder."""


class PortTaken(LaunchError):
    """Another process listens on the port."""


@dataclass(frozen=True, slots=True)
class Account:
    """Whom a server runs as."""

    uid: int
    gid: int


def free_port() -> int:
    """A port that nobody listens on.

    It lies below the range from which the kernel serves outgoing connections: a server that is stopped for a
    while must find its port again, and a client that keeps trying it must not end up connected to itself.
    """
    for _ in range(200):
        port = random.randint(15_000, 32_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        return port
    raise LaunchError(f"found no free port on {HOST}")


def memory_folder() -> Path | None:
    """Where files live in memory, if this system has such a place and there is room in it."""
    folder = Path("/dev/shm")
    try:
        room = os.statvfs(folder)
    except FileNotFoundError:
        return None
    is_usable = os.access(folder, os.W_OK | os.X_OK) and room.f_bavail * room.f_frsize >= MEMORY_BYTES_MIN
    return folder if is_usable else None


async def on_free_port(launch: Callable[[int], Awaitable[None]]) -> int:
    """Launch on a free port, and on another one when somebody else was faster."""
    for _ in range(PORT_TRIES):
        port = free_port()
        try:
            await launch(port)
        except PortTaken:
            continue
        return port
    raise LaunchError(f"lost {PORT_TRIES} ports on {HOST} to others, one after the other")


class FolderLock:
    """Two locks on one folder: `owner` is ours alone, `server` is also held by the keeper and the server.

    Who finds the first one taken has met another owner. Who finds only the second one taken follows an owner
    that was killed, whose keeper is still stopping the server; that ends soon.
    """

    def __init__(self, owner: int, server: int) -> None:
        self._owner = owner
        #: To be inherited: the folder is free when the last process that has it is gone.
        self.server = server

    @classmethod
    async def take(cls, folder: Path, *, what: str, patience_seconds: float = 40.0) -> FolderLock:
        owner = os.open(folder / "owner.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # Not at once: an owner that was killed a moment ago may still be going.
            await _wait(lambda: _flock(owner), OWNER_LEAVES_SECONDS, "")
        except LaunchError:
            holder = os.pread(owner, 200, 0).decode(errors="replace").strip()
            os.close(owner)
            raise AlreadyRunning(f"{what} in {folder} is already run by process {holder}") from None
        os.ftruncate(owner, 0)
        os.pwrite(owner, str(os.getpid()).encode(), 0)
        server = os.open(folder / "server.lock", os.O_RDWR | os.O_CREAT, 0o644)
        lock = cls(owner, server)
        try:
            still_runs = f"{what} in {folder} still runs, though its owner is gone, and did not end"
            await _wait(lambda: _flock(server), patience_seconds, still_runs, failure=AlreadyRunning)
        except BaseException:
            lock.release()
            raise
        return lock

    def release(self) -> None:
        os.close(self.server)
        os.close(self._owner)


def _flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _wait(
    is_so: Callable[[], bool],
    timeout_seconds: float,
    complaint: str,
    failure: type[LaunchError] = LaunchError,
) -> None:
    give_up = time.monotonic() + timeout_seconds
    while not is_so():
        if time.monotonic() > give_up:
            raise failure(f"{complaint} within {timeout_seconds:g} s")
        await asyncio.sleep(POLL_SECONDS)


class Keeper:
    """Our side of the keeper: starts one process at a time, sends it signals, knows when it has ended."""

    def __init__(
        self, *, stop_signal: int, grace_seconds: float, temporary: Sequence[Path], pass_fds: Sequence[int]
    ) -> None:
        arguments = [str(int(stop_signal)), str(grace_seconds), *map(str, temporary)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", KEEPER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd="/",
            # What the servers inherit: nothing of our PG… variables, messages in English.
            env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
            pass_fds=pass_fds,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands = self._process.stdin
        self._answers = self._process.stdout
        os.set_blocking(self._answers.fileno(), False)
        self._unread = b""
        #: From the order to run until the end is known.
        self.is_running = False
        #: Of the process that runs, 0 when none does.
        self.pid = 0
        #: Of the process that ran last.
        self.exit_status: int | None = None

    def run(self, argv: Sequence[str | Path], *, log: Path, account: Account | None) -> None:
        ids = (str(account.uid), str(account.gid)) if account else ("", "")
        self.exit_status = None
        self.is_running = True
        self._command("run", str(log), *ids, *map(str, argv))

    def signal(self, number: int) -> None:
        self._command("signal", str(int(number)))

    def crash(self) -> None:
        self._command("crash")

    def _command(self, *fields: str) -> None:
        message = "\0".join((*fields, "\n", "")).encode("utf-8", "surrogateescape")
        try:
            self._commands.write(message)
        except BrokenPipeError as error:
            raise LaunchError("the keeper of the server is gone") from error

    @property
    def has_ended(self) -> bool:
        self._listen()
        return not self.is_running

    def _listen(self) -> None:
        chunk = self._answers.read(4096)
        if chunk is None:
            return
        if chunk == b"":
            self._orphaned()
            return
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in lines:
            word, number = line.split()
            if word == b"started":
                self.pid = int(number)
            else:
                self._ended(int(number))

    def _orphaned(self) -> None:
        """Somebody killed the keeper: then nobody else would end the server."""
        if self.pid:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if self.is_running:
            self._ended(-signal.SIGKILL)

    def _ended(self, exit_status: int) -> None:
        self.pid, self.exit_status, self.is_running = 0, exit_status, False

    def close(self) -> None:
        """Let the keeper stop what runs and clean up; `is_gone` says when it has."""
        self._commands.close()

    @property
    def is_gone(self) -> bool:
        if self._process.poll() is None:
            return False
        self._answers.close()
        return True


class OwnedServer:
    """A server in a folder: ours alone, logged beside its data, and gone when we are."""

    def __init__(
        self, what: str, folder: Path | None, *, stop_signal: int, grace_seconds: float = 30.0
    ) -> None:
        self.what = what
        self.is_temporary = folder is None
        self._folder = folder.absolute() if folder else None
        self._stop_signal = stop_signal
        self._grace_seconds = grace_seconds
        self._lock: FolderLock | None = None
        self._keeper: Keeper | None = None
        self._log_start = 0

    @property
    def folder(self) -> Path:
        if self._folder is None:
            raise LaunchError(f"{self.what} has not been started yet")
        return self._folder

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    @property
    def pid(self) -> int:
        if self._keeper is None or self._keeper.has_ended:
            return 0
        return self._keeper.pid

    @property
    def is_open(self) -> bool:
        return self._keeper is not None

    async def open(self, *, temporary_parent: Path | None = None) -> None:
        """Make and lock the folder. With a folder of our own, remove it at the end."""
        if self._keeper is not None and self._keeper.is_gone:
            self._keeper.close()
            self._release()
        if self._keeper is not None:
            return
        try:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="noetl-grpc-", dir=temporary_parent))
            else:
                self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = await FolderLock.take(self._folder, what=self.what)
            if self.log.exists():
                self.log.replace(self.folder / "server.log.old")
            self._keeper = Keeper(
                stop_signal=self._stop_signal,
                grace_seconds=self._grace_seconds,
                temporary=[self._folder] if self.is_temporary else [],
                pass_fds=[self._lock.server],
            )
        except OSError as error:
            self._release()
            raise LaunchError(f"{self.what} can't use the folder {self._folder}: {error}") from error

    async def run(
        self, argv: Sequence[str | Path], *, account: Account | None, timeout_seconds: float
    ) -> None:
        """Run a program that prepares the folder, to its end."""
        keeper = self._begin(argv, account)
        try:
            await _wait(lambda: keeper.has_ended, timeout_seconds, f"{argv[0]} did not end")
        except BaseException:
            self.kill()
            raise
        if keeper.exit_status != 0:
            raise LaunchError(f"{argv[0]} failed with status {keeper.exit_status}:\n{self.log_tail()}")

    async def launch(
        self,
        argv: Sequence[str | Path],
        *,
        is_ready: Callable[[int], bool],
        account: Account | None,
        timeout_seconds: float,
    ) -> None:
        """Start the server and wait until `is_ready(pid)`; on a failure nothing is left running."""
        keeper = self._begin(argv, account)
        try:
            await _wait(
                lambda: keeper.has_ended or (keeper.pid != 0 and is_ready(keeper.pid)),
                timeout_seconds,
                f"{self.what} did not become ready",
            )
        except BaseException:
            self.kill()
            raise
        if keeper.exit_status is None:
            return
        tail = self.log_tail()
        if "address already in use" in tail.lower():
            raise PortTaken(f"{self.what} can't listen: the port on {HOST} is taken\n{tail}")
        raise LaunchError(f"{self.what} ended with status {keeper.exit_status} while it started:\n{tail}")

    def _begin(self, argv: Sequence[str | Path], account: Account | None) -> Keeper:
        keeper = self._keeper
        assert keeper is not None
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        keeper.run(argv, log=self.log, account=account)
        return keeper

    async def stop(self, signals: Sequence[int], *, timeout_seconds: float) -> None:
        """Send the signals in turn, each after the one before had its time, until the server has ended."""
        keeper = self._keeper
        if keeper is None or keeper.has_ended:
            return
        for number in signals:
            keeper.signal(number)
            try:
                await _wait(lambda: keeper.has_ended, timeout_seconds, f"{self.what} did not stop")
                return
            except LaunchError:
                continue
        self.kill()

    def kill(self) -> None:
        """SIGKILL, and wait until the process and its children are reaped."""
        keeper = self._keeper
        if keeper is None or keeper.has_ended:
            return
        keeper.crash()
        give_up = time.monotonic() + 10.0
        while not keeper.has_ended:
            if time.monotonic() > give_up:
                raise LaunchError(f"{self.what} survives SIGKILL")
            time.sleep(POLL_SECONDS)

    async def close(self) -> None:
        """Give the folder back, and remove it if it was ours; the server has been stopped before."""
        keeper = self._keeper
        if keeper is None:
            return
        keeper.close()
        complaint = f"the keeper of {self.what} did not end"
        await _wait(lambda: keeper.is_gone, self._grace_seconds + 10.0, complaint)
        self._release()
        if self.is_temporary and self._folder:
            # The keeper has done it, unless somebody killed it.
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._keeper = self._lock = None

    def log_tail(self, lines: int = 15) -> str:
        """The last lines that the server has logged since it was started."""
        try:
            with self.log.open("rb") as log:
                log.seek(self._log_start)
                return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""
