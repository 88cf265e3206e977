"""TRL's own AsyncGRPOTrainer on the real service: steps, a kill in the middle, going on from a checkpoint, the demo."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.cpu_grpo.demo import WANTED_GAIN, start_engine
from examples.demo import REPOSITORY, start_service, start_trainer
from examples.engine.make_tiny_model import make_tiny_model
from examples.processes import Process
from examples.trl_async_grpo.demo import COUNTERS, HERE, Entry, entries, gain, problems, row
from trainer_client import RolloutClient

pytestmark = pytest.mark.timeout(300)
DEMO = [sys.executable, "-u", "-m", "examples.trl_async_grpo.demo"]
GROUPS_PER_STEP = 8
READY_S = 60.0


@pytest.fixture(autouse=True)
def trl() -> None:
    try:
        importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("TRL is not installed (extra `trl`; in the dev lock, so `make test` runs this)")


class Run:
    """An engine simulator, the demo's service, and TRL on them; everything ends with the `with` block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_tiny_model(folder / "model")
        self.engine, self.engine_url = start_engine("sim", self.model, folder)
        self.engine.wait_ready(f"{self.engine_url}/health", READY_S)
        self.service, self.url = start_service(HERE, self.engine_url, folder)
        self.service.wait_ready(f"{self.url}/readyz", READY_S)
        self.trainers: list[Process] = []

    def train(self, *options: str) -> Iterator[Entry]:
        """TRL's log as it comes."""
        trainer = start_trainer(
            "examples.trl_async_grpo.train",
            str(self.model),
            "--out",
            str(self.folder / "out"),
            *options,
            service=self.url,
            engine=self.engine_url,
            folder=self.folder,
        )
        self.trainers.append(trainer)
        return entries(trainer)

    def restart_service(self) -> None:
        """As after `kill -9`: the same file, the same port."""
        self.service.popen.kill()
        self.service.popen.wait()
        command = list(self.service.popen.args)  # type: ignore[call-overload]  # it was started with a list
        environ = {
            "PYTHONPATH": str(REPOSITORY),
            "ROLLOUT_ENGINES": json.dumps([{"url": self.engine_url}]),
            "ROLLOUT_STORE__URL": f"sqlite:///{self.folder / 'rollout.db'}",
        }
        here = REPOSITORY / "examples" / "trl_async_grpo"
        self.service = Process("service", command, self.service.log, env=environ, cwd=here)

    def status(self) -> Any:
        with RolloutClient(self.url) as client:
            return client.status()

    def stop(self) -> None:
        for process in [*self.trainers, self.service, self.engine]:
            process.stop()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    # Room for every row the pace lets in: no group is caught half-dispatched and goes on smaller.
    monkeypatch.setenv("ROLLOUT_DISPATCH__MAX_INFLIGHT_ROLLOUTS", "256")
    run = Run(tmp_path)
    yield run
    for process in [*run.trainers, run.service]:
        print(f"--- end of {process.log.name}\n{process.tail()}")
    run.stop()


def check_trained(run: Run, log: list[Entry], steps: int) -> None:
    """Every step was taken with whole groups, none of them twice, and exactly those are acked."""
    assert [entry["step"] for entry in log] == list(range(1, steps + 1))
    assert all(entry["batch/samples_per_step"] == GROUPS_PER_STEP * 8 for entry in log)
    # TRL counts each group once, however often it comes, and fetches one step's rows ahead.
    assert sum(entry["batch/groups_per_step"] for entry in log) == (steps + 1) * GROUPS_PER_STEP
    status = run.status()
    assert status.groups["acked"] == steps * GROUPS_PER_STEP
    assert status.groups["leased"] == 0
    assert status.policy_version == steps + 1


@pytest.mark.long
def test_trl_trains_on_the_service_step_by_step(run: Run) -> None:
    log = list(run.train("--steps", "4"))
    check_trained(run, log, 4)
    assert problems(log, wanted=4, learns=False) == []
    assert all(entry["sample/staleness_max"] <= 2 for entry in log)
    assert all(0 < entry["reward"] < 1 and entry["rewards/lowercase"] == entry["reward"] for entry in log)
    (engine,) = run.status().engines
    assert engine["weight_version"] == "5"


