"""TRL's own async trainer on this machine: an engine, the service and TRL, each a process of its own, and a live table.

    make demo-trl            a real vLLM CPU server (its environment is made first: 3.5 GB, some minutes)
    ENGINE=sim make demo-trl the simulator instead: nobody learns there
    KEEP=1 make demo-trl     leaves engine and service running at the end and prints their addresses

Exits 0 only if every step was taken, TRL's log had the service's three counters at every step, and (on the real
engine) the mean reward of the last 5 steps is at least 0.4 above that of the first 5. Everything that was started is
ended, also on Ctrl-C and on a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.cpu_grpo.demo import WANTED_GAIN, WINDOW, engine_ready, start_engine
from examples.demo import (
    READY_S,
    engine_kind,
    keep,
    leave_running,
    lines,
    main_of,
    say,
    start_service,
    start_trainer,
)
from examples.engine.make_tiny_model import make_tiny_model
from examples.processes import Process

HERE = Path(__file__).resolve().parent
STEPS = 60
COUNTERS = ("rollout/failed_total", "rollout/dropped_groups_total", "rollout/stale_groups_total")
COLUMNS = "{:>5} {:>8} {:>10} {:>7} {:>8} {:>7} {:>8} {:>6}"
TITLES = ("step", "reward", "staleness", "ratio", "s/step", "failed", "dropped", "stale")

Entry = dict[str, Any]
"""One entry of TRL's log, with its step."""


def row(entry: Entry) -> str:
    """An entry as a line of the table; counters are those of this step."""
    figures = [(entry.get("reward"), 3), (entry.get("sample/staleness_mean"), 2), (entry.get("ratio"), 3)]
    figures += [(entry.get("perf/step_s"), 2), *((entry.get(name), 0) for name in COUNTERS)]
    return COLUMNS.format(
        entry["step"], *("-" if value is None else f"{value:.{digits}f}" for value, digits in figures)
    )


def gain(log: Sequence[Entry]) -> float:
    """Mean reward of the last `WINDOW` steps minus that of the first."""
    rewards: list[float] = [entry["reward"] for entry in log if entry.get("reward") is not None]
    if not rewards:
        return 0.0
    first, last = rewards[:WINDOW], rewards[-WINDOW:]
    return sum(last) / len(last) - sum(first) / len(first)


def problems(log: Sequence[Entry], wanted: int, learns: bool) -> list[str]:
    """Why the run does not count as a success; empty if it does."""
    found = []
    if [entry["step"] for entry in log] != list(range(1, wanted + 1)):
        found.append(f"{len(log)} of {wanted} steps were logged")
    missing = [name for name in COUNTERS if any(entry.get(name) is None for entry in log)]
    if missing:
        found.append(f"TRL's log lacks {', '.join(missing)}")
    if learns and log and gain(log) < WANTED_GAIN:
        found.append(f"the reward rose by {gain(log):.3f}, wanted {WANTED_GAIN}")
    return found


def entries(trainer: Process) -> Iterator[Entry]:
    """TRL's log, one entry a step, as it comes. ProcessEnded if TRL ends badly."""
    for entry in lines(trainer):
        if "loss" in entry:  # the last entry sums up the run
            yield entry


def run(kind: str, steps: int, folder: Path) -> list[Entry]:
    model = make_tiny_model(folder / "model")
    with contextlib.ExitStack() as started:
        engine, engine_url = start_engine(kind, model, folder)
        started.enter_context(engine)
        engine_ready(engine, engine_url)
        service, service_url = start_service(HERE, engine_url, folder)
        started.enter_context(service)
        service.wait_ready(f"{service_url}/readyz", READY_S)
        say(f"service   {service_url}, ready")
        options = [str(model), "--steps", str(steps), "--out", str(folder / "out")]
        trainer = start_trainer(
            "examples.trl_async_grpo.train", *options, service=service_url, engine=engine_url, folder=folder
        )
        started.enter_context(trainer)
        say("trainer   TRL's AsyncGRPOTrainer, starting")
        say(COLUMNS.format(*TITLES))
        log = []
        for entry in entries(trainer):
            log.append(entry)
            say(row(entry))
        if keep():
            leave_running({"engine": (engine, engine_url), "service": (service, service_url)}, folder)
    return log


def conclude(kind: str, log: Sequence[Entry], wanted: int, summary: Path | None) -> int:
    """Say how it went; returns the exit status."""
    wrong = problems(log, wanted, learns=kind == "vllm")
    if summary:
        summary.write_text(json.dumps({"engine": kind, "gain": gain(log), "problems": wrong, "log": log}, indent=1))
    if kind == "sim":
        say("\nThe simulator answers with random tokens: the loop ran, nobody learned anything.")
    elif log:
        say(f"\nReward: the last {WINDOW} steps are {gain(log):+.3f} above the first (wanted {WANTED_GAIN}).")
    for problem in wrong:
        say(f"FAILED: {problem}")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Engine, service and TRL on this machine, with a live table.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path, help="write what happened to this file")
    arguments = parser.parse_args()
    kind = engine_kind()
    return main_of(
        lambda folder: run(kind, arguments.steps, folder),
        lambda log: conclude(kind, log, arguments.steps, arguments.json),
    )


if __name__ == "__main__":
    sys.exit(main())
