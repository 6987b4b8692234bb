"""What every benchmark shares: its cases and its options.

A bench is a module here with a `SUMMARY` and `async def run(options) -> list[Case]`. It measures against a control
in the same run; `ratio` is always "bigger is better", and an absolute time never fails anything.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Awaitable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol, cast

import noetl_grpc.benches


class Progress(Protocol):
    """Told how far a bench is; `total` 0 is unknown."""

    def __call__(self, text: str, done: int = 0, total: int = 0) -> None: ...


def silent(text: str, done: int = 0, total: int = 0) -> None:
    """A progress that shows nothing."""


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement beside its control."""

    case: str
    unit: str
    value: float
    control: float
    ratio: float
    #: The floor that the design asks for; None is reported without a goal.
    goal: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the ratio reaches its goal."""
        return self.goal is None or self.ratio >= self.goal

    def document(self) -> dict[str, Any]:
        """The case as it is printed by --json."""
        return {
            "case": self.case,
            "unit": self.unit,
            "value": round(self.value, 3),
            "control": round(self.control, 3),
            "ratio": round(self.ratio, 3),
            "goal": self.goal,
            "holds": self.holds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a bench should run."""

    quick: bool = False
    #: Use these servers instead of temporary ones.
    database_url: str = ""
    nats_url: str = ""
    #: Switches of one bench, such as `fresh`, `raw` or `latency`.
    flags: frozenset[str] = frozenset()
    progress: Progress = field(default=silent)


class Bench(Protocol):
    """A module of this package."""

    SUMMARY: str

    def run(self, options: Options) -> Awaitable[list[Case]]: ...


def names() -> list[str]:
    """Every bench there is."""
    found = (module.name for module in pkgutil.iter_modules(noetl_grpc.benches.__path__))
    return sorted(name for name in found if name not in ("frame", "bare"))


def load(name: str) -> Bench:
    """The bench of that name."""
    return cast(Bench, importlib.import_module(f"noetl_grpc.benches.{name}"))


def faster(case: str, unit: str, rounds: list[tuple[float, float]], *, goal: float | None = None) -> Case:
    """A case of interleaved rounds (value, control) of rates; the ratio is the median of the rounds' ratios."""
    return Case(
        case=case,
        unit=unit,
        value=median(value for value, _ in rounds),
        control=median(control for _, control in rounds),
        ratio=median(value / control for value, control in rounds),
        goal=goal,
    )
