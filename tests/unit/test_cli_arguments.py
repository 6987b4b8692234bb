"""What people type that can't be used: one line on standard error that says what could be, and exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import typer

from noetl_grpc.cli import projection, remote
from noetl_grpc.cli.words import parse_id, parse_time, parse_word
from noetl_grpc.client import EventKey, FoldRules, SubscriptionState

HERE = Path(__file__)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (lambda: parse_time("soon", option="--since"), "2026-05-01T12:00:00Z"),
        (lambda: parse_word(SubscriptionState, "odd", option="--state"), "active, paused"),
        (lambda: parse_word(SubscriptionState, "unspecified", option="--state"), "active"),
        (lambda: parse_id(str(2**63)), "64 bits"),
        (lambda: projection._key("4242"), "EXECUTION/EVENT"),
        (lambda: projection._key("4242/"), "EXECUTION/EVENT"),
        (lambda: projection._key(f"1/{2**63}"), "64 bits"),
        (lambda: remote._Connection(token_file=Path("nowhere")).settings(), "--token-file nowhere"),
        (lambda: remote._Connection(tls_ca=Path("nowhere")).settings(), "--tls-ca nowhere"),
        (lambda: remote._Connection(tls_key=HERE.parent).settings(), "--tls-key"),
        (lambda: remote._Connection(tls_cert=HERE).settings(), "--tls-key belong together"),
    ],
)
def test_it_says_what_could_be_used(
    wrong: Callable[[], object], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended:
        wrong()

    said = capsys.readouterr().err
    assert ended.value.exit_code == 2
    assert word in said
    assert said.count("\n") == 1


def test_what_can_be_used_is() -> None:
    assert parse_time("2026-05-01T12:00:00", option="--since") == datetime(2026, 5, 1, 12, tzinfo=UTC)
    assert parse_word(FoldRules, "python-4-26", option="--rules") is FoldRules.PYTHON_4_26
    assert (parse_id("7"), parse_id("demo/7")) == (7, None)
    assert projection._key("4242/99") == EventKey(4242, 99)
    assert remote._Connection(tls_cert=HERE, tls_key=HERE).settings().uses_tls
