"""On-policy distillation on this machine: engine, teacher, service and trainer, each a process of its own, and a table.

    make demo-distill           two vLLM CPU servers (their environment is made first: 3.5 GB, some minutes)
    KEEP=1 make demo-distill    leaves engine, teacher and service running at the end and prints their addresses

Exits 0 only if every step was taken, the version the engine reports rose at every step, no teacher failed, and the
mean loss of the last 5 steps is at most half that of the first 5. There is no ENGINE=sim: the simulator has no
`prompt_logprobs`. Everything that was started is ended, also on Ctrl-C and on a failure.
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

from examples.cpu_distill.teacher import make_teacher
from examples.demo import (
    READY_S,
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
from examples.engine.server import VllmServer
from examples.processes import Process

HERE = Path(__file__).resolve().parent
STEPS = 40
WINDOW = 5
WANTED_RATIO = 0.5
TOP_K = 16
COLUMNS = "{:>5} {:>8} {:>11} {:>10} {:>10} {:>6} {:>8}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of the trainer, with the service's counters right after it."""

    step: int
    loss: float
    """Reverse KL to the teacher, nats a token."""
    likelihood: float
    """Mean logprob the teacher gives the student's tokens."""
    staleness: float
    samples_per_s: float
    stale: int
    """`rollout_stale_samples_total` so far."""
    teacher_errors: int
    """`rollout_teacher_errors_total` so far."""
    engine_version: str
    """What the engine's /weight_info said after the step."""

    def row(self) -> str:
        loss, likelihood, staleness = f"{self.loss:.3f}", f"{self.likelihood:.3f}", f"{self.staleness:.2f}"
        speed = f"{self.samples_per_s:.1f}"
        return COLUMNS.format(self.step, loss, likelihood, staleness, speed, self.stale, self.teacher_errors)


def ratio(steps: Sequence[Step]) -> float:
    """Mean loss of the last `WINDOW` steps over that of the first."""
    losses = [step.loss for step in steps]
    first, last = losses[:WINDOW], losses[-WINDOW:]
    return (sum(last) / len(last)) / (sum(first) / len(first))


def problems(steps: Sequence[Step], wanted: int) -> list[str]:
    """Why the run does not count as a success; empty if it does."""
    found = []
    if len(steps) != wanted:
        found.append(f"{len(steps)} of {wanted} steps were taken")
    versions = [int(step.engine_version) if step.engine_version.isdecimal() else -1 for step in steps]
    if any(later <= earlier for earlier, later in zip([0, *versions], versions, strict=False)):
        found.append(f"the engine's weight version did not rise at every step: {versions}")
    if steps and steps[-1].teacher_errors:
        found.append(f"the teacher failed on {steps[-1].teacher_errors} samples")
    if steps and not ratio(steps) <= WANTED_RATIO:
        found.append(f"the loss fell to {ratio(steps):.2f} of what it was, wanted {WANTED_RATIO}")
    return found


def follow(trainer: Process, service_url: str) -> list[Step]:
    """Print a row for each line of the trainer until it ends. ProcessEnded if it ends badly."""
    say(COLUMNS.format("step", "loss", "likelihood", "staleness", "samples/s", "stale", "errors"))
    steps = []
    for told in lines(trainer):
        metrics = httpx.get(f"{service_url}/metrics", timeout=30).text
        step = Step(
            step=told["step"],
            loss=told["loss"],
            likelihood=told["likelihood"],
            staleness=told["staleness"],
            samples_per_s=told["samples"] / told["seconds"],
            stale=counter(metrics, "rollout_stale_samples_total"),
            teacher_errors=counter(metrics, "rollout_teacher_errors_total"),
            engine_version=told["engine_version"],
        )
        steps.append(step)
        say(step.row())
    return steps


def run(steps: int, folder: Path) -> list[Step]:
    python = environment.make()
    student = make_tiny_model(folder / "student")
    with contextlib.ExitStack() as started:
        engine = started.enter_context(VllmServer(python, student, folder / "engine.log"))
        say(f"engine    {engine.url} (vLLM on CPU, the student), starting")
        say("teacher   is trained first")
        teacher = started.enter_context(VllmServer(python, make_teacher(folder / "teacher"), folder / "teacher.log"))
        say(f"teacher   {teacher.url} (vLLM on CPU), starting")
        engine.ready()
        teacher.ready()
        teachers = json.dumps([{"id": "teacher", "url": teacher.url, "top_k": TOP_K}])
        service, service_url = start_service(HERE, engine.url, folder, {"ROLLOUT_TEACHERS": teachers})
        started.enter_context(service)
        service.wait_ready(f"{service_url}/readyz", READY_S)
        say(f"service   {service_url}, ready")
        options = [str(student), "--steps", str(steps), "--weights", str(folder / "weights")]
        trainer = start_trainer(
            "examples.cpu_distill.train", *options, service=service_url, engine=engine.url, folder=folder
        )
        started.enter_context(trainer)
        say("trainer   starting")
        taken = follow(trainer, service_url)
        if keep():
            processes = {"engine": (engine, engine.url), "teacher": (teacher, teacher.url)}
            leave_running({**processes, "service": (service, service_url)}, folder)
    return taken


def conclude(steps: Sequence[Step], wanted: int, summary: Path | None) -> int:
    """Say how it went; returns the exit status."""
    wrong = problems(steps, wanted)
    if summary:
        told = {"ratio": ratio(steps) if steps else None, "problems": wrong}
        summary.write_text(json.dumps({**told, "steps": [asdict(step) for step in steps]}, indent=1))
    if steps:
        say(f"\nLoss: the last {WINDOW} steps are {ratio(steps):.2f} of the first (wanted {WANTED_RATIO} at most).")
    for problem in wrong:
        say(f"FAILED: {problem}")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Engine, teacher, service and trainer on this machine, with a table.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path, help="write what happened to this file")
    arguments = parser.parse_args()
    if engine_kind() == "sim":
        say("FAILED: this demo needs vLLM: the simulator gives no prompt_logprobs")
        return 1
    return main_of(
        lambda folder: run(arguments.steps, folder),
        lambda steps: conclude(steps, arguments.steps, arguments.json),
    )


if __name__ == "__main__":
    sys.exit(main())
