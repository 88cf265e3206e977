"""From the start of a killed service's process until its first lease is answered, with 10,000 outstanding groups.

What is measured: one service takes 10,000 prompts, generates until some hundred groups are ready, and is killed with
SIGKILL while rollouts are in flight. Each run starts a service on a copy of the store it left: the interpreter's start,
imports, opening and reading the store, the first contact with the engine, and a lease of 8 groups over HTTP. Beside it
the same start on an empty store until it is ready, which is what the 10,000 groups do not cost. The disk's cache is
warm.

    python -m benchmarks.restart [--rounds 5] [--quick]
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks import processes
from benchmarks.load import REWARDS, config, rows
from benchmarks.report import Figure, alternate, below, median, run_alone, shown

GROUPS, QUICK_GROUPS = 10_000, 1_000
READY, READY_BOUND = 128, 512
"""Killed when so many are ready, which is before dispatch stops: rollouts are in flight then."""
IN_FLIGHT, LATENCY_S = 256, 0.2
CHUNK = 500
LEASED = 8
POLL_S = 0.005
FILL_S = 300.0


def fill(engine_url: str, within: Path, groups: int) -> int:
    """A killed service's folder with `groups` outstanding groups; how many of them were ready."""
    toml = config(engine_url, in_flight=IN_FLIGHT, prompts="", ready=READY_BOUND)
    with (
        processes.service(toml, {"bench_rewards.py": REWARDS}, within=within) as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
    ):
        http.post("/pause").raise_for_status()
        for first in range(0, groups, CHUNK):
            http.post("/prompts", json={"prompts": rows(first, CHUNK)}).raise_for_status()
        http.post("/resume").raise_for_status()
        ready = 0

        def enough() -> bool:
            nonlocal ready
            status = http.get("/status").raise_for_status().json()
            if status["outstanding"] != groups:
                raise RuntimeError(f"{status['outstanding']} outstanding groups where {groups} were to be")
            ready = int(status["groups"]["ready"])
            return ready >= READY

        processes.wait_for(enough, FILL_S, f"{READY} groups are ready")
        os.kill(running.pid, signal.SIGKILL)
    return ready


class Start(NamedTuple):
    """What a start took, seconds."""

    seconds: float
    cpu_s: float
    """Of the process, which a busy machine does not stretch as it stretches the time."""


def until_first_lease(filled: Path) -> Start:
    """On a copy of `filled`."""
    with processes.folder() as copy:
        shutil.copytree(filled, copy, dirs_exist_ok=True)
        started = time.monotonic()
        with processes.serving(copy) as running, httpx.Client(base_url=running.url, timeout=60) as http:
            while True:
                try:
                    answer = http.post("/leases", json={"max_groups": LEASED, "min_groups": LEASED, "wait_s": 30})
                    break
                except httpx.ConnectError:  # it does not listen yet
                    _still(started)
            start = Start(time.monotonic() - started, processes.cpu_seconds(running.pid))
            lease = answer.raise_for_status().json()
            if len(lease["groups"]) != LEASED:
                raise RuntimeError(f"the first lease has {len(lease['groups'])} groups: {lease['status']}")
    return start


def until_ready(engine_url: str) -> Start:
    """From the start on an empty store until /readyz is 200."""
    with processes.folder() as folder:
        (folder / "bench_rewards.py").write_text(REWARDS)
        (folder / "bench.toml").write_text(config(engine_url, in_flight=IN_FLIGHT, prompts="", ready=READY_BOUND))
        started = time.monotonic()
        with processes.serving(folder) as running:
            while not processes.answers_200(f"{running.url}/readyz"):
                _still(started)
            return Start(time.monotonic() - started, processes.cpu_seconds(running.pid))


def _still(started: float) -> None:
    if time.monotonic() > started + processes.START_S:
        raise RuntimeError(f"the service did not start in {processes.START_S:g} s")
    time.sleep(POLL_S)


def measure(rounds: int, *, quick: bool) -> list[Figure]:
    groups = QUICK_GROUPS if quick else GROUPS
    with processes.lean_engine(LATENCY_S) as url, processes.folder() as filled:
        ready = fill(url, filled, groups)
        found = alternate(rounds, {"filled": partial(until_first_lease, filled), "empty": partial(until_ready, url)})
    seconds = {kind: median(start.seconds for start in starts) for kind, starts in found.items()}
    cpu = {kind: shown(median(start.cpu_s for start in starts), "s") for kind, starts in found.items()}
    beside = f"an empty store is ready after {shown(seconds['empty'], 's')}"
    return [
        Figure(
            key="restart_10k_s",
            what=f"restart after kill -9 with {groups:,} outstanding groups ({ready} ready): until the first lease",
            value=seconds["filled"],
            unit="s",
            beside=f"{beside} (CPU {cpu['filled']} and {cpu['empty']})",
            goal=below(2),
            runs=tuple(start.seconds for start in found["filled"]),
        )
    ]


if __name__ == "__main__":
    run_alone(measure, "restart with 10,000 outstanding groups until the first lease")
