"""`noetl-grpc token`: what it writes is what the server reads, and it says what is wrong."""

from __future__ import annotations

import hashlib
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import Result
from typer.testing import CliRunner

from noetl_grpc.cli import app
from noetl_grpc.core.access import SCOPES, Tenant
from noetl_grpc.interceptors.auth import TokenChecker


def _run(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(app, ["token", *arguments], input=given)


def _new(file: Path, *arguments: str) -> str:
    result = _run("new", *arguments, "--file", str(file))
    assert result.exit_code == 0, result.stderr
    return result.stdout.strip()


def _document(file: Path) -> Any:
    return orjson.loads(file.read_bytes())


def test_a_new_token_lets_its_holder_in_with_its_scopes_tenants_and_end(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"

    token = _new(
        file,
        *("reader", "--scope", "replay:read", "--tenant", "acme", "--tenant", "acme/labs"),
        *("--expires-in", "2d"),
    )

    caller = TokenChecker("", tokens_file=file).authenticate((("authorization", f"Bearer {token}"),))
    assert caller.name == "reader"
    assert caller.scopes == {"replay:read"}
    assert caller.tenants == {Tenant("acme", "default"), Tenant("acme", "labs")}
    assert caller.expires_at is not None
    assert abs(caller.expires_at - datetime.now(UTC) - timedelta(days=2)) < timedelta(minutes=1)


def test_the_file_keeps_no_token_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"

    token = _new(file, "a", "--scope", "all")

    assert token not in file.read_text()
    assert _document(file)["tokens"][0]["sha256"] == hashlib.sha256(token.encode()).hexdigest()
    assert set(_document(file)["tokens"][0]["scopes"]) == SCOPES
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_file_keeps_its_mode_when_a_token_is_added(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text('{"tokens": []}')
    file.chmod(0o640)

    _new(file, "a", "--scope", "outbox:read")

    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_tokens_made_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    from noetl_grpc.cli.token import _add
    from noetl_grpc.core.access import token_entry

    file = tmp_path / "tokens.json"
    entries = [token_entry(name=str(n), sha256=f"{n:064x}", scopes=["outbox:read"]) for n in range(24)]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda entry: _add(file, entry), entries))

    assert {entry["name"] for entry in _document(file)["tokens"]} == {str(n) for n in range(24)}
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.json"]


def test_without_a_file_the_entry_is_printed() -> None:
    result = _run("new", "a", "--scope", "outbox:read", "--expires-at", "2031-01-31T00:00:00Z", "--json")
    made = orjson.loads(result.stdout)

    assert made["entry"] == {
        "name": "a",
        "sha256": hashlib.sha256(made["token"].encode()).hexdigest(),
        "scopes": ["outbox:read"],
        "expires_at": "2031-01-31T00:00:00+00:00",
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("new", "a", "--scope", "outbox:fly"), "--scope 'outbox:fly'"),
        (("new", "a", "--scope", "all", "--tenant", "/x"), "--tenant '/x'"),
        (("new", "a", "--scope", "all", "--tenant", "a/b/c"), "--tenant 'a/b/c'"),
        (("new", "a", "--scope", "all", "--expires-in", "soon"), "--expires-in 'soon'"),
        (("new", "a", "--scope", "all", "--expires-in", "0d"), "--expires-in '0d'"),
        (("new", "a", "--scope", "all", "--expires-at", "2031-01-31T00:00:00"), "--expires-at"),
        (("new", "a", "--scope", "all", "--expires-in", "1d", "--expires-at", "x"), "exclude each other"),
    ],
)
def test_what_cannot_be_used_is_named(arguments: tuple[str, ...], said: str) -> None:
    result = _run(*arguments)

    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


def test_a_broken_file_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text('{"tokens": [{"name": "a"}]}')

    result = _run("new", "b", "--scope", "all", "--file", str(file))

    assert result.exit_code == 1
    assert "tokens[0].sha256 must be 64 hexadecimal digits" in result.stderr
    assert file.read_text() == '{"tokens": [{"name": "a"}]}'


def test_list_shows_everything_but_the_hashes(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    _new(file, "old", "--scope", "outbox:read", "--expires-at", "2020-01-01T00:00:00Z")
    _new(file, "bound", "--scope", "replay:read", "--tenant", "acme")

    listed = orjson.loads(_run("list", "--file", str(file), "--json").stdout)
    shown = _run("list", "--file", str(file)).stdout

    assert [(one["name"], one["expired"], one["tenants"]) for one in listed["tokens"]] == [
        ("old", True, None),
        ("bound", False, ["acme/default"]),
    ]
    assert "acme/default" in shown
    assert not any(entry["sha256"] in shown for entry in _document(file)["tokens"])


def test_check_tells_whom_a_token_stands_for(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    token = _new(file, "a", "--scope", "outbox:read")
    old = _new(file, "b", "--scope", "outbox:read", "--expires-at", "2020-01-01T00:00:00Z")
    check = ("check", "--file", str(file))

    assert _run(*check).exit_code == 0
    known = _run(*check, "--token-file", "-", "--json", given=f"{token}\n")
    assert (known.exit_code, orjson.loads(known.stdout)["name"]) == (0, "a")
    assert _run(*check, "--token-file", "-", given=old).exit_code == 1
    assert _run(*check, "--token-file", "-", given="another").exit_code == 1
    assert _run("check", "--file", str(tmp_path / "none.json")).exit_code == 1
