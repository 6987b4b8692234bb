"""The command line: arguments in, text out. It calls client, server and dev, and decides nothing itself."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from noetl_grpc.cli.lazy import LazyGroup, add_stand_ins
from noetl_grpc.errors import SchemaError, SettingsError

app = typer.Typer(
    name="noetl-grpc",
    cls=LazyGroup,
    help=(
        "The gRPC service in front of NoETL's event log.\n\n"
        "Start with [bold]noetl-grpc dev[/bold]: it runs everything on this machine.\n\n"
        "Exit codes: 0 ok, 1 the answer is no, 2 wrong use, 3 the server is not reachable, 4 the token is refused."
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
add_stand_ins(app)

#: What typer raises for a line it can't use. It has no public name; whose class it is differs between versions.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]
_WORDS = {"a valid int range": "a whole number", "a valid float range": "a number"}


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("noetl-grpc"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Options of every command."""


def main() -> None:
    """The entry point: what the user can mend is said in one line, without a traceback."""
    # gRPC's library would write lines of its own beside ours. It reads this when it is loaded.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        sys.exit(app(standalone_mode=False))
    except _UsageError as error:
        sys.exit(_say(_usage(error), code=2))
    except typer.Abort:
        sys.exit(_say("aborted", code=1))
    except SettingsError as error:
        sys.exit(_say(error, code=2))
    except SchemaError as error:
        sys.exit(_say(error, code=1))
    except ModuleNotFoundError as error:
        # `dev`, `check` and `bench` need an extra; that of its servers is said where they are looked for.
        if error.name != "yaml":
            raise
        sys.exit(_say("PyYAML is missing; pip install 'noetl-grpc[embedded]'", code=1))


def _usage(error: Any) -> str:
    """What is wrong with the line, and where its right form is shown; nothing where the help was shown already."""
    text = error.format_message().strip()
    for typers, ours in _WORDS.items():
        text = text.replace(typers, ours)
    if not text:
        return ""
    path = error.ctx.command_path if error.ctx else "noetl-grpc"
    end = "" if text[-1] in ".?" else "."
    return f"{text[0].lower()}{text[1:]}{end} `{path} --help` shows how it is meant."


def _say(what: object, *, code: int) -> int:
    if what:
        typer.echo(f"noetl-grpc: {what}", err=True)
    return code
