"""The wire contract: services, enums and the columns of an event, as the generated code has them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator

import grpc
import pytest
from externalscaler import externalscaler_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from noetlpb.v1 import (
    event_pb2,
    operations_pb2,
    outbox_pb2,
    projection_pb2,
    replay_pb2,
    state_pb2,
    subscription_pb2,
)

FILES: list[FileDescriptor] = [
    module.DESCRIPTOR
    for module in (
        event_pb2,
        operations_pb2,
        outbox_pb2,
        projection_pb2,
        replay_pb2,
        state_pb2,
        subscription_pb2,
    )
]

RPCS = {
    "SubscriptionService": """RegisterSubscription ActivateSubscription PauseSubscription ResumeSubscription
        DrainSubscription DeactivateSubscription GetSubscription ListSubscriptions ListSubscriptionEvents
        WatchSubscriptions> HeartbeatSubscription""",
    "ReplayService": "ReplayState StreamEvents> GetEvent DiffReplay ExplainReplay",
    "OutboxService": """EnqueueOutbox ClaimOutboxBatch MarkOutboxPublished MarkOutboxFailed
        MarkOutboxFailedBatch ExtendOutboxLease ReleaseOutboxLease CountOutboxPending GetOutboxStats
        <ConsumeOutbox> ListDeadOutboxRows RequeueDeadOutboxRows""",
    "ProjectionService": """ProjectEvents MaterializeEvents AdvanceProjections GetProjection WaitForProjection
        VerifyProjections PurgeStale ListDeadEvents RetryDeadEvents""",
    "OperationsService": "GetServerInfo GetTailerStatus GetServerMetrics ReconcileStream",
}

ENUMS = {
    "SubscriptionState": "REGISTERED ACTIVE PAUSED DRAINING DEACTIVATED",
    "ReplayProjection": "ALL EXECUTION STAGE FRAME COMMAND BUSINESS_OBJECT LOOP",
    "FoldRules": "UNION PYTHON_4_26",
    "ProjectionCheck": "SAME DIFFERENT MISSING STALE",
    "TailerMode": "DISABLED SNAPSHOT OVERLAP",
    "OutboxOutcome": "FAILED DEAD STALE UNKNOWN ALREADY_PUBLISHED",
}

# noetl.event as NoETL 4.26 creates it, in its order; `?` marks nullable columns, `{}` JSON ones.
EVENT_COLUMNS = """
    execution_id catalog_id event_id parent_event_id? parent_execution_id? created_at event_type?
    node_id? node_name? node_type? status? duration? context{}? result{}? meta{}? error?
    current_index? current_item? worker_id? distributed_state? context_key? context_value?
    trace_component{}? stack_trace? tenant_id organization_id stream_id? stream_version?
    aggregate_id? aggregate_type? schema_name? schema_version event_time ingest_time producer?
    causation_id? correlation_id? idempotency_key? payload_ref{}? envelope_checksum? prev_event_id?
    command_id? stage_id? frame_id?
