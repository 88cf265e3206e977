"""`make demo`: its verdict, its end, and that a policy really learns through the service."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from examples.cpu_grpo.demo import WANTED_GAIN, Step, gain, problems
from examples.demo import counter
from examples.processes import Process
from tests.e2e.conftest import REPOSITORY

DEMO = [sys.executable, "-u", "-m", "examples.cpu_grpo.demo"]


def course(rewards: list[float], versions: list[str] | None = None) -> list[Step]:
    """Steps with these rewards; the engine's version rises unless `versions` says otherwise."""
    told = versions or [str(number) for number in range(2, len(rewards) + 2)]
    return [
        Step(step=n, reward=reward, staleness=0.0, groups_per_s=1.0, failed=0, stale=0, engine_version=version)
        for n, (reward, version) in enumerate(zip(rewards, told, strict=True), start=1)
    ]


RISING = [0.1] * 5 + [0.3] * 5 + [0.6] * 5


def test_a_run_that_learned_and_updated_the_engine_at_every_step_is_a_success() -> None:
    assert gain(course(RISING)) == pytest.approx(0.5)
    assert problems(course(RISING), wanted=15, learns=True) == []


@pytest.mark.parametrize(
    ("steps", "wanted", "learns", "problem"),
    [
        (course(RISING[:-1]), 15, True, "14 of 15 steps"),
        (course([0.1] * 5 + [0.4] * 5), 10, True, "rose by 0.300"),
        (course([0.1, 0.9], ["2", "2"]), 2, False, "did not rise"),
        (course([0.1, 0.9], ["default", "2"]), 2, False, "did not rise"),
        ([], 40, True, "0 of 40 steps"),
    ],
)
def test_a_run_that_fell_short_says_how(steps: list[Step], wanted: int, learns: bool, problem: str) -> None:
    assert problem in " ".join(problems(steps, wanted, learns))


def test_a_run_on_the_simulator_need_not_learn() -> None:
    assert problems(course([0.1] * 10), wanted=10, learns=False) == []


def test_a_counter_is_summed_over_its_labels_and_no_other_name_counts() -> None:
    page = '# TYPE a_total counter\na_total{reason="x"} 2.0\na_total{reason="y"} 1.0\nba_total 7.0\na_total_b 5.0\n'
    assert counter(page, "a_total") == 3


@pytest.mark.timeout(300)
def test_the_demo_takes_all_its_steps_on_the_simulator(tmp_path: Path) -> None:
    done = subprocess.run(
        [*DEMO, "--json", str(tmp_path / "summary.json")],
        cwd=REPOSITORY,
        env={**os.environ, "ENGINE": "sim"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nobody learned" in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [step["step"] for step in summary["steps"]] == list(range(1, 41))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("stop", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_ends_everything_it_started(tmp_path: Path, stop: signal.Signals, status: int) -> None:
    folders = tmp_path / "temporary"
    folders.mkdir()
    environ = {"ENGINE": "sim", "TMPDIR": str(folders)}
    demo = Process("demo", DEMO, tmp_path / "log", env=environ, cwd=REPOSITORY, stdout=subprocess.PIPE)
    with demo:
        assert demo.popen.stdout is not None
        addresses = []
        for line in demo.popen.stdout:
            words = line.decode().split()
            if words and words[0] in ("engine", "service"):
                addresses.append(words[1].rstrip(","))
            if words and words[0] == "2":
                break
        assert len(addresses) == 2
        demo.popen.send_signal(stop)
        assert demo.popen.wait(60) == status
    for address in addresses:
        with pytest.raises(httpx.ConnectError):
            httpx.get(address)
    assert list(folders.glob("rollout-demo-*")) == []


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_real_policy_learns_through_the_service(engine_python: Path, tmp_path: Path) -> None:
    summary_path = tmp_path / "summary.json"
    done = subprocess.run(
        [*DEMO, "--json", str(summary_path)],
        cwd=REPOSITORY,
        env={**os.environ, "ENGINE": "vllm", "KEEP": ""},
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(summary_path.read_text())
    assert summary["engine"] == "vllm"
    assert summary["gain"] >= WANTED_GAIN
    assert all(step["staleness"] <= 2 for step in summary["steps"])
