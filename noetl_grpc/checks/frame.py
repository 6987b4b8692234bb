"""What every fault scenario shares: its verdict and its progress.

A scenario is a module here with a `SUMMARY` and `async def run(*, size, seed, progress) -> Verdict`. The tests run
it small, `noetl-grpc check NAME` runs it at full size.
"""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import noetl_grpc.checks

Size = Literal["small", "full"]

VIOLATIONS_SHOWN_MAX = 100


class Progress(Protocol):
    """Told how far a scenario is; `total` 0 is unknown."""

    def __call__(self, text: str, done: int = 0, total: int = 0) -> None: ...


def silent(text: str, done: int = 0, total: int = 0) -> None:
    """A progress that shows nothing, for tests."""


@dataclass(slots=True)
class Verdict:
    """What a scenario found. It is ok when there is no violation."""

    check: str
    seed: int
    figures: dict[str, Any] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was violated."""
        return not self.violations

    def require(self, holds: bool, violation: str) -> None:
        """Note a violation unless the condition holds."""
        if not holds and len(self.violations) < VIOLATIONS_SHOWN_MAX:
            self.violations.append(violation)

    def document(self) -> dict[str, Any]:
        """The verdict as it is printed by --json."""
        return {
            "check": self.check,
            "seed": self.seed,
            "ok": self.ok,
            "figures": self.figures,
            "violations": self.violations,
        }


class Scenario(Protocol):
    """A module of this package."""

    SUMMARY: str

    def run(self, *, size: Size, seed: int, progress: Progress) -> Awaitable[Verdict]: ...


def names() -> list[str]:
    """Every scenario there is; a module with a leading underscore is part of one."""
    found = (module.name for module in pkgutil.iter_modules(noetl_grpc.checks.__path__))
    return sorted(name.replace("_", "-") for name in found if name != "frame" and not name.startswith("_"))


def load(name: str) -> Scenario:
    """The scenario of that name."""
    return cast(Scenario, importlib.import_module(f"noetl_grpc.checks.{name.replace('-', '_')}"))


async def gather_bounded(jobs: Iterable[Callable[[], Awaitable[None]]], *, seconds: float) -> None:
    """Run all of them side by side; the first failure, or the end of the time, stops the rest."""
    async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(_awaited(job))


async def _awaited(job: Callable[[], Awaitable[None]]) -> None:
    await job()