def test_a_kill_of_the_service_in_the_middle_costs_no_step_and_no_group_is_trained_twice(run: Run) -> None:
    log: list[Entry] = []
    for entry in run.train("--steps", "8"):
        log.append(entry)
        if entry["step"] in (2, 5):
            run.restart_service()
    check_trained(run, log, 8)
    assert all(entry[name] >= 0 for entry in log for name in COUNTERS)


def test_a_run_goes_on_from_a_checkpoint_with_what_came_after_it(run: Run) -> None:
    first = list(run.train("--steps", "4", "--save-steps", "2"))
    assert [entry["step"] for entry in first] == [1, 2, 3, 4]
    again = list(run.train("--steps", "4", "--save-steps", "2", "--resume", "2"))
    assert [entry["step"] for entry in again] == [3, 4]
    status = run.status()
    assert status.groups["acked"] == 4 * GROUPS_PER_STEP
    assert status.policy_version == 3 + 3  # the mark's, one for TRL's sync at its start, one for each step
    with RolloutClient(run.url) as client:
        assert [mark["name"] for mark in client.checkpoints()] == ["step-2", "step-4"]


# the demo


def course(rewards: list[float], **more: Any) -> list[Entry]:
    return [
        {"step": n, "reward": reward} | dict.fromkeys(COUNTERS, 0.0) | more for n, reward in enumerate(rewards, start=1)
    ]


RISING = [0.1] * 5 + [0.3] * 5 + [0.6] * 5


def test_a_run_that_learned_and_logged_the_counters_is_a_success() -> None:
    assert gain(course(RISING)) == pytest.approx(0.5)
    assert problems(course(RISING), wanted=15, learns=True) == []
    assert problems(course([0.1] * 10), wanted=10, learns=False) == []


@pytest.mark.parametrize(
    ("log", "wanted", "problem"),
    [
        (course(RISING[:-1]), 15, "14 of 15 steps"),
        (course([0.1] * 5 + [0.4] * 5), 10, "rose by 0.300"),
        (course(RISING, **{COUNTERS[1]: None}), 15, f"lacks {COUNTERS[1]}"),
        ([], 60, "0 of 60 steps"),
    ],
)
def test_a_run_that_fell_short_says_how(log: list[Entry], wanted: int, problem: str) -> None:
    assert problem in " ".join(problems(log, wanted, learns=True))


def test_the_table_shows_what_the_log_lacks_as_a_dash() -> None:
    assert row(course([0.25])[0]).split() == ["1", "0.250", "-", "-", "-", "0", "0", "0"]


def demo(tmp_path: Path, engine: str, *options: str) -> dict[str, Any]:
    """Run the demo to its good end; returns its summary."""
    summary = tmp_path / "summary.json"
    done = subprocess.run(
        [*DEMO, "--json", str(summary), *options],
        cwd=REPOSITORY,
        env={**os.environ, "ENGINE": engine, "KEEP": ""},
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(summary.read_text()))


@pytest.mark.long
def test_the_demo_takes_all_its_steps_on_the_simulator(tmp_path: Path) -> None:
    summary = demo(tmp_path, "sim", "--steps", "6")
    assert [entry["step"] for entry in summary["log"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("engine_python")
def test_a_real_policy_learns_with_trl_through_the_service(tmp_path: Path) -> None:
    summary = demo(tmp_path, "vllm")
    assert summary["gain"] >= WANTED_GAIN
    assert all(entry["sample/staleness_max"] <= 2 for entry in summary["log"])
    # The engine's logprobs are the trainer's own, computed by two different programs.
    first = summary["log"][0]
    assert first["ratio"] == pytest.approx(1.0, abs=0.02)
    assert first["kl"] == pytest.approx(0.0, abs=0.01)
