"""The two rule sets of the fold, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

UNKNOWN = "UNKNOWN"
TERMINAL = frozenset({"COMPLETED", "FAILED", "CANCELLED"})

_COMPLETED = dict.fromkeys(("playbook.completed", "workflow.completed", "execution.completed"), "COMPLETED")
_FAILED = dict.fromkeys(("playbook.failed", "workflow.failed", "execution.failed"), "FAILED")
_STARTS = ("playbook.initialized", "execution.started", "stage.opened", "frame.dispatched")


@dataclass(frozen=True, slots=True)
class Rules:
    """How a fold decides where NoETL's two servers, and the logs they wrote, disagree."""

    name: str
    #: event type → the execution's status after it
    statuses: Mapping[str, str]
    #: whether a RUNNING of `statuses` also replaces a terminal status
    terminal_can_restart: bool
    #: whether an event without node name erases the last one
    null_clears_node_name: bool
    #: whether an empty status of a business object's event hides what its type says
    empty_status_counts: bool
    #: whether a malformed number counts as absent, with a warning, instead of failing the fold
    malformed_is_absent: bool


class FoldRules(Enum):
    """The rule sets by name; a snapshot is continued only under the one it was folded by."""

    UNION = Rules(
        name="union",
        statuses={
            **_COMPLETED,
            **_FAILED,
            **dict.fromkeys((*_STARTS, "step.enter", "step_enter", "step_started"), "RUNNING"),
            "playbook_completed": "COMPLETED",
            "playbook_failed": "FAILED",
            **dict.fromkeys(("playbook.cancelled", "playbook_cancelled", "execution.cancelled"), "CANCELLED"),
        },
        terminal_can_restart=False,
        null_clears_node_name=False,
        empty_status_counts=False,
        malformed_is_absent=True,
    )
    PYTHON_4_26 = Rules(
        name="python-4.26",
        statuses={**_COMPLETED, **_FAILED, "command.failed": "FAILED", **dict.fromkeys(_STARTS, "RUNNING")},
        terminal_can_restart=True,
        null_clears_node_name=True,
        empty_status_counts=True,
        malformed_is_absent=False,
    )
