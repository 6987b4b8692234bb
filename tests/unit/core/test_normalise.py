from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from noetl_grpc.core.envelope import Problem, Reason, result_fault
from noetl_grpc.core.normalise import (
    DEPTH_MAX,
    REDACTED,
    NativeEvent,
    Normalised,
    derive_status,
    normalise,
    sanitise,
)

EVENT = NativeEvent(execution_id=7, step="fetch", event_type="step.enter", event_id=9)


def normalised(**changes: Any) -> Normalised:
    row = normalise(replace(EVENT, **changes))
    assert isinstance(row, Normalised), row
    return row


def result_of(**changes: Any) -> Any:
    return json.loads(normalised(**changes).result_json)


def meta_of(**changes: Any) -> Any:
    return json.loads(normalised(**changes).meta_json)


def problem_of(**changes: Any) -> Problem:
    problem = normalise(replace(EVENT, **changes))
    assert isinstance(problem, Problem), problem
    return problem


@pytest.mark.parametrize(
    ("event_type", "status"),
    [
        ("command.completed", "COMPLETED"),
        ("playbook_completed", "COMPLETED"),
        ("step.exit", "COMPLETED"),
        ("call.done", "COMPLETED"),
        ("command.abandoned", "COMPLETED"),  # the letters of "done" are in it
        ("error.exit", "COMPLETED"),  # the first match wins
        ("command.failed", "FAILED"),
        ("call.error", "FAILED"),
        ("failed_over", "FAILED"),
        ("step.enter", "RUNNING"),
        ("playbook.cancelled", "RUNNING"),
        ("subscription.paused", "RUNNING"),
        ("COMMAND.COMPLETED", "RUNNING"),  # case counts
        ("Error", "RUNNING"),
    ],
)
def test_a_status_is_derived_from_the_letters_of_the_event_type(event_type: str, status: str) -> None:
    assert derive_status(event_type) == status
    assert normalised(event_type=event_type).status == status


def test_a_given_status_wins_in_any_spelling() -> None:
    row = normalised(event_type="command.failed", status="success")

    assert row.status == "success"
    assert json.loads(row.result_json)["status"] == "success"


OBJECT = '{"rows": 3}'


@pytest.mark.parametrize(
    ("changes", "rest"),
    [
        ({"payload_json": OBJECT}, {"context": {"rows": 3}}),
        ({"payload_json": OBJECT, "result_kind": ""}, {"context": {"rows": 3}}),
        ({"payload_json": OBJECT, "result_kind": "anything"}, {"context": {"rows": 3}}),
        ({"payload_json": "[1, 2]"}, {}),
        ({"payload_json": "17"}, {}),
        ({"payload_json": '"text"'}, {}),
        ({"payload_json": "null"}, {}),
        ({"payload_json": ""}, {}),
        (
            {"payload_json": OBJECT, "result_kind": "ref", "result_uri": "gs://bucket/a"},
            {"reference": {"store_tier": "gcs", "logical_uri": "gs://bucket/a"}},
        ),
        (
            {"result_kind": "ref", "result_uri": "s3://bucket/a"},
            {"reference": {"store_tier": "s3", "logical_uri": "s3://bucket/a"}},
        ),
        (
            {"result_kind": "ref", "result_uri": "file:///tmp/a"},
            {"reference": {"store_tier": "artifact", "logical_uri": "file:///tmp/a"}},
        ),
        ({"payload_json": OBJECT, "result_kind": "ref"}, {"context": {"rows": 3}}),
        (
            {"payload_json": OBJECT, "result_kind": "refs", "event_ids": (320816801799737344, 2)},
            {"reference": {"event_ids": [320816801799737344, 2], "total_parts": 2}},
        ),
        ({"payload_json": OBJECT, "result_kind": "refs"}, {"context": {"rows": 3}}),
        ({"payload_json": OBJECT, "result_uri": "gs://bucket/a"}, {"context": {"rows": 3}}),
    ],
)
def test_a_result_is_always_an_object_that_the_table_accepts(
    changes: dict[str, Any], rest: dict[str, Any]
) -> None:
    result = result_of(**changes)

    assert result == {"status": "RUNNING", **rest}
    assert result_fault(result) is None


