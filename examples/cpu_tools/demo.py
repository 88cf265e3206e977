"""A policy learns to use a tool: engine, service and trainer, each a process of its own, and a live table.

    make demo-tools          a real vLLM CPU server (its environment is made first: 3.5 GB, some minutes)
    KEEP=1 make demo-tools   leaves engine and service running at the end and prints their addresses

Exits 0 only if every step was taken, the version the engine reports rose at every step, and from the first 5 steps to
the last 5 both the mean reward and the share of rollouts that called the tool rose by at least 0.25. Everything that
was started is ended, also on Ctrl-C and on a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from examples.cpu_grpo.demo import WINDOW
from examples.cpu_tools.policy import POSITIONS, NotLearnt, make_policy
from examples.demo import READY_S, counter, keep, leave_running, lines, main_of, say, start_service, start_trainer
from examples.engine import environment
from examples.engine.server import VllmServer
from examples.processes import Process

HERE = Path(__file__).resolve().parent
STEPS = 30
WANTED_GAIN = 0.25
"""Of the reward, and of the share of rollouts that call the tool; usually both rise by 0.5."""
TOOL_FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "pythonic")
"""What vLLM needs to answer with `tool_calls`. This parser reads plain text, `[add(a=1, b=2)]`, no special tokens."""
COLUMNS = "{:>5} {:>8} {:>8} {:>9} {:>10} {:>9} {:>7} {:>6}"
TITLES = ("step", "reward", "called", "samples", "staleness", "groups/s", "failed", "stale")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of the trainer, with the service's counters right after it."""

    step: int
    reward: float
    """Mean of the leased groups' `reward_mean`: the share of right answers."""
    called: float
    """Share of the leased rollouts that called the tool."""
    samples: float
    """Training rows a rollout; 1.0 while its history renders to the tokens it was sampled as."""
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
        shares = (f"{self.reward:.3f}", f"{self.called:.3f}", f"{self.samples:.2f}", f"{self.staleness:.2f}")
        return COLUMNS.format(self.step, *shares, f"{self.groups_per_s:.1f}", self.failed, self.stale)


def rise(values: Sequence[float]) -> float:
    """Mean of the last `WINDOW` values minus that of the first."""
    first, last = values[:WINDOW], values[-WINDOW:]
    return sum(last) / len(last) - sum(first) / len(first)


def problems(steps: Sequence[Step], wanted: int) -> list[str]:
    """Why the run does not count as a success; empty if it does."""
    found = []
    if len(steps) != wanted:
        found.append(f"{len(steps)} of {wanted} steps were taken")
    versions = [int(step.engine_version) if step.engine_version.isdecimal() else -1 for step in steps]
    if any(later <= earlier for earlier, later in zip([0, *versions], versions, strict=False)):
        found.append(f"the engine's weight version did not rise at every step: {versions}")
    if steps and (gain := rise([step.reward for step in steps])) < WANTED_GAIN:
        found.append(f"the reward rose by {gain:.3f}, wanted {WANTED_GAIN}")
    if steps and (more := rise([step.called for step in steps])) < WANTED_GAIN:
        found.append(f"the share of rollouts that call the tool rose by {more:.3f}, wanted {WANTED_GAIN}")
    return found


def start_engine(model: Path, folder: Path) -> VllmServer:
    return VllmServer(environment.make(), model, folder / "engine.log", max_model_len=POSITIONS, flags=TOOL_FLAGS)


def follow(trainer: Process, service_url: str) -> list[Step]:
    """Print a row for each line of the trainer until it ends. ProcessEnded if it ends badly."""
    say(COLUMNS.format(*TITLES))
    steps = []
    for told in lines(trainer):
        metrics = httpx.get(f"{service_url}/metrics", timeout=30).text
        step = Step(
            step=told["step"],
            reward=told["reward"],
            called=told["called"],
            samples=told["samples"],
            staleness=told["staleness"],
            groups_per_s=told["groups"] / told["seconds"],
            failed=counter(metrics, "rollout_failed_total"),
            stale=counter(metrics, "rollout_stale_groups_total"),
            engine_version=told["engine_version"],
        )
        steps.append(step)
        say(step.row())
    return steps


def run(steps: int, folder: Path) -> list[Step]:
    model = make_policy()
    say(f"policy    {model}")
    with contextlib.ExitStack() as started:
        engine = started.enter_context(start_engine(model, folder))
        say(f"engine    {engine.url} (vLLM on CPU), starting")
        engine.ready()
        service, service_url = start_service(HERE, engine.url, folder)
        started.enter_context(service)
        service.wait_ready(f"{service_url}/readyz", READY_S)
        say(f"service   {service_url}, ready")
        options = [str(model), "--steps", str(steps), "--weights", str(folder / "weights")]
        trainer = start_trainer(
            "examples.cpu_tools.train", *options, service=service_url, engine=engine.url, folder=folder
        )
        started.enter_context(trainer)
        say("trainer   starting")
        taken = follow(trainer, service_url)
        if keep():
            leave_running({"engine": (engine, engine.url), "service": (service, service_url)}, folder)
    return taken


def conclude(steps: Sequence[Step], wanted: int, summary: Path | None) -> int:
    """Say how it went; returns the exit status."""
    wrong = problems(steps, wanted)
    if summary:
        summary.write_text(json.dumps({"problems": wrong, "steps": [asdict(step) for step in steps]}, indent=1))
    if steps:
        gain, more = rise([step.reward for step in steps]), rise([step.called for step in steps])
        say(f"\nThe last {WINDOW} steps against the first: reward {gain:+.3f}, called {more:+.3f}.")
    for problem in wrong:
        say(f"FAILED: {problem}")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="A tiny policy learns to use a tool, with a live table.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path, help="write what happened to this file")
    arguments = parser.parse_args()
    if os.environ.get("ENGINE", "vllm") != "vllm":
        sys.exit("This demo needs the real engine (ENGINE=vllm): the simulator calls no tools.")
    if reason := environment.why_impossible():
        sys.exit(f"This demo needs the real engine: {reason}.")
    return main_of(
        lambda folder: run(arguments.steps, folder),
        lambda steps: conclude(steps, arguments.steps, arguments.json),
        also=(NotLearnt,),
    )


if __name__ == "__main__":
    sys.exit(main())