"""

TENANT_REQUESTS = [
    "ReplayState",
    "StreamEvents",
    "GetEvent",
    "DiffReplay",
    "ExplainReplay",
    "GetProjection",
    "WaitForProjection",
    "AdvanceProjections",
    "VerifyProjections",
    "MaterializeEvents",
]


def messages_in(messages: list[Descriptor]) -> Iterator[Descriptor]:
    for message in messages:
        if not message.GetOptions().map_entry:
            yield message
            yield from messages_in(list(message.nested_types))


def all_messages() -> list[Descriptor]:
    return [m for file in FILES for m in messages_in(list(file.message_types_by_name.values()))]


def enums() -> dict[str, EnumDescriptor]:
    return {name: enum for file in FILES for name, enum in file.enum_types_by_name.items()}


def test_services_and_their_rpcs() -> None:
    found = {
        name: [
            f"{'<' if rpc.client_streaming else ''}{rpc.name}{'>' if rpc.server_streaming else ''}"
            for rpc in service.methods
        ]
        for file in FILES
        for name, service in file.services_by_name.items()
    }
    assert found == {name: rpcs.split() for name, rpcs in RPCS.items()}


def test_requests_and_responses_are_named_after_their_rpc() -> None:
    for file in FILES:
        assert file.package == "noetlpb.v1"
        for service in file.services_by_name.values():
            for rpc in service.methods:
                assert rpc.input_type.name == f"{rpc.name}Request"
                assert rpc.output_type.name == f"{rpc.name}Response"


@pytest.mark.parametrize("service", RPCS)
async def test_stubs_and_servicers_import(service: str) -> None:
    stem = service.removesuffix("Service").lower()
    module = importlib.import_module(f"noetlpb.v1.{stem}_pb2_grpc")
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        stub = getattr(module, f"{service}Stub")(channel)
        servicer = getattr(module, f"{service}Servicer")
        for rpc in re.findall(r"\w+", RPCS[service]):
            assert callable(getattr(stub, rpc))
            assert callable(getattr(servicer, rpc))


def test_enums_start_unspecified_and_carry_their_name() -> None:
    for name, enum in enums().items():
        prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()
        wanted = [f"{prefix}_{value}" for value in ["UNSPECIFIED", *ENUMS[name].split()]]
        assert [value.name for value in enum.values] == wanted
        assert [value.number for value in enum.values] == list(range(len(wanted)))
    assert enums().keys() == ENUMS.keys()
    assert not [message.full_name for message in all_messages() if message.enum_types]


def test_an_event_has_one_field_per_column() -> None:
    fields = {field.name: field for field in event_pb2.EventEnvelope.DESCRIPTOR.fields}
    columns = EVENT_COLUMNS.split()
    wanted = [column.replace("{}", "_json").rstrip("?") for column in columns]
    assert list(fields) == [*wanted, "timestamp"]
    for column, name in zip(columns, wanted, strict=True):
        field = fields[name]
        if field.message_type is None:
            assert field.has_presence == column.endswith("?"), name
        else:
            assert field.message_type.full_name == "google.protobuf.Timestamp"
            assert not column.endswith("?")


def test_ids_are_64_bit() -> None:
    """A 32-bit id would cut a snowflake. A loop's id is text: producers choose it."""
    counts_them = operations_pb2.ServerLimits.DESCRIPTOR
    for message in all_messages():
        for field in message.fields:
            if message is not counts_them and re.search(
                r"(execution|event|outbox|subscription|catalog)_ids?$", field.name
            ):
                text = field.name == "loop_event_id"
                wanted = FieldDescriptor.TYPE_STRING if text else FieldDescriptor.TYPE_INT64
                assert field.type == wanted, field.full_name


def test_json_travels_as_text() -> None:
    for message in all_messages():
        for field in message.fields:
            if field.name.endswith("_json") and not field.name.startswith("include_"):
                assert field.type == FieldDescriptor.TYPE_STRING, field.full_name
            assert (
                field.message_type is None or field.message_type.file.name != "google/protobuf/struct.proto"
            )


@pytest.mark.parametrize("rpc", TENANT_REQUESTS)
def test_what_reads_or_writes_events_names_a_tenant(rpc: str) -> None:
    request = next(message for message in all_messages() if message.name == f"{rpc}Request")
    assert {"tenant_id", "organization_id"} <= set(request.fields_by_name)


def test_lists_are_paged() -> None:
    for message in all_messages():
        if message.name.startswith(("List", "VerifyProjections")):
            wanted = {"page_size", "page_token"} if message.name.endswith("Request") else {"next_page_token"}
            assert wanted <= set(message.fields_by_name), message.name


def test_kedas_contract_keeps_kedas_numbers() -> None:
    """KEDA calls us with its own stubs, so every name and number must be KEDA's."""
    file = externalscaler_pb2.DESCRIPTOR
    assert [
        f"{rpc.name} {rpc.input_type.name} {rpc.output_type.name}{'>' if rpc.server_streaming else ''}"
        for rpc in file.services_by_name["ExternalScaler"].methods
    ] == [
        "IsActive ScaledObjectRef IsActiveResponse",
        "StreamIsActive ScaledObjectRef IsActiveResponse>",
        "GetMetricSpec ScaledObjectRef GetMetricSpecResponse",
        "GetMetrics GetMetricsRequest GetMetricsResponse",
        "StreamMetricSpec ScaledObjectRef GetMetricSpecResponse>",
    ]
    assert {
        name: [(field.number, field.name) for field in message.fields]
        for name, message in file.message_types_by_name.items()
    } == {
        "ScaledObjectRef": [(1, "name"), (2, "namespace"), (3, "scalerMetadata")],
        "IsActiveResponse": [(1, "result")],
        "GetMetricSpecResponse": [(1, "metricSpecs")],
        "MetricSpec": [(1, "metricName"), (2, "targetSize"), (3, "targetSizeFloat")],
        "GetMetricsRequest": [(1, "scaledObjectRef"), (2, "metricName")],
        "GetMetricsResponse": [(1, "metricValues")],
        "MetricValue": [(1, "metricName"), (2, "metricValue"), (3, "metricValueFloat")],
    }
