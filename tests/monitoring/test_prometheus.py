"""What a real Prometheus knows of a run of the real service, and what alerts and dashboard ask of it."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from tests.monitoring.expressions import OF_THE_TARGET, exposed, labels_named, uses
from tests.monitoring.observed import FAILED, Observed
from tests.monitoring.tools import JOB, REPOSITORY, alerts, dashboard, rules

ALWAYS_THERE = {
    "up": OF_THE_TARGET,
    "ALERTS": OF_THE_TARGET | {"alertname", "alertstate", "severity", "lease", "engine"},
}
RECORDED = {rule["record"]: OF_THE_TARGET for rule in rules() if "record" in rule}
RANGE = "1m"
"""All of the run, and more than the four scrapes that a rate wants."""


def expressions() -> list[tuple[str, str]]:
    """Panel and expression, as Grafana would send it."""
    return [
        (f"{panel['title']} {target['refId']}", sent(target["expr"]))
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    ]


def sent(text: str) -> str:
    return text.replace("$__rate_interval", RANGE).replace("$instance", ".*")


def test_prometheus_answers_what_the_service_counted(observed: Observed) -> None:
    ask = observed.prometheus
    assert ask.query("sum(rollout_failed_total)", observed.at) == [({}, FAILED)]
    ((labels, count),) = ask.query('rollout_failed_total{reason="rejected"}', observed.at)
    assert (labels["job"], count) == (JOB, FAILED)
    for name in ("dropped_groups_total", "stale_groups_total", "acked_groups_total", "policy_version"):
        ((_, value),) = ask.query(f"sum(rollout_{name})", observed.at)
        assert value == {"dropped_groups_total": 2, "stale_groups_total": 2, "acked_groups_total": 4}.get(name, 1)


def test_prometheus_scrapes_with_its_key_a_service_that_refuses_others(observed: Observed) -> None:
    assert observed.without_key == 401
    ((labels, up),) = observed.prometheus.query("up", observed.at)
    assert (labels["job"], up) == (JOB, 1)


def test_every_rule_was_evaluated_without_an_error_and_none_fires(observed: Observed) -> None:
    assert len(observed.prometheus.rules()) == len(rules())
    for rule in observed.prometheus.rules():
        assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule["name"]
        assert rule.get("state", "inactive") != "firing", rule["name"]


@pytest.mark.parametrize(("panel", "expression"), expressions(), ids=[panel for panel, _ in expressions()])
def test_every_expression_of_the_dashboard_finds_numbers(observed: Observed, panel: str, expression: str) -> None:
    found = [value for _, value in observed.prometheus.query(expression, observed.at)]
    assert any(math.isfinite(value) for value in found), f"{panel}: {expression}: {found}"


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: f"{alert['alert']}{alert['labels'].get('lease', '')}")
def test_every_metric_label_and_value_of_an_alert_exists(observed: Observed, alert: dict[str, Any]) -> None:
    names = RECORDED | ALWAYS_THERE
    expression = alert["expr"]
    problems = list(exposed(observed.page).problems(expression, also=names))
    for query in re.findall(r'printf "(.*?)" ', alert["annotations"]["description"]):
        problems += exposed(observed.page).problems(query, also=names)
    assert not problems
    result = labels_named(expression) | {label for used in uses(expression) for label in labels_of(observed, used.name)}
    for text in alert["annotations"].values():
        shown = set(re.findall(r"\$labels\.(\w+)", text))
        assert shown <= result | OF_THE_TARGET, alert["alert"]


def test_every_metric_label_and_value_of_the_recording_rules_exists(observed: Observed) -> None:
    for rule in rules():
        if "record" in rule:
            assert not list(exposed(observed.page).problems(rule["expr"], also=RECORDED))


def test_every_metric_label_and_value_of_the_dashboard_exists(observed: Observed) -> None:
    board = dashboard()
    texts = [variable.get("definition", "") for variable in board["templating"]["list"]]
    texts += [
        " ".join((mark["expr"], mark["titleFormat"], mark["textFormat"])) for mark in board["annotations"]["list"]
    ]
    for panel in board["panels"]:
        texts += [f"{target['expr']} {target['legendFormat']}" for target in panel.get("targets", ())]
    here = exposed(observed.page)
    assert not [problem for text in texts for problem in here.problems(sent(text), also=ALWAYS_THERE)]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("sum(rollout_failures_total)", "no metric rollout_failures_total"),
        ('rate(rollout_failed_total{cause="timeout"}[1m])', "rollout_failed_total has no label cause"),
        ('rollout_failed_total{reason=~"timeout|tired"}', 'rollout_failed_total has no reason="tired"'),
        ("sum by (reason, engine) (rollout_failed_total)", "nothing in it has a label engine"),
        ("sum by (reason) (rollout_failed_total) {{kind}}", "nothing in it has a label kind"),
    ],
)
def test_a_wrong_metric_label_or_value_is_found(observed: Observed, wrong: str, problem: str) -> None:
    (found,) = exposed(observed.page).problems(wrong)
    assert found.startswith(problem)


def test_every_metric_and_label_in_the_readmes_tables_exists(observed: Observed) -> None:
    section = (REPOSITORY / "README.md").read_text().partition("\n## Metrics\n")[2].partition("\n## ")[0]
    here = exposed(observed.page).series
    documented = re.findall(r"`(rollout_\w+)(?:\{([\w,]+)\})?`", section)
    assert len(documented) > 10
    for name, labels in documented:
        found = here.get(name, here.get(f"{name}_bucket"))
        assert found is not None, name
        assert set(filter(None, labels.split(","))) <= set(found), name


def labels_of(observed: Observed, name: str) -> set[str]:
    return set(exposed(observed.page).series.get(name, ()))