@pytest.mark.parametrize(
    ("changes", "meta"),
    [
        ({}, {"actionable": True, "informative": True}),
        ({"meta_json": "null"}, {"actionable": True, "informative": True}),
        ({"meta_json": '{"a": 1}'}, {"a": 1, "actionable": True, "informative": True}),
        (
            {"meta_json": '{"actionable": "old"}', "actionable": False, "informative": False},
            {"actionable": False, "informative": False},
        ),
        ({"worker_id": "w1"}, {"actionable": True, "informative": True, "worker_id": "w1"}),
        (
            {"meta_json": '{"worker_id": "w0"}'},
            {"actionable": True, "informative": True, "worker_id": "w0"},
        ),
        ({"meta_json": "[1]"}, [1]),
        ({"meta_json": '"text"', "worker_id": "w1"}, "text"),
    ],
)
def test_meta_gets_the_flags_of_the_event_and_a_meta_that_is_no_object_is_kept(
    changes: dict[str, Any], meta: object
) -> None:
    assert meta_of(**changes) == meta


def test_the_step_names_the_node_and_the_worker_is_kept() -> None:
    row = normalised(step="fetch", worker_id="w1", created_at=(1, 2))

    assert (row.node_name, row.worker_id, row.created_at) == ("fetch", "w1", (1, 2))
    assert normalised(worker_id="").worker_id is None


@pytest.mark.parametrize(
    ("changes", "request_id", "key"),
    [
        ({"event_id": 9}, "r", None),
        ({"event_id": 9, "idempotency_key": "k"}, "r", "k"),
        ({"event_id": None, "idempotency_key": "k"}, "r", "k"),
        ({"event_id": None, "idempotency_key": ""}, "r", "r/3"),
        ({"event_id": None}, "r", "r/3"),
    ],
)
def test_an_event_without_an_id_is_known_by_its_key_or_its_place_in_the_request(
    changes: dict[str, Any], request_id: str, key: str | None
) -> None:
    row = normalise(replace(EVENT, **changes), request_id=request_id, index=3)

    assert isinstance(row, Normalised)
    assert (row.event_id, row.idempotency_key) == (changes["event_id"], key)


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"execution_id": 0}, Reason.FIELD_INVALID, "execution_id"),
        ({"execution_id": -1}, Reason.FIELD_INVALID, "execution_id"),
        ({"event_id": 0}, Reason.FIELD_INVALID, "event_id"),
        ({"event_id": None}, Reason.FIELD_INVALID, "idempotency_key"),
        ({"step": ""}, Reason.FIELD_INVALID, "step"),
        ({"event_type": ""}, Reason.FIELD_INVALID, "event_type"),
        ({"step": "a\0b"}, Reason.FIELD_INVALID, "step"),
        ({"payload_json": "{"}, Reason.JSON_INVALID, "payload_json"),
        ({"payload_json": "NaN"}, Reason.JSON_INVALID, "payload_json"),
        ({"payload_json": r'{"a": "\u0000"}'}, Reason.JSON_INVALID, "payload_json"),
        ({"meta_json": "{'a': 1}"}, Reason.JSON_INVALID, "meta_json"),
        ({"meta_json": "[" * 300 + "]" * 300}, Reason.JSON_INVALID, "meta_json"),
    ],
)
def test_an_event_that_can_never_be_stored_says_which_field_is_to_blame(
    changes: dict[str, Any], reason: Reason, field: str
) -> None:
    problem = problem_of(**changes)

    assert problem.reason is reason
    assert field in problem.detail


def test_numbers_keep_their_digits() -> None:
    numbers = "[0.1000000000000000055511151231257827, 123456789012345678901234567890, 1.10, -7]"

    text = normalised(payload_json=f'{{"numbers": {numbers}}}').result_json

    assert numbers.replace(" ", "") in text


JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ3b3JrZXIifQ.dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk"
RANDOM = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY0a1b"
SHA256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


