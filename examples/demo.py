"""What the demos share: the service and a trainer as processes, the trainer's lines, and how a demo ends.

What always holds: everything that was started is ended, also on Ctrl-C and on a failure, unless KEEP=1; the folder of a
run that failed is kept and named, any other is removed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from examples.engine import environment
from examples.processes import Process, ProcessEnded, free_port

T = TypeVar("T")

REPOSITORY = Path(__file__).resolve().parent.parent
READY_S = 120.0


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)


def keep() -> bool:
    """Whether KEEP asks for engine and service to go on running."""
    return os.environ.get("KEEP", "") not in ("", "0")


def engine_kind() -> str:
    """`vllm` or `sim`, as ENGINE asks and the platform allows."""
    asked = os.environ.get("ENGINE", "vllm")
    if asked not in ("vllm", "sim"):
        sys.exit(f"ENGINE is vllm or sim, not {asked!r}")
    if asked == "vllm" and (reason := environment.why_impossible()):
        say(f"No real engine here: {reason}. Taking the simulator.")
        return "sim"
    return asked


def counter(page: str, name: str) -> int:
    """Sum over the labels of a counter on a Prometheus page."""
    return int(sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)))


def start_service(
    config_folder: Path, engine_url: str, folder: Path, env: Mapping[str, str] | None = None
) -> tuple[Process, str]:
    """The service on `config_folder`/rollout.toml, its store and log in `folder`; and its address."""
    port = free_port()
    command = [sys.executable, "-m", "rollout_service", "serve", "--config", "rollout.toml", "--port", str(port)]
    environ = {
        "PYTHONPATH": str(REPOSITORY),
        "ROLLOUT_ENGINES": json.dumps([{"url": engine_url}]),
        "ROLLOUT_STORE__URL": f"sqlite:///{folder / 'rollout.db'}",
        **(env or {}),
    }
    return Process(
        "service", command, folder / "service.log", env=environ, cwd=config_folder
    ), f"http://127.0.0.1:{port}"


def start_trainer(module: str, *arguments: str, service: str, engine: str, folder: Path) -> Process:
    """`python -m module`; it prints a JSON object a step, which `lines` gives."""
    command = [sys.executable, "-m", module, *arguments, "--service", service, "--engine", engine]
    environ = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    log = folder / "trainer.log"
    return Process("trainer", command, log, env=environ, cwd=REPOSITORY, stdout=subprocess.PIPE)


def lines(trainer: Process) -> Iterator[dict[str, Any]]:
    """What the trainer prints, as it comes. ProcessEnded if it ends badly."""
    if trainer.popen.stdout is None:
        raise ValueError("the trainer was started without a pipe")
    for line in trainer.popen.stdout:
        yield json.loads(line)
    if code := trainer.popen.wait():
        raise ProcessEnded(f"the trainer ended with {code}; its log:\n{trainer.tail()}")


def leave_running(processes: Mapping[str, tuple[Process, str]], folder: Path) -> None:
    """For KEEP=1: name -> (process, address)."""
    for process, _ in processes.values():
        process.keep = True
    told = ", ".join(f"{name} {url}" for name, (_, url) in processes.items())
    say(f"\nStill running: {told}; files in {folder}")
    say(f"End them with: kill {' '.join(str(process.popen.pid) for process, _ in processes.values())}")


def main_of(run: Callable[[Path], T], conclude: Callable[[T], int], *, also: tuple[type[Exception], ...] = ()) -> int:
    """Run in a folder of its own, conclude; returns the exit status. `also`: further exceptions that mean it failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    failures: tuple[type[Exception], ...] = (ProcessEnded, subprocess.CalledProcessError, *also)
    folder = Path(tempfile.mkdtemp(prefix="rollout-demo-"))
    started = time.monotonic()
    try:
        taken = run(folder)
    except (KeyboardInterrupt, SystemExit) as stop:
        say("\nInterrupted; what was started has ended.")
        shutil.rmtree(folder)
        return 130 if isinstance(stop, KeyboardInterrupt) else 143
    except failures as error:
        say(f"\nFAILED: {error}\nLogs are in {folder}")
        return 1
    code = conclude(taken)
    say(f"{time.monotonic() - started:.0f} s in all")
    if code == 0 and not keep():
        shutil.rmtree(folder)
    elif not keep():
        say(f"Logs are in {folder}")
    return code
