"""The process that stands between us and one server, so that the server ends whenever we do.

It is run as a script, never imported, and uses little of the standard library so that it starts fast. It
reads commands from a pipe; when the pipe closes, because we closed it or were killed, it stops the server,
reaps it, removes what was temporary and ends. The signals that end other processes don't end it: only the
pipe does.

Arguments: the signal that stops the server, the seconds it then has, the paths to remove at the end.
A command is a list of fields, each followed by a NUL (neither arguments nor paths can hold one), closed by
the field "\\n":  run LOG UID GID ARGV…  (UID and GID empty: our own) | signal NUMBER | crash.
Answers are lines: "started PID", "ended STATUS".
"""

import os
import select
import signal
import sys
import time

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Server:
    """The child, and a pipe that it and all its descendants hold open: at its end none of them is left."""

    def __init__(self, log: str, uid: str, gid: str, argv: list[str]) -> None:
        self.alive, held = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(held, log, uid, gid, argv)
        os.close(held)

    @staticmethod
    def _become(held: int, log: str, uid: str, gid: str, argv: list[str]) -> None:
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
            os.dup2(1, 2)
            os.set_inheritable(held, True)
            for number in (*IGNORED, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            if uid:
                os.setgroups([])
                os.setgid(int(gid))
                os.setuid(int(uid))
            os.execv(argv[0], argv)
        except OSError as error:
            os.write(2, f"can't run {argv[0]}: {error}\n".encode())
        finally:
            os._exit(127)

    def signal(self, number: int) -> None:
        # Nobody has reaped the child yet, so the pid is still its own.
        os.kill(self.pid, number)

    def crash(self) -> None:
        """SIGKILL for the child and its own children: a busy one would outlive its parent for a while."""
        try:
            with open(f"/proc/{self.pid}/task/{self.pid}/children") as listing:
                children = [int(pid) for pid in listing.read().split()]
        except OSError:
            children = []
        self.signal(signal.SIGKILL)
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def reap(self) -> int:
        os.close(self.alive)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def readable(fds: list[int], seconds: float | None) -> list[int]:
    return select.select(fds, [], [], seconds)[0]


def serve() -> Server | None:
    """Carry out commands until the pipe closes; what still runs then is returned."""
    server: Server | None = None
    unread = b""
    while True:
        ready = readable([0] if server is None else [0, server.alive], None)
        if server is not None and server.alive in ready:
            answer(f"ended {server.reap()}")
            server = None
        if 0 not in ready:
            continue
        chunk = os.read(0, 65536)
        if not chunk:
            return server
        *commands, unread = (unread + chunk).split(b"\0\n\0")
        for command in commands:
            verb, *fields = command.decode("utf-8", "surrogateescape").split("\0")
            if verb == "run":
                server = Server(fields[0], fields[1], fields[2], fields[3:])
                answer(f"started {server.pid}")
            elif server is None:
                continue
            elif verb == "crash":
                server.crash()
            else:
                server.signal(int(fields[0]))


def answer(text: str) -> None:
    try:
        os.write(1, text.encode() + b"\n")
    except BrokenPipeError:
        pass  # Whoever asked is gone; the other pipe is about to say so.


def end(server: Server, stop_signal: int, grace_seconds: float) -> None:
    server.signal(stop_signal)
    if not readable([server.alive], grace_seconds):
        server.crash()
        readable([server.alive], 5.0)
    server.reap()


def remove(paths: list[str]) -> None:
    import shutil

    for path in paths:
        # An orphan may still be writing into the folder; it won't for long.
        for _ in range(50):
            shutil.rmtree(path, ignore_errors=True)
            if not os.path.lexists(path):
                break
            time.sleep(0.02)


def main() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    stop_signal, grace_seconds, *temporary = sys.argv[1:]
    left = serve()
    if left is not None:
        end(left, int(stop_signal), float(grace_seconds))
    if temporary:
        remove(temporary)


if __name__ == "__main__":
    main()
