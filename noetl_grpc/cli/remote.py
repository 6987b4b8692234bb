"""What every command shares that asks a server: where it is, the token, the form of the answer, the exit code."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import orjson
import typer
from rich.console import Console
from rich.table import Table

from noetl_grpc.cli.loop import run as run_loop
from noetl_grpc.client import NoetlClient
from noetl_grpc.client.mapping import to_document
from noetl_grpc.errors import (
    AuthNotConfigured,
    DeadlineExceeded,
    InvalidRequest,
    NoetlError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from noetl_grpc.settings import ClientSettings

#: What a script can rely on; `noetl-grpc --help` says it too.
EXIT_NEGATIVE = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_DENIED = 4

_PANEL = "Server"

#: What a person can do about an answer that is no.
_NEXT = {
    "SUBSCRIPTION_NOT_FOUND": "`noetl-grpc subscription list` shows those that there are.",
    "CATALOG_ENTRY_NOT_FOUND": "Register a path of NoETL's catalog; `dev` has demo/order_events.",
    "NOT_A_SUBSCRIPTION": "Register a path whose kind is Subscription.",
    "PROJECTION_NOT_FOUND": "Try `noetl-grpc projection advance`.",
    "ILLEGAL_TRANSITION": "`noetl-grpc subscription get` shows its state.",
    "ETAG_MISMATCH": "Look at it again, and use the etag that you then see.",
    "STATE_TOO_LARGE": "Ask for one surface with --projection.",
    "CONFLICT": "Try again.",
    "INTERNAL": "The server's log says more; please report it.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Connection:
    """The options that each of these commands has."""

    address: Annotated[
        str,
        typer.Option(
            help="host:port of the server. Default: NOETL_GRPC_ADDRESS, else the one `dev` runs in this folder.",
            rich_help_panel=_PANEL,
            show_default=False,
        ),
    ] = ""
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the token. Default: NOETL_INTERNAL_API_TOKEN, else that of `dev`.",
            rich_help_panel=_PANEL,
            show_default=False,
        ),
    ] = None
    tls: Annotated[bool, typer.Option("--tls", help="Use TLS.", rich_help_panel=_PANEL)] = False
    tls_ca: Annotated[
        Path | None,
        typer.Option(help="Authorities that sign the server's certificate (PEM).", rich_help_panel=_PANEL),
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option(help="Our own certificate (PEM).", rich_help_panel=_PANEL)
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="Its key (PEM).", rich_help_panel=_PANEL)] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: one document, or one line per item of a list.")
    ] = False

    def settings(self) -> ClientSettings:
        """The environment, with what the command line says instead."""
        for option, file in (
            ("--token-file", self.token_file),
            ("--tls-ca", self.tls_ca),
            ("--tls-cert", self.tls_cert),
            ("--tls-key", self.tls_key),
        ):
            if file is not None:
                _require_readable(option, file)
        given = (
            ClientSettings.from_env(folder=Path("/nowhere")) if self.address else ClientSettings.from_env()
        )
        settings = replace(
            given,
            address=self.address or given.address,
            tls=self.tls or given.tls,
            tls_authorities=self.tls_ca or given.tls_authorities,
            tls_certificate=self.tls_cert or given.tls_certificate,
            tls_key=self.tls_key or given.tls_key,
        ).completed()
        if (settings.tls_certificate is None) != (settings.tls_key is None):
            refuse("--tls-cert and --tls-key belong together; give both or neither")
        return settings


@dataclass(slots=True)
class Session:
    """A command at work: the client it asks and the place where it answers."""

    client: NoetlClient
    settings: ClientSettings
    as_json: bool
    console: Console = field(default_factory=Console)
    #: Progress and remarks, so that standard output holds the answer alone.
    aside: Console = field(default_factory=lambda: Console(stderr=True))

    def document(self, value: Any) -> None:
        """Print one JSON document: a dataclass of the client, or plain values."""
        typer.echo(orjson.dumps(_plain(value), option=orjson.OPT_INDENT_2))

    def line(self, value: Any) -> None:
        """Print one line of JSON."""
        typer.echo(orjson.dumps(_plain(value)))

    def plain(self, value: Any) -> Any:
        """A value as it stands in a JSON document."""
        return _plain(value)

    def say(self, text: str) -> None:
        """A sentence for people, with markup."""
        self.console.print(text, highlight=False)

    def table(self, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
        """Rows for people."""
        table = Table(*columns, box=None, pad_edge=False, header_style="dim")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def no(self) -> NoReturn:
        """The answer is negative."""
        raise typer.Exit(EXIT_NEGATIVE)


def command(
    app: typer.Typer, name: str | None = None
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., Awaitable[None]]]:
    """Make a command of a coroutine whose first argument is the session; it gets the options of a connection."""

    def register(function: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        shared = inspect.signature(_Connection, eval_str=True).parameters
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

        def run(**options: Any) -> None:
            connection = _Connection(**{key: options.pop(key) for key in shared})
            _run(connection, function, options)

        keyword_only = [
            item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in (*own, *shared.values())
        ]
        run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]  # typer reads it
        run.__annotations__ = {item.name: item.annotation for item in keyword_only}
        run.__doc__ = function.__doc__
        run.__name__ = function.__name__
        app.command(name)(run)
        return function

    return register


def _run(connection: _Connection, function: Callable[..., Awaitable[None]], options: dict[str, Any]) -> None:
    settings = connection.settings()
    for name, value in options.items():
        for number in value if isinstance(value, list) else (value,):
            if isinstance(number, int):
                require_fit(number, name.replace("_", "-"))

    async def work() -> None:
        async with NoetlClient.from_settings(settings, token_file=connection.token_file) as client:
            await function(Session(client, settings, connection.as_json), **options)

    try:
        run_loop(work())
    except NoetlError as error:
        raise typer.Exit(complain(error, settings)) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def complain(error: NoetlError, settings: ClientSettings) -> int:
    """Say what went wrong and what to do next; returns the exit code."""
    code, hint = _advice(error, settings)
    text = error.message.rstrip(".")
    if code == EXIT_UNREACHABLE and error.reason in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
        text = f"no server answers at {settings.address}"
    typer.echo(f"noetl-grpc: {text}.{' ' + hint if hint else ''}", err=True)
    return code


def _advice(error: NoetlError, settings: ClientSettings) -> tuple[int, str]:
    if isinstance(error, AuthNotConfigured):
        return EXIT_DENIED, "Set NOETL_INTERNAL_API_TOKEN where the server runs."
    if isinstance(error, Unauthenticated):
        return EXIT_DENIED, "Give the token with --token-file, or set NOETL_INTERNAL_API_TOKEN."
    if isinstance(error, PermissionDenied):
        return EXIT_DENIED, "Use a token with that scope; `noetl-grpc token new` makes one."
    if isinstance(error, Unavailable) and error.reason == "UNAVAILABLE":
        if settings.uses_tls:
            return EXIT_UNREACHABLE, "Check the address, that it speaks TLS, and who signed its certificate."
        return EXIT_UNREACHABLE, "Start one with `noetl-grpc dev`, or name another with --address."
    if isinstance(error, Unavailable | DeadlineExceeded):
        return EXIT_UNREACHABLE, "Try again in a moment."
    if isinstance(error, ResourceExhausted) and error.retry_after_seconds is not None:
        return EXIT_UNREACHABLE, "Try again in a moment."
    if isinstance(error, InvalidRequest):
        return EXIT_USAGE, "`--help` shows how it is meant."
    return EXIT_NEGATIVE, _NEXT.get(error.reason, "")


def refuse(text: str) -> NoReturn:
    """A wrong use of the command, said in one line."""
    typer.echo(f"noetl-grpc: {text}", err=True)
    raise typer.Exit(EXIT_USAGE)


def require_fit(number: int, name: str) -> int:
    """A number as it is, if it can be sent."""
    if abs(number) >= 2**63:
        refuse(f"{name} {number} can't be used; it has more than 64 bits")
    return number


def _require_readable(option: str, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        refuse(f"{option} {path} can't be read: {error.strerror}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict | list | str | int | float | None):
        return value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return to_document(value)


def is_terminal() -> bool:
    """Whether somebody looks at standard output."""
    return sys.stdout.isatty()
