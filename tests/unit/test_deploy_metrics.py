"""What the dashboard and the alerts speak of exists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from noetl_grpc.interceptors.access import Observers
from noetl_grpc.metrics import Metrics
from noetl_grpc.server import _methods

ROOT = Path(__file__).parents[2]
RULES = yaml.safe_load((ROOT / "deploy/alerts.yaml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())

#: Added by Prometheus when it scrapes, or by its functions.
FOREIGN_LABELS = {"job", "instance"}

_SERIES = re.compile(r"\b((?:noetl|grpc_server)_[a-z_]+)\b\s*(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'([a-z_]+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\bby \(([^)]*)\)")
_LEGEND = re.compile(r"\{\{\s*(?:\$labels\.)?([a-z_]+)\s*\}\}")


def _panel_expressions() -> Iterator[Any]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield pytest.param(target["expr"], target["legendFormat"], id=panel["title"])


def _rule_expressions() -> Iterator[Any]:
    for rule in RULES:
        yield pytest.param(rule["expr"], rule["annotations"]["summary"], id=rule["alert"])


@pytest.fixture(scope="module")
def series() -> dict[str, dict[str, set[str]]]:
    """The values of each label of each series of a server that has just started."""
    metrics = Metrics(shards=2)
    Observers(metrics, _methods())
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


@pytest.mark.parametrize(("expression", "text"), [*_panel_expressions(), *_rule_expressions()])
def test_every_series_and_label_exists(
    series: dict[str, dict[str, set[str]]], expression: str, text: str
) -> None:
    used = _SERIES.findall(expression)
    assert used

    known: set[str] = set(FOREIGN_LABELS)
    for name, matchers in used:
        assert name in series
        known |= set(series[name])
        for label, operator, value in _MATCHER.findall(matchers):
            if label in FOREIGN_LABELS:
                continue
            values = series[name][label]
            for wanted in value.split("|"):
                assert wanted in values, f"{name}{{{label}{operator}{value!r}}}"
    for labels in _GROUPING.findall(expression):
        assert {label.strip() for label in labels.split(",")} <= known
    assert set(_LEGEND.findall(text)) <= known


@pytest.mark.parametrize(
    "expression", [param.values[0] for param in (*_panel_expressions(), *_rule_expressions())]
)
def test_brackets_are_closed(expression: str) -> None:
    open_brackets = []
    for character in re.sub(r'"[^"]*"', "", expression):
        if character in "([{":
            open_brackets.append(character)
        elif character in ")]}":
            assert open_brackets.pop() + character in ("()", "[]", "{}")

    assert not open_brackets


def test_every_series_of_ours_is_on_the_dashboard(series: dict[str, dict[str, set[str]]]) -> None:
    shown = " ".join(target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ()))

    missing = [name for name in series if name.startswith("noetl_") and not name.endswith("_created")]
    assert [name for name in missing if name not in shown] == []


def test_every_alert_is_explained() -> None:
    guide = (ROOT / "docs/operations.md").read_text()

    assert [rule["alert"] for rule in RULES if f"`{rule['alert']}`" not in guide] == []
    assert all(rule["labels"]["severity"] in ("warning", "critical") for rule in RULES)
