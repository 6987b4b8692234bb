"""The command line in a process of its own, as a user runs it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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
        process = await self.start(*arguments, **env)
        try:
            async with asyncio.timeout(30):
                out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        answer = Answer(process.returncode or 0, out.decode(), err.decode())
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
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("NOETL_", "POSTGRES_", "OTEL_"))
        }
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "noetl_grpc", *map(str, arguments)),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=self.folder,
            env={**inherited, "COLUMNS": "160", **self.env, **env},
        )
