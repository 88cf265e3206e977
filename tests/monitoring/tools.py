"""Prometheus' own programs, and the files of `deploy/` that they and Grafana read.

What always holds: a Prometheus that a test starts listens on 127.0.0.1 alone and has ended when its context has; its
configuration is the deployed one with other addresses, paths and intervals.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.service import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
ALERTS = DEPLOY / "alerts.yml"
ALERT_TESTS = Path(__file__).with_name("alerts_test.yml")
PROMETHEUS_CONFIG = DEPLOY / "prometheus.yml"
DASHBOARDS = DEPLOY / "grafana" / "dashboards"
PROVISIONING = DEPLOY / "grafana" / "provisioning"
JOB = "rollout-service"
START_S = 30.0


def program(name: str) -> str:
    """Its path. Skips the test where it is missing, unless REQUIRE_TOOLS=1: then it fails."""
    found = shutil.which(name)
    if found is None:
        reason = f"{name} is not installed (Debian: apt install prometheus; .ci/run installs it and runs this)"
        if os.environ.get("REQUIRE_TOOLS") == "1":
            pytest.fail(f"REQUIRE_TOOLS=1, but {reason}")
        pytest.skip(reason)
    return found


def promtool(*arguments: str | Path) -> None:
    """Run it; what it says is the failure."""
    command = [program("promtool"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@cache
def read_yaml(path: Path) -> Any:
    """Nobody changes what it returns."""
    return yaml.safe_load(path.read_text())


def rules() -> list[dict[str, Any]]:
    return [rule for group in read_yaml(ALERTS)["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def dashboard() -> dict[str, Any]:
    return dict(json.loads((DASHBOARDS / "rollouts.json").read_text()))


def deployed_config(directory: Path, key: Path, **changes: Any) -> Path:
    """`deploy/prometheus.yml` and its rules in `directory`, with `key` for the key it names; `changes` of jobs by name:
    their one target, or None for no such job. It scrapes every 0.2 s and evaluates the rules every second."""
    config = deepcopy(read_yaml(PROMETHEUS_CONFIG))
    config["global"] |= {"scrape_interval": "200ms", "evaluation_interval": "1s"}
    jobs = []
    for job in config["scrape_configs"]:
        if "authorization" in job:
            job["authorization"]["credentials_file"] = str(key)
        if job["job_name"] in changes:
            target = changes[job["job_name"]]
            if target is None:
                continue
            job.pop("dns_sd_configs", None)
            job["static_configs"] = [{"targets": [target]}]
        jobs.append(job)
    config["scrape_configs"] = jobs
    for name in config["rule_files"]:
        shutil.copy(DEPLOY / name, directory / name)
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


class Prometheus:
    """The HTTP API of a running one."""

    def __init__(self, port: int) -> None:
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False)

    def ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str, **parameters: Any) -> Any:
        """The `data` of an answer; asserts that it is one."""
        answer = self._http.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        return answer["data"]

    def query(self, expression: str, at: float | None = None) -> list[tuple[dict[str, str], float]]:
        """Labels and value of every series of the result."""
        found = self.get("query", query=expression, **({} if at is None else {"time": at}))
        assert found["resultType"] == "vector", expression
        return [(series["metric"], float(series["value"][1])) for series in found["result"]]

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]

    def close(self) -> None:
        self._http.close()


@contextmanager
def running_prometheus(config: Path) -> Iterator[Prometheus]:
    """A real one; its data and its log stand beside `config`."""
    port, log = free_port(), config.with_name("prometheus.log")
    command = [
        program("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={config.with_name('data')}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        api = Prometheus(port)
        try:
            deadline = time.monotonic() + START_S
            while not api.ready():
                assert process.poll() is None, log.read_text(errors="replace")[-3000:]
                assert time.monotonic() < deadline, "Prometheus is not ready"
                time.sleep(0.02)  # between two looks
            yield api
        finally:
            api.close()
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
