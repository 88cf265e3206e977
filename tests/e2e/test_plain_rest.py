"""The example in curl and jq, under a bash that has nothing else: its dialogue, its exit status, its README."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from examples.processes import Process, free_port
from tests.api.openapi_snapshot import agreed
from tests.e2e.conftest import READY_S, REPOSITORY, wait_until
from trainer_client import RolloutClient

EXAMPLE = REPOSITORY / "examples" / "plain_rest"
MISSING = [tool for tool in ("bash", "curl", "jq") if shutil.which(tool) is None]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the example needs {', '.join(MISSING)}")


@dataclass
class Run:
    """The example's service, with its own rollout.toml, on the simulator."""

    folder: Path
    engine: str
    port: int = field(default_factory=free_port)
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Process:
        command = [sys.executable, "-m", "rollout_service", "serve", "--config", str(EXAMPLE / "rollout.toml")]
        environ = {"PYTHONPATH": str(REPOSITORY), "ROLLOUT_ENGINES": json.dumps([{"url": self.engine}])}
        log = self.folder / "service.log"
        service = Process("service", [*command, "--port", str(self.port)], log, env=environ, cwd=self.folder)
        self.stack.enter_context(service)
        service.wait_ready(f"{self.url}/readyz", READY_S)
        return service

    def loop(self, **settings: str) -> subprocess.Popen[str]:
        """`loop.sh` with no environment but its settings and where curl and jq are."""
        path = {str(Path(found).parent) for tool in ("bash", "curl", "jq") if (found := shutil.which(tool))}
        child = subprocess.Popen(
            [shutil.which("bash") or "bash", str(EXAMPLE / "loop.sh")],
            env={"PATH": os.pathsep.join([*sorted(path), "/usr/bin", "/bin"]), "SERVICE": self.url, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.stack.callback(self._end, child)
        return child

    @staticmethod
    def _end(child: subprocess.Popen[str]) -> None:
        if child.poll() is None:
            child.terminate()
        child.communicate(timeout=30)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("engine"), free_port()
    command = [sys.executable, "-m", "rollout_service", "simulate-engine", "--port", str(port), "--mean-tokens", "24"]
    with Process("engine", command, folder / "log", env={"PYTHONPATH": str(REPOSITORY)}, cwd=folder) as process:
        process.wait_ready(f"http://127.0.0.1:{port}/health", READY_S)
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def run(engine: str, tmp_path: Path) -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(folder=tmp_path, engine=engine, stack=stack)


def ended(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=90)
    return child.returncode, out, err


def test_the_loop_acks_every_group_and_says_so(run: Run) -> None:
    run.start()
    status, out, err = ended(run.loop())
    assert (status, err) == (0, "")
    assert out.endswith("all 6 groups were acked\n")
    with RolloutClient(run.url) as client:
        now = client.status()
    assert (now.policy_version, now.submitted, now.groups["acked"], now.outstanding) == (3, 6, 6, 0)


def test_the_loop_survives_a_kill_of_the_service(run: Run) -> None:
    service = run.start()
    with RolloutClient(run.url) as client:
        client.pause()
        child = run.loop()
        wait_until(lambda: client.status().submitted == 4, 30, lambda: client.status().groups)
        service.popen.kill()
        service.popen.wait()
        run.start()
        client.resume()
        status, out, _ = ended(child)
        assert (status, client.status().groups["acked"]) == (0, 6), out


def test_a_group_that_is_not_delivered_makes_it_fail(run: Run) -> None:
    run.start()
    with RolloutClient(run.url) as client:
        client.pause()
        child = run.loop(WAIT_S="1")
        wait_until(lambda: client.status().submitted == 4, 30, lambda: client.status().groups)
        client.cancel("g-1")
        status, _, err = ended(child)
    assert status == 1
    assert "groups were lost" in err


def test_an_interrupted_loop_gives_its_lease_back(run: Run) -> None:
    """Its end is a closed pipe, which is how `| head` ends it."""
    run.start()
    child = run.loop()
    assert child.stdout is not None
    child.stdout.close()
    assert child.wait(60) != 0
    with RolloutClient(run.url) as client:
        assert client.status().groups["leased"] == 0


def test_a_refusal_is_said_in_the_services_words_and_what_it_left_behind_stops_the_next_run(run: Run) -> None:
    run.start()
    status, _, err = ended(run.loop(WAIT_S="61"))
    assert status == 1
    assert re.search(r"POST /leases: 422: .*wait_s", err)
    status, _, err = ended(run.loop())
    assert status == 1
    assert "4 groups of an earlier run are outstanding" in err


def test_every_call_of_the_readme_is_one_of_the_service() -> None:
    known = [re.compile(re.sub(r"\{\w+\}", "[^/]+", path)) for path in agreed()["paths"]]
    named = set(re.findall(r"\$S(/[\w/$-]+)", (EXAMPLE / "README.md").read_text()))
    assert len(named) >= 9
    assert [path for path in named if not any(pattern.fullmatch(path) for pattern in known)] == []
