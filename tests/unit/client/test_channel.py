"""Which calls are repeated, whose token is sent where, and what the package offers."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

import noetl_grpc
from noetl_grpc.client.channel import NOT_REPEATABLE, REPEATABLE, FileToken, Line, service_config
from noetl_grpc.errors import SettingsError, Unauthenticated
from noetl_grpc.server import SERVICES
from noetl_grpc.settings import ClientSettings


def test_every_rpc_is_either_repeatable_or_not() -> None:
    ours = [service for service in SERVICES if service.full_name.startswith("noetlpb.")]

    for service in ours:
        repeatable = REPEATABLE.get(service.full_name, set())
        not_repeatable = NOT_REPEATABLE.get(service.full_name, set())
        assert repeatable | not_repeatable == {method.name for method in service.methods}, service.full_name
        assert not repeatable & not_repeatable


def test_only_repeatable_rpcs_have_a_retry_policy() -> None:
    (method_config,) = json.loads(service_config())["methodConfig"]

    named = {name["method"] for name in method_config["name"]}

    assert "ClaimOutboxBatch" not in named
    assert "EnqueueOutbox" in named
    assert method_config["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE", "CANCELLED"]


def test_a_token_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first\n")
    token = FileToken(path)
    assert token() == "first"

    fresh = tmp_path / "fresh"
    fresh.write_text("second\n")
    fresh.replace(path)

    assert token() == "second"


def test_a_token_file_that_is_just_being_replaced_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first\n")
    token = FileToken(path)
    assert token() == "first"

    path.unlink()

    assert token() == "first"


def test_a_token_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff")

    for name in ("nowhere", "binary"):
        with pytest.raises(Unauthenticated, match=name) as raised:
            FileToken(tmp_path / name)()
        assert raised.value.reason == "TOKEN_MISSING"


@pytest.mark.parametrize("token", ["two\nlines", "tök", "bell\x07"])
def test_a_token_that_can_not_be_sent_is_said_so_and_not_shown(token: str) -> None:
    line = Line(Mock(), token=lambda: token, timeout_seconds=1.0)

    with pytest.raises(Unauthenticated, match="printable ASCII") as raised:
        line.metadata()

    assert raised.value.reason == "TOKEN_MALFORMED"
    assert token not in str(raised.value)


def test_all_public_names_exist_and_are_sorted() -> None:
    assert all(hasattr(noetl_grpc, name) for name in noetl_grpc.__all__)
    assert noetl_grpc.__all__ == sorted(noetl_grpc.__all__)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a development server runs."""
    (tmp_path / ".noetl").mkdir()
    (tmp_path / ".noetl/ready.json").write_text(
        json.dumps({"address": "127.0.0.1:7001", "token": "dev-token", "pid": 1})
    )
    return tmp_path


def test_without_an_environment_the_dev_server_of_the_folder_is_found(folder: Path) -> None:
    settings = ClientSettings.from_env({}, folder=folder)

    assert (settings.address, settings.token) == ("127.0.0.1:7001", "dev-token")


def test_the_environment_wins_and_its_address_never_gets_the_dev_token(folder: Path) -> None:
    elsewhere = ClientSettings.from_env({"NOETL_GRPC_ADDRESS": "example.org:443"}, folder=folder)
    same = ClientSettings.from_env({"NOETL_GRPC_ADDRESS": "127.0.0.1:7001"}, folder=folder)
    other_token = ClientSettings.from_env({"NOETL_INTERNAL_API_TOKEN": "mine"}, folder=folder)

    assert (elsewhere.address, elsewhere.token) == ("example.org:443", "")
    assert same.token == "dev-token"
    assert (other_token.address, other_token.token) == ("127.0.0.1:7001", "mine")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"address": 5}'])
def test_a_broken_ready_file_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / ".noetl").mkdir()
    (tmp_path / ".noetl/ready.json").write_text(text)

    assert ClientSettings.from_env({}, folder=tmp_path).address == "127.0.0.1:50051"


def test_a_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    certificate = tmp_path / "cert.pem"
    certificate.write_text("x")

    with pytest.raises(SettingsError, match="NOETL_GRPC_TLS_KEY"):
        ClientSettings.from_env({"NOETL_GRPC_TLS_CERT": str(certificate)}, folder=tmp_path)


def test_secrets_do_not_show() -> None:
    assert "dev-token" not in repr(ClientSettings(token="dev-token"))
