"""The manifests, checked without a cluster: Kubernetes' own schemas, and that names and ports fit together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from noetl_grpc.core.scaling import parse_trigger
from noetl_grpc.server import OPS_SERVICES, SERVICE_NAMES
from noetl_grpc.settings import EventStreamSettings, Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
KUSTOMIZATION = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())
#: Kinds of operators: Kubernetes has no schema for them.
CUSTOM = {"ServiceMonitor", "ScaledObject"}


def _resources() -> Iterator[dict[str, Any]]:
    for name in KUSTOMIZATION["resources"]:
        yield from yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())


RESOURCES = {f"{one['kind']}/{one['metadata']['name']}": one for one in _resources()}
POD = RESOURCES["Deployment/noetl-grpc"]["spec"]["template"]["spec"]
SERVER = POD["containers"][0]
WORKLOADS = [one for one in RESOURCES.values() if one["kind"] == "Deployment"]


def test_every_file_is_used_and_every_kind_is_there() -> None:
    files = {path.name for path in (DEPLOY / "kubernetes").iterdir()}

    assert files == {*KUSTOMIZATION["resources"], "kustomization.yaml"}
    assert {one["kind"] for one in RESOURCES.values()} == {
        *("Deployment", "Service", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy"),
        *CUSTOM,
    }


@pytest.mark.parametrize("name", [name for name in RESOURCES if name.partition("/")[0] not in CUSTOM])
@pytest.mark.parametrize("version", ["1.27", kubernetes_validate.latest_version()])
def test_kubernetes_takes_it(name: str, version: str) -> None:
    kubernetes_validate.validate(RESOURCES[name], version, strict=True)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: str(one["metadata"]["name"]))
def test_a_workload_is_restricted(workload: dict[str, Any]) -> None:
    pod = workload["spec"]["template"]["spec"]
    (container,) = pod["containers"]

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    selected = workload["spec"]["selector"]["matchLabels"]
    assert selected.items() <= workload["spec"]["template"]["metadata"]["labels"].items()


def test_probes_ask_what_the_operations_listener_answers() -> None:
    ports = {port["name"]: port["containerPort"] for port in SERVER["ports"]}
    probes = {name: SERVER[name]["grpc"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}

    assert "grpc.health.v1.Health" in OPS_SERVICES
    assert {probe["port"] for probe in probes.values()} == {ports["ops"]}
    assert probes["readinessProbe"]["service"] in SERVICE_NAMES
    # The process alone: a database outage must not restart it.
    assert "service" not in probes["livenessProbe"]
    assert {one["name"]: one.get("value") for one in SERVER["env"]}["NOETL_OPS_ADDR"].endswith(
        f":{ports['ops']}"
    )


def test_the_pod_outlives_its_drain_and_grace() -> None:
    assert POD["terminationGracePeriodSeconds"] > Settings().drain_seconds + Settings().grace_seconds


def test_environment_names_exist() -> None:
    known = {
        item.metadata["env"]
        for settings in (Settings, EventStreamSettings)
        for item in fields(settings)
        if "env" in item.metadata
    } | {"NOETL_GRPC_ADDRESS"}
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]

    for workload in WORKLOADS:
        assert {one["name"] for one in workload["spec"]["template"]["spec"]["containers"][0]["env"]} <= known
    for service in ("migrate", "server"):
        assert set(compose[service]["environment"]) <= known


def test_settings_of_the_compose_file_can_be_used() -> None:
    environment = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server"]["environment"]

    settings = Settings.from_env(environment)

    assert settings.shards
    assert settings.event_stream.enabled


def test_services_and_policies_meet_the_pods() -> None:
    ports = {port["name"] for port in SERVER["ports"]}
    labels = RESOURCES["Deployment/noetl-grpc"]["spec"]["template"]["metadata"]["labels"]
    selectors = [one["spec"]["selector"] for one in RESOURCES.values() if one["kind"] == "Service"]
    selectors.append(RESOURCES["PodDisruptionBudget/noetl-grpc"]["spec"]["selector"]["matchLabels"])
    policy = RESOURCES["NetworkPolicy/noetl-grpc"]["spec"]
    selectors.append(policy["podSelector"]["matchLabels"])

    assert all(selector == labels for selector in selectors)
    for service in (one for one in RESOURCES.values() if one["kind"] == "Service"):
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == ports


def test_the_monitor_finds_the_metrics() -> None:
    monitor = RESOURCES["ServiceMonitor/noetl-grpc"]["spec"]
    ops = RESOURCES["Service/noetl-grpc-ops"]
    added = KUSTOMIZATION["labels"][0]["pairs"]

    assert monitor["selector"]["matchLabels"].items() <= {**ops["metadata"]["labels"], **added}.items()
    assert {one["port"] for one in monitor["endpoints"]} <= {port["name"] for port in ops["spec"]["ports"]}


def test_keda_finds_the_scaler_and_scales_what_is_there() -> None:
    scaled = RESOURCES["ScaledObject/noetl-outbox-publisher"]["spec"]
    (trigger,) = scaled["triggers"]
    host, _, port = trigger["metadata"]["scalerAddress"].partition(":")
    service, _, namespace = host.partition(".")

    assert f"Deployment/{scaled['scaleTargetRef']['name']}" in RESOURCES
    assert namespace == KUSTOMIZATION["namespace"]
    assert int(port) in {one["port"] for one in RESOURCES[f"Service/{service}"]["spec"]["ports"]}
    assert parse_trigger(trigger["metadata"]).target == 100
    # What it scales has no number of replicas of its own: applying it again would undo KEDA's.
    assert "replicas" not in RESOURCES["Deployment/noetl-outbox-publisher"]["spec"]
