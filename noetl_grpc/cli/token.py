"""`token`: makes entries of a tokens file, shows them, and tells whom a token stands for."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table

from noetl_grpc.cli.files import write_atomically
from noetl_grpc.core.access import SCOPES, Caller, Tenant, parse_tokens, tenant_named, token_entry
from noetl_grpc.errors import InvalidRequest

app = typer.Typer(help="Named tokens with scopes, tenants and an end.", no_args_is_help=True)

#: Tells people and secret scanners what it is.
PREFIX = "noetl_"

_SECONDS = {"m": 60, "h": 3600, "d": 86_400}

_File = Annotated[
    Path,
    typer.Option("--file", envvar="NOETL_API_TOKENS_FILE", help="The tokens file.", show_default=False),
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Whom it is for; the access log shows it.")],
    scope: Annotated[
        list[str], typer.Option(help="Such as outbox:read; repeat it for more, or 'all'.", show_default=False)
    ],
    tenant: Annotated[
        list[str] | None,
        typer.Option(help="Bind it to TENANT or TENANT/ORGANIZATION; repeat it for more. Without: unbound."),
    ] = None,
    expires_in: Annotated[str, typer.Option(help="How long it lives, such as 90d, 12h or 30m.")] = "",
    expires_at: Annotated[str, typer.Option(help="Until when, such as 2027-01-31T00:00:00Z.")] = "",
    file: Annotated[
        Path | None,
        typer.Option(
            envvar="NOETL_API_TOKENS_FILE", help="Add the entry to this file; without, the entry is printed."
        ),
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Make a token. It is printed once; the file keeps only its hash.

    Example: noetl-grpc token new publisher --scope outbox:read --scope outbox:write --file tokens.json
    """
    if expires_in and expires_at:
        raise _refusal("--expires-in and --expires-at exclude each other")
    for word in scope:
        if word not in SCOPES and word != "all":
            raise _refusal(
                f"--scope {word!r} can't be used; expected all, or some of {', '.join(sorted(SCOPES))}"
            )
    token = PREFIX + secrets.token_urlsafe(32)
    entry = token_entry(
        name=name,
        sha256=hashlib.sha256(token.encode()).hexdigest(),
        scopes=SCOPES if "all" in scope else scope,
        tenants=[_tenant(text) for text in tenant or ()],
        expires_at=_expiry(expires_in, expires_at),
    )
    _parse({"tokens": [entry]})
    if file is not None:
        _add(file, entry)
    if as_json:
        typer.echo(_text({"token": token, "entry": entry}))
        return
    typer.echo(token)
    if file is not None:
        typer.echo(f"noetl-grpc: added to {file}; a running server takes it up within seconds", err=True)
    else:
        typer.echo(f'noetl-grpc: add this to "tokens" in the tokens file:\n{_text(entry)}', err=True)


@app.command("list")
def show(file: _File, as_json: _AsJson = False) -> None:
    """Show the tokens of a file: names, scopes, tenants and ends. The tokens themselves are not in it.

    Example: noetl-grpc token list --file tokens.json
    """
    callers = list(_parse(_read(file)).values())
    if as_json:
        typer.echo(_text({"tokens": [_described(caller) for caller in callers]}))
        return
    table = Table("name", "scopes", "tenants", "expires", box=None, pad_edge=False)
    for caller in callers:
        said = _described(caller)
        table.add_row(
            caller.name,
            " ".join(said["scopes"]),
            "any" if said["tenants"] is None else " ".join(said["tenants"]) or "none",
            ("[red]" if said["expired"] else "") + (said["expires_at"] or "never"),
        )
    Console().print(table)


@app.command()
def check(
    file: _File,
    token_file: Annotated[
        Path | None,
        typer.Option(help="Read a token from this file ('-' is standard input) and tell whom it stands for."),
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Tell whether a tokens file can be used and, with a token, whom it stands for. Exits with 1 if not.

    Example: echo "$TOKEN" | noetl-grpc token check --file tokens.json --token-file -
    """
    callers = _parse(_read(file))
    if token_file is None:
        verdict: dict[str, Any] = {"ok": True, "tokens": len(callers)}
        said = f"{len(callers)} tokens"
    else:
        text = sys.stdin.read() if str(token_file) == "-" else _text_of(token_file)
        caller = callers.get(hashlib.sha256(text.strip().encode()).digest())
        if caller is None:
            verdict, said = {"ok": False, "reason": "unknown"}, "the token is not in this file"
        else:
            verdict = _described(caller)
            verdict["ok"] = not verdict["expired"]
            said = f"{caller.name}: " + (
                "expired" if verdict["expired"] else ", ".join(verdict["scopes"]) or "no scope"
            )
    typer.echo(_text(verdict) if as_json else said)
    raise typer.Exit(0 if verdict["ok"] else 1)


def _described(caller: Caller) -> dict[str, Any]:
    tenants = None
    if caller.tenants is not None:
        tenants = sorted(f"{one.tenant_id}/{one.organization_id}" for one in caller.tenants)
    return {
        "name": caller.name,
        "scopes": sorted(caller.scopes or ()),
        "tenants": tenants,
        "expires_at": caller.expires_at.isoformat() if caller.expires_at else None,
        "expired": caller.expires_at is not None and caller.expires_at <= datetime.now(UTC),
    }


def _tenant(text: str) -> Tenant:
    tenant_id, slash, organization_id = text.partition("/")
    if not tenant_id.strip() or (slash and not organization_id.strip()) or "/" in organization_id:
        raise _refusal(f"--tenant {text!r} can't be used; expected TENANT or TENANT/ORGANIZATION")
    return tenant_named(tenant_id, organization_id)


def _expiry(expires_in: str, expires_at: str) -> datetime | None:
    if expires_at:
        try:
            moment = datetime.fromisoformat(expires_at)
        except ValueError:
            moment = datetime.min
        if moment.tzinfo is None:
            raise _refusal(
                f"--expires-at {expires_at!r} can't be used; expected such as 2027-01-31T00:00:00Z"
            )
        return moment
    if not expires_in:
        return None
    found = re.fullmatch(r"([1-9]\d{0,5})([mhd])", expires_in.strip())
    if found is None:
        raise _refusal(f"--expires-in {expires_in!r} can't be used; expected such as 90d, 12h or 30m")
    lifetime = timedelta(seconds=int(found[1]) * _SECONDS[found[2]])
    return (datetime.now(UTC) + lifetime).replace(microsecond=0)


def _add(file: Path, entry: dict[str, Any]) -> None:
    with _locked(file.parent):
        document = _read(file) if file.exists() else {"tokens": []}
        _parse(document)
        document["tokens"].append(entry)
        try:
            write_atomically(file, _text(document) + "\n")
        except OSError as error:
            raise _refusal(f"{file} can't be written: {error.strerror}", code=1) from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two that add at the same time must not lose one. The folder is locked, as the file itself is replaced."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise _refusal(f"{folder} can't be used: {error.strerror}", code=1) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _read(file: Path) -> Any:
    try:
        return orjson.loads(_text_of(file))
    except ValueError:
        raise _refusal(f"{file} is not JSON", code=1) from None


def _text_of(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise _refusal(f"{file} can't be read: {reason}", code=1) from None


def _parse(document: Any) -> dict[bytes, Caller]:
    try:
        return parse_tokens(document)
    except InvalidRequest as error:
        raise _refusal(str(error), code=1) from None


def _refusal(text: str, *, code: int = 2) -> typer.Exit:
    typer.echo(f"noetl-grpc: {text}", err=True)
    return typer.Exit(code)


def _text(document: object) -> str:
    return orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()
