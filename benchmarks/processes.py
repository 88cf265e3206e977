"""Processes of a benchmark: each on its own core, ended by pid, CPU read from the kernel."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CLIENT_CORE, ENGINE_CORE = 0, 1
"""What is measured has one core to itself; the engine, the trainer and the reward workers share the other."""
TICK = os.sysconf("SC_CLK_TCK")


def pinned(command: Sequence[str], core: int) -> list[str]:
    """`command` on one core, where the machine has several and `taskset`."""
    if (os.cpu_count() or 1) < 2 or shutil.which("taskset") is None:
        return list(command)
    return ["taskset", "-c", str(core), *command]


def cpu_seconds(pid: int) -> float:
    """CPU seconds that process `pid` has used, its children not included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def resident_bytes(pid: int) -> int:
    """Resident memory of process `pid`."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def process(command: Sequence[str], core: int, **options: object) -> Iterator[subprocess.Popen[str]]:
    """Runs until the block ends; then SIGTERM, and SIGKILL after 10 s."""
    with subprocess.Popen(pinned(command, core), text=True, **options) as child:  # type: ignore[call-overload]  # **kw
        try:
            yield child
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()


@contextmanager
def engine(*options: str) -> Iterator[str]:
    """A simulated engine on a free port; its URL."""
    command = [sys.executable, "-m", "rollout_service", "simulate-engine", "--port", "0", *options]
    with process(command, ENGINE_CORE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        if child.stdout is None:
            raise RuntimeError("the simulated engine has no output to read")
        if not select.select([child.stdout], [], [], 30)[0]:
            raise RuntimeError("the simulated engine did not start in 30 s")
        url = next(word for word in child.stdout.readline().split() if word.startswith("http"))
        yield url.rstrip("/.,")


def wait_for(condition: Callable[[], bool], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {within_s:g} s: {what}")
        time.sleep(0.05)


def answers_200(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
