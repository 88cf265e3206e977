"""docs/operations.md speaks of what is there: alerts, variables, files, routes, settings and log events."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from rollout_service.api.access import ACCESS
from rollout_service.settings import Settings
from rollout_service.settings.problems import table_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
TABLES = {name: table_of(field.annotation) for name, field in Settings.model_fields.items()}


def test_it_has_a_paragraph_for_each_alert_and_for_no_other() -> None:
    groups = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"]
    alerts = [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]
    assert re.findall(r"^### (\w+)$", PAGE, re.MULTILINE) == list(dict.fromkeys(alerts))


def test_routes_it_names_exist() -> None:
    named = set(re.findall(r"\b((?:GET|POST|DELETE) /[a-z_/{}]*)", PAGE))
    assert named
    assert named <= ACCESS.keys()
    called = set(re.findall(r"localhost:8080(/[a-z_]+)", PAGE))
    assert called <= {route.partition(" ")[2] for route in ACCESS}


def test_settings_it_names_exist() -> None:
    named = set(re.findall(rf"`({'|'.join(TABLES)})\.(\w+)", PAGE))
    assert len(named) > 5
    for table, field in named - {("store", "toml")}:
        fields = TABLES[table]
        assert fields is not None
        assert field in fields.model_fields, f"{table}.{field}"


def test_files_and_variables_it_names_exist() -> None:
    for path in set(re.findall(r"\b(?:deploy|docs|examples)/[\w./-]*\w", PAGE)):
        assert (ROOT / path).exists(), path
    example = (ROOT / ".env.example").read_text()
    for name in set(re.findall(r"`([A-Z]+_[A-Z_]+)`", PAGE)) - {"HEALTHCHECK"}:
        assert re.search(rf"^{name}=", example, re.MULTILINE), name


def test_log_events_it_names_are_logged() -> None:
    section = PAGE.partition("| event | says |")[2].partition("\n\n")[0]
    events = {name for row in section.splitlines() for name in re.findall(r"`(\w+)`", row.partition(" | ")[0])}
    source = "\n".join(path.read_text() for path in (ROOT / "rollout_service").rglob("*.py"))
    assert len(events) > 10
    assert [name for name in sorted(events) if f'"{name}"' not in source] == []


@pytest.mark.parametrize("service", ["rollout-service", "keys", "prometheus", "vllm"])
def test_services_it_names_are_of_the_compose_file(service: str) -> None:
    assert service in yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert re.search(rf"docker compose [^\n]*\b{service}\b", PAGE)
