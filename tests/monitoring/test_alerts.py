"""The alert rules: valid, and each seen firing and silent by Prometheus' own test runner."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.monitoring.tools import ALERT_TESTS, ALERTS, alerts, deployed_config, promtool, read_yaml

NAMES = sorted({alert["alert"] for alert in alerts()})
INSTANCE = re.compile(r'instance="([^"]+)"')


def test_prometheus_accepts_the_configuration_and_the_rules_it_names(tmp_path: Path) -> None:
    key = tmp_path / "read.key"
    key.touch()
    promtool("check", "config", deployed_config(tmp_path, key))
    promtool("check", "rules", "--lint=all", "--lint-fatal", ALERTS)


def test_every_alert_fires_and_is_silent_as_its_cases_say() -> None:
    promtool("test", "rules", ALERT_TESTS)


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: f"{alert['alert']}{alert['labels'].get('lease', '')}")
def test_every_alert_has_a_case_in_which_it_fires_with_its_whole_text(alert: dict[str, Any]) -> None:
    texts = [
        expected["exp_annotations"]
        for case in cases(alert["alert"])
        for test in case["alert_rule_test"]
        for expected in test["exp_alerts"]
        if alert["labels"].items() <= expected["exp_labels"].items()
    ]
    assert texts
    assert all(set(text) == {"summary", "description"} for text in texts)


@pytest.mark.parametrize("name", NAMES)
def test_every_alert_has_a_situation_in_which_it_is_silent_beside_one_in_which_it_fires(name: str) -> None:
    silent = set()
    for case in cases(name):
        here = {m[1] for series in case["input_series"] if (m := INSTANCE.search(series["series"]))}
        for fires in firing(case):
            silent |= here - fires if fires else set()
    assert silent


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: f"{alert['alert']}{alert['labels'].get('lease', '')}")
def test_every_alert_says_how_bad_it_is_since_when_and_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert re.fullmatch(r"\d+[smh]", alert["for"])
    summary, description = alert["annotations"]["summary"], alert["annotations"]["description"]
    assert set(alert["annotations"]) == {"summary", "description"}
    assert "$labels.instance" in description
    for text in (summary, description):
        assert text.endswith(".")
    assert len(summary) < 250
    assert "summary" not in description
    assert not re.match(r"(The|A|An|No|There) ", summary), "a summary begins with what to do"


def test_no_ratio_divides_by_a_number_that_may_be_zero() -> None:
    for alert in alerts():
        expression = " ".join(alert["expr"].split())
        for divisor in re.findall(r"/ (.{0,60})", expression):
            assert re.match(r"(on \(job, instance\) group_left \(\) )?clamp_min\( ?", divisor), divisor


def cases(name: str) -> list[dict[str, Any]]:
    """The test groups of one alert."""
    return [case for case in read_yaml(ALERT_TESTS)["tests"] if case["name"].partition(":")[0] == name]


def firing(case: dict[str, Any]) -> list[set[str]]:
    """The instances that fire, at each moment that is looked at."""
    moments = [{e["exp_labels"].get("instance", "") for e in t["exp_alerts"]} for t in case["alert_rule_test"]]
    for test in case.get("promql_expr_test", ()):
        moments.append({m[1] for sample in test["exp_samples"] if (m := INSTANCE.search(sample["labels"]))})
    return moments
