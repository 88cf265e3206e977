"""A compose project of its own for a test, and how a test speaks to it.

What always holds: the compose file, its images' settings and `.env.example` are taken as they stand, but for free
ports, the variables a test gives and, by tests/compose/override.yml, vLLM's image; keys go by standard input, so that
no process list shows them; what was started is down, its volumes too, after `down`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.engine import environment
from examples.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
FILES = ("docker-compose.yml", "tests/compose/override.yml")
TAG = "compose-test"
START_WITHIN_S = 420
ROLE_KEYS = ("admin", "trainer", "submit", "read")


class Failed(Exception):
    """A step did not come out as it should."""


def why_impossible() -> str:
    """Empty where Docker and Compose v2 answer, else the reason in one line."""
    if shutil.which("docker") is None:
        return "there is no docker command on this machine"
    if shutil.which("curl") is None:
        return "there is no curl command on this machine"
    engine = subprocess.run(["docker", "info", "-f", "{{.ServerVersion}}"], capture_output=True, text=True)
    if engine.returncode or not engine.stdout.strip():  # some answer 0 and nothing
        return f"no Docker engine answers: {' '.join(engine.stderr.split())}"
    compose = subprocess.run(["docker", "compose", "version", "--short"], capture_output=True, text=True)
    version = compose.stdout.strip().removeprefix("v")
    if compose.returncode or tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < (2, 20):
        return f"Compose 2.20 or newer is needed, this is {version or 'none'}"
    step(f"Docker engine {engine.stdout.strip()}, Compose {version}")
    return environment.why_impossible()


def step(text: str) -> None:
    print(f"  {text}", flush=True)


def need(condition: object, text: str) -> None:
    """Raises Failed with `text` unless `condition` holds."""
    if not condition:
        raise Failed(text)


class Stack:
    """The compose project of a test."""

    def __init__(self, folder: Path, *, name: str, door: str, variables: Mapping[str, str]) -> None:
        """`door`: the variable with the port that callers use; `variables`: others than `.env.example` has."""
        self.folder, self.name = folder, name
        self.env_file = folder / "env"
        self._variables = variables
        names = ("SERVICE_PORT", "REPLICAS_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")
        self.ports = {name: free_port() for name in names}
        self.url = f"http://127.0.0.1:{self.ports[door]}"
        self.prometheus = f"http://127.0.0.1:{self.ports['PROMETHEUS_PORT']}"
        self.keys: dict[str, str] = {}
        self._environ: dict[str, str] = {}

    def prepare(self) -> None:
        """The engine's environment, its model and the env file."""
        engine = environment.make()
        model = self.folder / "model"
        run(sys.executable, "-m", "examples.engine.make_tiny_model", str(model))
        # Made in a folder that is its owner's alone; in the container somebody else may read it.
        self.folder.chmod(0o755)
        example = (ROOT / ".env.example").read_text()
        changed = {
            "SERVICE_TAG": TAG,
            "PROMETHEUS_TAG": os.environ.get("PROMETHEUS_TAG", "latest"),
            "ENGINE_PYTHON": str(engine),
            "ENGINE_ENVIRONMENT": str(engine.parents[1]),
            "ENGINE_BASE_PYTHON": str(engine.resolve().parents[1]),
            "ENGINE_MODEL": str(model),
            **{name: str(port) for name, port in self.ports.items()},
            **self._variables,
        }
        # A later line of the same name wins.
        self.env_file.write_text(example + "\n" + "".join(f"{name}={value}\n" for name, value in changed.items()))
        names = {line.partition("=")[0] for line in self.env_file.read_text().splitlines()}
        # The shell's own variables would win over the file.
        self._environ = {name: value for name, value in os.environ.items() if name not in names}

    def compose(self, *arguments: str, check: bool = True, timeout: float = 600) -> str:
        """Output of `docker compose …` on this project. Raises Failed where it fails and `check` is set."""
        files = [part for name in FILES for part in ("-f", str(ROOT / name))]
        command = ["docker", "compose", "--ansi", "never", "-p", self.name, "--project-directory", str(ROOT), *files]
        command += ["--env-file", str(self.env_file), *arguments]
        return run(*command, check=check, timeout=timeout, env=self._environ)

    def container(self, service: str) -> dict[str, Any]:
        """`docker inspect` of a service's container."""
        number = self.compose("ps", "--all", "--quiet", service).split()[0]
        found: dict[str, Any] = json.loads(run("docker", "inspect", number))[0]
        return found

    def execute(self, service: str, *command: str, check: bool = True) -> str:
        return self.compose("exec", "-T", service, *command, check=check)

    def read_keys(self, service: str) -> None:
        """The key of every role, read in a container of `service`."""
        for role in ROLE_KEYS:
            self.keys[role] = self.execute(service, "cat", f"/keys/{role}.key").strip()

    def down(self) -> None:
        """Containers, networks and volumes go; says so if any stayed."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "10", check=False)
        label = f"label=com.docker.compose.project={self.name}"
        left = run("docker", "ps", "-aq", "--filter", label) + run("docker", "volume", "ls", "-q", "--filter", label)
        step("down: no container and no volume is left" if not left.strip() else f"LEFT BEHIND: {left.split()}")


def run(*command: str, check: bool = True, timeout: float = 600, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, cwd=ROOT)
    if check and done.returncode:
        raise Failed(
            f"{' '.join(command[:2])} … {' '.join(command[-3:])} exited {done.returncode}: {done.stderr[-2000:]}"
        )
    return done.stdout if done.returncode == 0 else done.stdout + done.stderr


def curl(url: str, *, key: str = "", body: object = None, method: str = "") -> tuple[int, str]:
    """Status and body of one call with curl. The key goes by standard input, so that no process list shows it."""
    command = ["curl", "-sS", "--max-time", "90", "-w", "\n%{http_code}", "--config", "-", url]
    if method:
        command += ["-X", method]
    if body is not None:
        command += ["-d", json.dumps(body)]
    config = f'header = "Authorization: Bearer {key}"\n' if key else ""
    done = subprocess.run(command, input=config, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"curl {url}: {done.stderr.strip()}")
    text, _, status = done.stdout.rpartition("\n")
    return int(status), text


def answer(url: str, *, key: str = "", body: object = None, method: str = "", status: int = 200) -> Any:
    """The JSON of a call that has to answer `status`."""
    got, text = curl(url, key=key, body=body, method=method)
    need(
        got == status,
        f"{method} {url}: {got}, wanted {status}: {text[:500]}",
    )
    return json.loads(text)


def until(condition: Callable[[], Any], what: str, within_s: float = 60) -> Any:
    """The first true value of `condition()`."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        need(time.monotonic() < deadline, f"not within {within_s:.0f} s: {what}")
        time.sleep(0.25)
    return value


@contextmanager
def timed() -> Iterator[Callable[[], float]]:
    started = time.monotonic()
    yield lambda: time.monotonic() - started


def ready(stack: Stack) -> bool:
    try:
        return curl(f"{stack.url}/readyz")[0] == 200
    except Failed:
        return False  # not listening yet
