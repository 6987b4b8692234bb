"""The command line in a process of its own, as a user runs it.

A command that is run to its end is forked from a process that has everything imported already: most of what a command
costs is importing. One that is started and left running begins from nothing.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pkgutil
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd as _Fd
from pathlib import Path
from typing import Any
from unittest import mock

import noetl_grpc.cli


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command said, and how it ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output as one JSON document."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """Standard output as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


@dataclass(frozen=True, slots=True)
class Cli:
    """Runs `noetl-grpc` with an environment of its own."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    async def __call__(self, *arguments: object, code: int | None = 0, **env: str) -> Answer:
        """Run it to its end; the exit code is checked unless it is None."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = _prepared().Process(
                target=_run,
                args=(
                    [*map(str, arguments)],
                    self._env(env),
                    self.folder,
                    _Fd(out.fileno()),
                    _Fd(err.fileno()),
                ),
            )
            process.start()
            await asyncio.to_thread(process.join, 30)
            if process.exitcode is None:
                process.kill()
                raise TimeoutError(f"{arguments} did not end")
            said = [file.read().decode() for file in (out, err) if file.seek(0) == 0]
        answer = Answer(process.exitcode, *said)
        assert "Traceback" not in answer.err, answer.err
        assert code is None or answer.code == code, f"{arguments}: {answer}"
        return answer

    async def start(
        self,
        *arguments: object,
        stdin: int = DEVNULL,
        stdout: int = PIPE,
        stderr: int = PIPE,
        **env: str,
    ) -> asyncio.subprocess.Process:
        """Start it and leave it running."""
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "noetl_grpc", *map(str, arguments)),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=self.folder,
            env=self._env(env),
        )

    def _env(self, given: Mapping[str, str]) -> dict[str, str]:
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("NOETL_", "POSTGRES_", "OTEL_"))
        }
        return {**inherited, "COLUMNS": "160", **self.env, **given}


@cache
def _prepared() -> Any:
    """Forks processes in which every command is imported, and nothing has begun yet."""
    context = multiprocessing.get_context("forkserver")
    modules = pkgutil.iter_modules(noetl_grpc.cli.__path__, "noetl_grpc.cli.")
    context.set_forkserver_preload([*(module.name for module in modules), "tests.cli"])
    # gRPC reads it when it is loaded; otherwise `main` sets it before that.
    with mock.patch.dict(os.environ, GRPC_VERBOSITY="NONE"):
        forkserver.ensure_running()
    return context


def _run(arguments: list[str], env: dict[str, str], folder: Path, out: Any, err: Any) -> None:
    """What `python -m noetl_grpc` does, in such a process."""
    os.dup2(out.detach(), 1)
    os.dup2(err.detach(), 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["noetl-grpc", *arguments]
    noetl_grpc.cli.main()