@pytest.mark.parametrize(
    "key",
    [
        "password",
        "Password",
        "db_password",
        "database-password",
        "dbpassword",
        "passwords",
        "passwd",
        "pwd",
        "secret",
        "client_secret",
        "clientSecret",
        "clientSecret2",
        "mysecret",
        "aws_secret_access_key",
        "token",
        "access_token",
        "refreshToken",
        "id_token",
        "oauth_token",
        "authtoken",
        "snowflake_token",
        "bearer",
        "api_key",
        "apikey",
        "X-API-Key",
        "API_KEYS",
        "authorization",
        "Proxy-Authorization",
        "auth",
        "credential",
        "credentials",
        "private_key",
        "privateKey",
        "private_key_passphrase",
        "secret_key",
        "connection_string",
        "connectionString",
        "gcp_key",
        "azure_key",
        "ssh_key",
        "sshkey",
        "passphrase",
        "pem",
        "cert",
        "certificate",
        "encryption_key",
        "decrypt_key",
        "master_key",
        "snowflake_password",
    ],
)
def test_a_secret_is_masked_under_a_key_that_names_it(key: str) -> None:
    assert sanitise({key: "s3cret"}) == {key: REDACTED}
    assert sanitise({"a": [{key: {"deep": "s3cret"}}]}) == {"a": [{key: REDACTED}]}


@pytest.mark.parametrize(
    "key",
    [
        "author",
        "authors",
        "authority",
        "concert",
        "certainty",
        "tokens_used",
        "max_tokens",
        "token_count",
        "token_type",
        "secretary",
        "public_key",
        "primary_key",
        "key",
        "compass",
        "temperature",
        "pwdn",
        "",
        "имя",
    ],
)
def test_a_key_that_only_shares_letters_with_a_secret_is_left_alone(key: str) -> None:
    assert sanitise({key: "value"}) == {key: "value"}


@pytest.mark.parametrize(
    ("value", "is_masked"),
    [
        (f"Bearer {JWT}", True),
        ("bearer abc", True),
        ("Basic dXNlcjpwYXNz", True),
        ("Bearer of good news", False),
        ("basic research shows", False),
        (JWT, True),
        ("eyJ.a.b", False),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE", True),
        ("-----BEGIN PRIVATE KEY-----\nMIIE", True),
        ("-----BEGIN PUBLIC KEY-----\nMIIE", False),
        (RANDOM, True),
        (RANDOM[:39], False),
        (SHA256, False),
        (SHA256.upper(), False),
        (SHA256[:40], False),
        ("/data/exports/2026/quarter1/customers/part00001", False),
        ("c2f1d3a0-5b1e-4b0e-9c60-1f6f2a2d9e11", False),
        ("incomprehensibilitiesincomprehensibilities", False),
    ],
)
def test_a_text_that_is_a_secret_by_itself_is_masked_wherever_it_stands(value: str, is_masked: bool) -> None:
    expected = REDACTED if is_masked else value

    assert sanitise({"note": value, "list": [value]}) == {"note": expected, "list": [expected]}


@pytest.mark.parametrize(
    "key", ["sha256", "checksum", "content_digest", "etag", "row_hash", "checksums", "url"]
)
def test_a_key_that_names_a_digest_keeps_it_in_any_alphabet(key: str) -> None:
    digest = "n4bQgYhMfWWaL+qgxVrQFaO/TxsrC4Is0V1sFbDwCgg="

    assert sanitise({key: digest, "other": digest}) == {key: digest, "other": REDACTED}
    assert sanitise({key: [digest]}) == {key: [digest]}


def test_numbers_and_flags_under_a_weak_word_are_counts() -> None:
    counts = {"token": 17, "auth": True, "cert": None}

    assert sanitise(counts) == counts
    assert sanitise({"password": 1234, "secret": None}) == {"password": REDACTED, "secret": REDACTED}


def test_secrets_are_masked_at_any_depth() -> None:
    levels = DEPTH_MAX - 2
    text = '{"a":' * levels + '{"password": "s3cret"}' + "}" * levels

    row = normalised(payload_json=text)

    assert "s3cret" not in row.result_json
    assert REDACTED in row.result_json


def test_results_and_meta_are_both_sanitised() -> None:
    row = normalised(
        payload_json='{"token": "abc"}', meta_json=json.dumps({"api_key": "abc", "sha256": SHA256})
    )

    assert json.loads(row.result_json)["context"] == {"token": REDACTED}
    assert json.loads(row.meta_json)["api_key"] == REDACTED
    assert json.loads(row.meta_json)["sha256"] == SHA256
