"""The whole loop on this machine: an engine, the service and a trainer, each a process of its own, and a live table.

    make demo            a real vLLM CPU server (its environment is made first: 3.5 GB, some minutes)
    ENGINE=sim make demo the simulator instead: seconds, and nobody learns there
    KEEP=1 make demo     leaves engine and service running at the end and prints their addresses

Exits 0 only if every step was taken, the version the engine reports rose at every step, and (on the real engine) the
mean reward of the last 5 steps is at least 0.4 above that of the first 5. Everything that was started is ended, also on
Ctrl-C and on a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from examples.demo import (
    READY_S,
    REPOSITORY,
    counter,
    engine_kind,
    keep,
    leave_running,
    lines,
    main_of,
    say,
    start_service,
    start_trainer,
)
from examples.engine import environment
from examples.engine.make_tiny_model import make_tiny_model
from examples.engine.server import MODEL_NAME, VllmServer
from examples.processes import Process, free_port

HERE = Path(__file__).resolve().parent
STEPS = 40
WINDOW = 5
WANTED_GAIN = 0.4
COLUMNS = "{:>5} {:>8} {:>10} {:>9} {:>7} {:>6}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of the trainer, with the service's counters right after it."""

    step: int
    reward: float
    """Mean of the leased groups' `reward_mean`."""
    staleness: float
    """Mean over the leased groups."""
    groups_per_s: float
    failed: int
    """`rollout_failed_total` so far."""
    stale: int
    """`rollout_stale_groups_total` so far."""
    engine_version: str
    """What the engine's /weight_info said after the step."""

    def row(self) -> str:
        reward, staleness, speed = f"{self.reward:.3f}", f"{self.staleness:.2f}", f"{self.groups_per_s:.1f}"
        return COLUMNS.format(self.step, reward, staleness, speed, self.failed, self.stale)


def gain(steps: Sequence[Step]) -> float:
    """Mean reward of the last `WINDOW` steps minus that of the first."""
    rewards = [step.reward for step in steps]
    first, last = rewards[:WINDOW], rewards[-WINDOW:]
    return sum(last) / len(last) - sum(first) / len(first)


def problems(steps: Sequence[Step], wanted: int, learns: bool) -> list[str]:
    """Why the run does not count as a success; empty if it does."""
    found = []
    if len(steps) != wanted:
        found.append(f"{len(steps)} of {wanted} steps were taken")
    versions = [int(step.engine_version) if step.engine_version.isdecimal() else -1 for step in steps]
    if any(later <= earlier for earlier, later in zip([0, *versions], versions, strict=False)):
        found.append(f"the engine's weight version did not rise at every step: {versions}")
    if learns and steps and gain(steps) < WANTED_GAIN:
        found.append(f"the reward rose by {gain(steps):.3f}, wanted {WANTED_GAIN}")
    return found


def start_engine(kind: str, model: Path, folder: Path) -> tuple[Process, str]:
    """An engine and its address; `engine_ready` waits for it."""
    log = folder / "engine.log"
    if kind == "vllm":
        server = VllmServer(environment.make(), model, log)
        return server, server.url
    port = free_port()
    command = [sys.executable, "-m", "rollout_service", "simulate-engine", "--port", str(port), "--model", MODEL_NAME]
    return Process("simulator", command, log, cwd=REPOSITORY), f"http://127.0.0.1:{port}"


def engine_ready(engine: Process, url: str) -> None:
    """Wait until it serves; a real one is warm then."""
    real = isinstance(engine, VllmServer)
    say(f"engine    {url} ({'vLLM on CPU' if real else 'simulator'}), starting")
    if isinstance(engine, VllmServer):
        engine.ready()
    else:
        engine.wait_ready(f"{url}/health", READY_S)


def follow(trainer: Process, service_url: str) -> list[Step]:
    """Print a row for each line of the trainer until it ends. ProcessEnded if it ends badly."""
    say(COLUMNS.format("step", "reward", "staleness", "groups/s", "failed", "stale"))
    steps = []
    for told in lines(trainer):
        metrics = httpx.get(f"{service_url}/metrics", timeout=30).text
        step = Step(
            step=told["step"],
            reward=told["reward"],
            staleness=told["staleness"],
            groups_per_s=told["groups"] / told["seconds"],
            failed=counter(metrics, "rollout_failed_total"),
            stale=counter(metrics, "rollout_stale_groups_total"),
            engine_version=told["engine_version"],
        )
        steps.append(step)
        say(step.row())
    return steps


def run(kind: str, steps: int, folder: Path) -> list[Step]:
    model = make_tiny_model(folder / "model")
    with contextlib.ExitStack() as started:
        engine, engine_url = start_engine(kind, model, folder)
        started.enter_context(engine)
        engine_ready(engine, engine_url)
        service, service_url = start_service(HERE, engine_url, folder)
        started.enter_context(service)
        service.wait_ready(f"{service_url}/readyz", READY_S)
        say(f"service   {service_url}, ready")
        options = [str(model), "--steps", str(steps), "--weights", str(folder / "weights")]
        trainer = start_trainer(
            "examples.cpu_grpo.train", *options, service=service_url, engine=engine_url, folder=folder
        )
        started.enter_context(trainer)
        say("trainer   starting")
        taken = follow(trainer, service_url)
        if keep():
            leave_running({"engine": (engine, engine_url), "service": (service, service_url)}, folder)
    return taken


def conclude(kind: str, steps: Sequence[Step], wanted: int, summary: Path | None) -> int:
    """Say how it went; returns the exit status."""
    wrong = problems(steps, wanted, learns=kind == "vllm")
    if summary:
        told = {"engine": kind, "gain": gain(steps) if steps else None, "problems": wrong}
        summary.write_text(json.dumps({**told, "steps": [asdict(step) for step in steps]}, indent=1))
    if kind == "sim":
        say("\nThe simulator answers with random tokens: the loop ran, nobody learned anything.")
    elif steps:
        say(f"\nReward: the last {WINDOW} steps are {gain(steps):+.3f} above the first (wanted {WANTED_GAIN}).")
    for problem in wrong:
        say(f"FAILED: {problem}")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Engine, service and trainer on this machine, with a live table.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path, help="write what happened to this file")
    arguments = parser.parse_args()
    kind = engine_kind()
    return main_of(
        lambda folder: run(kind, arguments.steps, folder),
        lambda steps: conclude(kind, steps, arguments.steps, arguments.json),
    )


if __name__ == "__main__":
    sys.exit(main())
