"""Real processes: a vLLM server on CPU cores, and `rollout-service serve` on a configuration of the test's own.

A test that needs vLLM carries `pytestmark = pytest.mark.vllm`. Where the engine's environment is missing it is skipped
with the reason, unless REQUIRE_VLLM=1 (`make test` sets it once the environment is there): then it fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.engine import environment
from examples.engine.make_tiny_model import make_tiny_model
from examples.engine.server import MODEL_NAME, VllmServer
from examples.processes import Process, free_port
from trainer_client import RolloutClient

REPOSITORY = Path(__file__).resolve().parents[2]
POSITIONS = 65536  # 4,096 tokens are over in seconds: too short to see an abort
READY_S = 60.0
REWARD = """
def spread(completion_ids, **columns):
    return [sum(ids) % 97 / 97 for ids in completion_ids]
"""


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """The python of the engine's environment."""
    python = environment.find()
    if python is None:
        reason = environment.why_impossible() or "the engine's environment is not there; `make engine` makes it"
        if os.environ.get("REQUIRE_VLLM") == "1":
            pytest.fail(f"REQUIRE_VLLM=1, but {reason}")
        pytest.skip(reason)
    return python


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those on the server they share come last, together: it runs beside no other one, and starts once."""
    items.sort(key=lambda item: "vllm_server" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="package")
def vllm_server(engine_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A warm vLLM server with the tiny model, for tests that do not change its weights."""
    folder = tmp_path_factory.mktemp("vllm")
    model = make_tiny_model(folder / "model", max_length=POSITIONS, endless=True)
    with VllmServer(engine_python, model, folder / "engine.log", max_model_len=POSITIONS) as server:
        server.ready()
        yield server


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """A running service; `client` speaks to it."""

    url: str
    process: Process
    client: RolloutClient


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts services: `service(engine_url, groups={"max_staleness": 1}, …)`; tables are merged over the defaults.

    `files` (name -> text) stand beside its configuration.
    """
    with contextlib.ExitStack() as started:

        def start(
            *engine_urls: str, model: str = MODEL_NAME, files: Mapping[str, str] | None = None, **tables: dict[str, Any]
        ) -> Service:
            port = free_port()
            folder = tmp_path / f"service-{port}"
            folder.mkdir()
            (folder / "rollout.toml").write_text(configuration(engine_urls, tables, model))
            for name, text in {"e2e_rewards.py": REWARD, **(files or {})}.items():
                (folder / name).write_text(text)
            command = [sys.executable, "-m", "rollout_service", "serve", "--config", "rollout.toml"]
            environ = {"PYTHONPATH": str(REPOSITORY)}
            process = Process(
                "service", [*command, "--port", str(port)], folder / "service.log", env=environ, cwd=folder
            )
            started.enter_context(process)
            started.callback(lambda: print(f"--- end of service.log\n{process.tail()}"))
            url = f"http://127.0.0.1:{port}"
            process.wait_ready(f"{url}/readyz", READY_S)
            return Service(url=url, process=process, client=started.enter_context(RolloutClient(url)))

        yield start


def configuration(engine_urls: tuple[str, ...], tables: dict[str, dict[str, Any]], model: str) -> str:
    """The TOML of a service for these engines; JSON strings, numbers and booleans are TOML's too."""
    settings: dict[str, dict[str, Any]] = {
        "groups": {"num_generations": 4},
        "dispatch": {"max_inflight_rollouts": 64},
        "sampling": {"max_tokens": 32},
        "store": {"url": "sqlite:///rollout.db"},
    }
    for name, table in tables.items():
        settings[name] = settings.get(name, {}) | table
    lines = [f"model = {json.dumps(model)}"]
    for url in engine_urls:
        lines += ["[[engines]]", f"url = {json.dumps(url)}"]
    lines += ["[[rewards]]", 'name = "spread"', 'function = "e2e_rewards:spread"']
    for name, table in settings.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def wait_until(condition: Callable[[], bool], within_s: float, what: Callable[[], object]) -> None:
    """Poll until `condition()` holds; AssertionError with `what()` if it does not within `within_s`."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what()}"
        time.sleep(0.02)
