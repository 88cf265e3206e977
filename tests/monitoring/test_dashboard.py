"""The Grafana dashboard and its provisioning, as far as it can be told without Grafana: structure, paths, names."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import PurePosixPath
from typing import Any

import pytest

from tests.monitoring.tools import DASHBOARDS, DEPLOY, PROMETHEUS_CONFIG, PROVISIONING, REPOSITORY, dashboard, read_yaml

COLUMNS = 24
ROWS = (
    "Now",
    "Throughput, and what becomes of it",
    "Versions and staleness",
    "Slots and queues",
    "Engines",
    "Rewards",
    "The service",
)
PANELS = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
each_panel = pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])


def test_the_dashboard_is_of_a_fixed_address_and_shows_the_last_hour_live() -> None:
    board = dashboard()
    assert (board["uid"], board["title"], board["refresh"]) == ("rollouts", "Rollouts", "10s")
    assert board["time"] == {"from": "now-1h", "to": "now"}
    assert board["schemaVersion"] >= 39, "what Grafana 11 writes"
    assert "id" not in board, "Grafana gives it"
    assert tuple(panel["title"] for panel in board["panels"] if panel["type"] == "row") == ROWS


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] >= 0 <= at["y"]
        assert at["w"] > 0 < at["h"]
        assert at["x"] + at["w"] <= COLUMNS, panel["title"]
    for one, other in combinations(panels, 2):
        a, b = one["gridPos"], other["gridPos"]
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, (one["title"], other["title"])


def test_no_line_of_panels_is_left_ragged() -> None:
    lines: dict[int, int] = {}
    for panel in PANELS:
        lines[panel["gridPos"]["y"]] = lines.get(panel["gridPos"]["y"], 0) + panel["gridPos"]["w"]
    assert set(lines.values()) == {COLUMNS}


@each_panel
def test_every_panel_has_a_unit_and_says_what_is_good_and_bad_in_one_sentence(panel: dict[str, Any]) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["description"].endswith(".")
    assert not re.search(r"[.!?] [A-Z]", panel["description"]), "one sentence"
    assert re.search(r"\b(good|bad|Good|Bad)\b|: |;", panel["description"])


@each_panel
def test_every_target_asks_something_of_the_chosen_data_source(panel: dict[str, Any]) -> None:
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert panel["datasource"] == source
    assert panel["targets"]
    names = [target["refId"] for target in panel["targets"]]
    assert len(set(names)) == len(names)
    for target in panel["targets"]:
        assert target["datasource"] == source
        assert target["expr"]
        assert target["legendFormat"] or len(panel["targets"]) == 1, "several series need names"
        for selector in re.findall(r"\brollout_\w+(\{[^}]*\})?", target["expr"]):
            assert 'instance=~"$instance"' in selector, target["expr"]


@each_panel
def test_every_override_names_a_series_of_its_panel(panel: dict[str, Any]) -> None:
    legends = {target["legendFormat"] for target in panel["targets"]}
    for override in panel["fieldConfig"]["overrides"]:
        name = override["matcher"]["options"]
        assert name in legends or any("{{" in legend for legend in legends), name


def test_the_variables_that_expressions_use_are_there_and_no_others() -> None:
    board = dashboard()
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    text = "".join(target["expr"] for panel in PANELS for target in panel["targets"])
    used = set(re.findall(r"\$\{?(\w+)", text)) | {"datasource"}
    assert used - {"__rate_interval"} == set(variables)


def test_grafana_finds_the_dashboard_where_compose_mounts_it() -> None:
    mounts = mounted("grafana")
    assert mounts[PurePosixPath("/etc/grafana/provisioning")] == PROVISIONING
    (provider,) = read_yaml(PROVISIONING / "dashboards" / "rollouts.yml")["providers"]
    assert mounts[PurePosixPath(provider["options"]["path"])] == DASHBOARDS
    assert {path.suffix for path in DASHBOARDS.iterdir()} == {".json"}


def test_grafana_and_prometheus_call_others_by_names_that_compose_gives() -> None:
    services = compose()["services"]
    names = set(services)
    for service in services.values():
        networks = service.get("networks") or {}
        if isinstance(networks, dict):
            names |= {alias for network in networks.values() for alias in (network or {}).get("aliases", ())}
    (source,) = read_yaml(PROVISIONING / "datasources" / "prometheus.yml")["datasources"]
    assert re.fullmatch(r"http://(\w+):9090", source["url"])[1] in names  # type: ignore[index]  # it does match
    config = read_yaml(PROMETHEUS_CONFIG)
    for job in config["scrape_configs"]:
        targets = [target for group in job.get("static_configs", ()) for target in group["targets"]]
        asked = [name for group in job.get("dns_sd_configs", ()) for name in group["names"]]
        assert targets or asked
        assert {target.partition(":")[0] for target in targets} | {name.removesuffix(".") for name in asked} <= names
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]


def test_prometheus_finds_its_configuration_rules_and_key_where_compose_mounts_them() -> None:
    mounts = mounted("prometheus")
    folder = PurePosixPath("/etc/prometheus")
    assert mounts[folder / "prometheus.yml"] == PROMETHEUS_CONFIG
    config = read_yaml(PROMETHEUS_CONFIG)
    for name in config["rule_files"]:
        assert mounts[folder / name] == DEPLOY / name
    (key,) = [job["authorization"]["credentials_file"] for job in config["scrape_configs"] if "authorization" in job]
    assert PurePosixPath(key).parent in mounts


def compose() -> dict[str, Any]:
    return dict(read_yaml(REPOSITORY / "docker-compose.yml"))


def mounted(service: str) -> dict[PurePosixPath, Any]:
    """What stands where in a container: a path of the repository, or a volume's name."""
    mounts: dict[PurePosixPath, Any] = {}
    for volume in compose()["services"][service]["volumes"]:
        source, target = volume.split(":")[:2]
        mounts[PurePosixPath(target)] = REPOSITORY / source if source.startswith(".") else source
    return mounts
