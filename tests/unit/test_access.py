"""Scopes and tenants of tokens."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from noetlpb.v1 import event_pb2, projection_pb2, replay_pb2

from noetl_grpc.core import access
from noetl_grpc.core.access import Caller, Tenant
from noetl_grpc.errors import InvalidRequest, PermissionDenied, SettingsError, Unauthenticated
from noetl_grpc.interceptors.auth import LOOK_SECONDS, TokenChecker
from noetl_grpc.server import SERVICES

ACME = Tenant("acme", "default")
PROJECT = "/noetlpb.v1.ProjectionService/ProjectEvents"
VERIFY = "/noetlpb.v1.ProjectionService/VerifyProjections"
REPLAY = "/noetlpb.v1.ReplayService/ReplayState"


def _methods() -> list[tuple[str, Any]]:
    return [
        (f"/{service.full_name}/{method.name}", method) for service in SERVICES for method in service.methods
    ]


def test_every_method_has_a_scope_that_can_be_granted() -> None:
    assert {access.scope_of(method) for method, _ in _methods()} == access.SCOPES - {"replay:write"}


def test_the_methods_open_to_bound_tokens_are_those_that_name_tenants() -> None:
    def names_tenants(message: Any) -> bool:
        fields = message.fields_by_name
        events = fields.get("events")
        return "tenant_id" in fields or (
            events is not None
            and "tenant_id" in (events.message_type.fields_by_name if events.message_type else ())
        )

    named = {method for method, descriptor in _methods() if names_tenants(descriptor.input_type)}

    assert named == access.TENANT_METHODS


@pytest.mark.parametrize(
    ("method", "scope"),
    [
        (REPLAY, "replay:read"),
        ("/noetlpb.v1.OutboxService/ClaimOutboxBatch", "outbox:write"),
        ("/noetlpb.v1.OutboxService/CountOutboxPending", "outbox:read"),
        ("/externalscaler.ExternalScaler/IsActive", "outbox:read"),
        (VERIFY, "projection:read"),
        ("/noetlpb.v1.SubscriptionService/HeartbeatSubscription", "subscription:write"),
        ("/unknown.Service/Get", ":read"),
    ],
)
def test_scope_follows_service_and_verb(method: str, scope: str) -> None:
    assert access.scope_of(method) == scope


def test_a_missing_scope_is_named() -> None:
    with pytest.raises(PermissionDenied) as raised:
        access.authorise(Caller("reader", scopes=frozenset({"outbox:read"})), REPLAY)

    assert (raised.value.reason, raised.value.metadata["scope"]) == ("SCOPE_MISSING", "replay:read")


def test_a_repair_and_an_enqueue_need_more_than_the_name_tells() -> None:
    reader = Caller("reader", scopes=frozenset({"projection:read", "projection:write"}))
    with pytest.raises(PermissionDenied, match="outbox:write"):
        access.authorise_request(
            reader, PROJECT, projection_pb2.ProjectEventsRequest(enqueue=projection_pb2.EnqueueOptions())
        )
    with pytest.raises(PermissionDenied, match="projection:write"):
        access.authorise_request(
            Caller("reader", scopes=frozenset({"projection:read"})),
            VERIFY,
            projection_pb2.VerifyProjectionsRequest(repair=True),
        )
    access.authorise_request(reader, VERIFY, projection_pb2.VerifyProjectionsRequest(repair=True))


def test_a_bound_token_sees_only_its_tenants() -> None:
    bound = Caller("acme", tenants=frozenset({ACME}))
    own = event_pb2.EventEnvelope(tenant_id="acme")
    foreign = event_pb2.EventEnvelope(tenant_id="other")

    access.authorise_request(bound, REPLAY, replay_pb2.ReplayStateRequest(tenant_id="acme"))
    access.authorise_request(bound, PROJECT, projection_pb2.ProjectEventsRequest(events=[own, own]))
    for method, request in (
        (REPLAY, replay_pb2.ReplayStateRequest()),
        (REPLAY, replay_pb2.ReplayStateRequest(tenant_id="acme", organization_id="another")),
        (PROJECT, projection_pb2.ProjectEventsRequest(events=[own, foreign])),
    ):
        with pytest.raises(PermissionDenied) as raised:
            access.authorise_request(bound, method, request)
        assert raised.value.reason == "TENANT_DENIED"
    with pytest.raises(PermissionDenied):
        access.authorise(bound, "/noetlpb.v1.OutboxService/ClaimOutboxBatch")


def _entry(token: str, **more: Any) -> dict[str, Any]:
    return {
        "name": token,
        "sha256": hashlib.sha256(token.encode()).hexdigest(),
        "scopes": ["outbox:read"],
        **more,
    }


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ([], "tokens"),
        ({"tokens": {}}, "tokens"),
        ({"tokens": ["x"]}, "tokens[0]"),
        ({"tokens": [_entry("a", colour="red")]}, "tokens[0].colour"),
        ({"tokens": [_entry("a") | {"name": ""}]}, "tokens[0].name"),
        ({"tokens": [_entry("a") | {"sha256": "12"}]}, "tokens[0].sha256"),
        ({"tokens": [_entry("a"), _entry("a")]}, "tokens[1].sha256"),
        ({"tokens": [_entry("a") | {"scopes": ["outbox:fly"]}]}, "tokens[0].scopes"),
        ({"tokens": [_entry("a") | {"scopes": "outbox:read"}]}, "tokens[0].scopes"),
        ({"tokens": [_entry("a", tenants=["acme"])]}, "tokens[0].tenants"),
        ({"tokens": [_entry("a", expires_at="2027-01-01T00:00:00")]}, "tokens[0].expires_at"),
        ({"tokens": [_entry("a", expires_at=5)]}, "tokens[0].expires_at"),
    ],
)
def test_a_wrong_tokens_file_is_told_where(document: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        access.parse_tokens(document)

    assert raised.value.violations[0][0] == field


class _Watch:
    def __init__(self) -> None:
        self.seconds = 0.0
        self.now = datetime(2026, 11, 18, tzinfo=UTC)


def _bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def test_the_file_is_read_again_when_it_changes_and_half_an_edit_locks_nobody_out(tmp_path: Path) -> None:
    watch = _Watch()
    file = tmp_path / "tokens.json"
    file.write_bytes(orjson.dumps({"tokens": [_entry("first", expires_at="2026-11-19T00:00:00Z")]}))
    checker = TokenChecker(
        "internal", tokens_file=file, now=lambda: watch.now, monotonic=lambda: watch.seconds
    )

    assert checker.authenticate(_bearer("first")).name == "first"
    assert not checker.authenticate(_bearer("internal")).is_limited

    file.write_text("{")
    watch.seconds += LOOK_SECONDS
    assert checker.authenticate(_bearer("first")).name == "first"

    file.write_bytes(
        orjson.dumps({"tokens": [_entry("first", expires_at="2026-11-19T00:00:00Z"), _entry("second")]})
    )
    watch.seconds += LOOK_SECONDS
    assert checker.authenticate(_bearer("second")).name == "second"

    watch.now += timedelta(days=2)
    with pytest.raises(Unauthenticated):
        checker.authenticate(_bearer("first"))


def test_a_tokens_file_that_is_wrong_at_the_start_stops_the_process(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text("[]")

    with pytest.raises(SettingsError, match="NOETL_API_TOKENS_FILE"):
        TokenChecker("", tokens_file=tmp_path / "tokens.json")
