"""A list of commands whose modules are imported one by one, when they are called.

Whoever types a line waits for it, and so does each completion of one; most commands need little of what all of them
together import.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer.core
import typer.main

#: By heading: the command, its module here, and what `--help` says of it. A test holds this next to the modules.
COMMANDS = {
    "Run": (
        ("dev", "run", "Run PostgreSQL, NATS, the server and its workers on this machine."),
        ("serve", "run", "Serve until SIGTERM."),
        ("migrate", "schema", "Create or complete the schema of every configured database."),
        ("publish-outbox", "workers", "Publish outbox rows to JetStream, in order per execution."),
        ("run-projector", "workers", "Advance the snapshots of executions as their events arrive."),
    ),
    "Look and act": (
        ("top", "top", "A live screen of a server."),
        ("replay", "replay", "Show the state of an execution, with a timeline of its steps."),
        ("outbox", "outbox", "Outgoing messages: what waits, what is dead."),
        ("subscription", "subscription", "Long-lived subscriptions and their lifecycle."),
        ("projection", "projection", "Snapshots of executions, their upkeep, and parked events."),
        ("tailer", "tailer", "The way of committed events to the broker."),
        ("token", "token", "Named tokens with scopes, tenants and an end."),
    ),
    "Try and measure": (
        ("demo", "demo", "Write sample executions and watch them flow."),
        ("check", "measure", "Run a fault scenario on temporary servers."),
        ("bench", "measure", "Measure against a control in the same run."),
    ),
}

_MODULES = {name: module for commands in COMMANDS.values() for name, module, _ in commands}


class LazyGroup(typer.core.TyperGroup):
    """Lists stand-ins, and puts a command in the place of its own when it is called."""

    # Any: which click typer builds on differs between its versions.
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in _MODULES:
            self.commands[args[0]] = load(args[0])
        return super().resolve_command(ctx, args)


def load(name: str) -> Any:
    """A command: one of its module's, or the module as a whole where that is a group."""
    group = typer.main.get_group(import_module(f"noetl_grpc.cli.{_MODULES[name]}").app)
    return group.commands.get(name, group)


def add_stand_ins(app: typer.Typer) -> None:
    """Make `--help` list every command."""
    for panel, commands in COMMANDS.items():
        for name, _, summary in commands:
            app.command(name, help=summary, rich_help_panel=panel)(_stand_in)


def _stand_in() -> None:
    """Is never called."""
