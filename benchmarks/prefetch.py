"""How long a trainer waits between two steps: `client.leases` beside `client.prefetch`, on one running service.

What is measured: from the end of a step's computing until the next lease is in hand, with the ack of the one before.
The service runs in a process of its own with SQLite in FULL and a reward on, and generates on the simulated engine all
the while. Computing is sleeping: a trainer on a GPU waits for it with the interpreter free, and that is when prefetch
works; `--busy` computes in Python instead, which holds the interpreter and competes with the engine for the core. The
two ways take turns, so that a noisy machine is noisy for both. Adds its figures to bench.json.

    python -m benchmarks.prefetch [--steps 16] [--compute-ms 500] [--busy]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.load import PROMPT_IDS
from benchmarks.processes import CLIENT_CORE, answers_200, engine, process, wait_for
from trainer_client import Lease, RolloutClient
from trainer_client.binary import ACCEPT

ROOT = Path(__file__).resolve().parents[1]
GROUPS, ROLLOUTS, TOKENS = 8, 16, 1024
"""Of one lease; TOKENS are a rollout's completion."""
TURNS = 2
WARM_UP_STEPS = 1
"""The first lease imports numpy and fills the service's caches."""
REWARDS = """
def brevity(prompts, completions, completion_ids, **columns):
    return [1.0 / len(ids) for ids in completion_ids]
"""
CONFIG = """
[[engines]]
url = "{engine}"
[groups]
num_generations = {rollouts}
max_staleness = 1000
[dispatch]
max_inflight_rollouts = 256
[sampling]
max_tokens = {tokens}
[[rewards]]
name = "brevity"
function = "bench_rewards:brevity"
[store]
url = "sqlite:///bench.db"
"""


@contextmanager
def service(engine_url: str) -> Iterator[str]:
    """A service on a free port; its URL."""
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=ROOT))  # a real disk, where the temporary folder may be memory
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (folder / "bench_rewards.py").write_text(REWARDS)
        (folder / "bench.toml").write_text(CONFIG.format(engine=engine_url, rollouts=ROLLOUTS, tokens=TOKENS))
        command = [sys.executable, "-m", "rollout_service", "serve", "--config", "bench.toml"]
        command += ["--port", str(port), "--log-level", "error"]
        with process(command, CLIENT_CORE, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}):
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: answers_200(f"{url}/readyz"), 60, "the service is ready")
            yield url
    finally:
        shutil.rmtree(folder)


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(1000))


class Trainer:
    """Takes steps and writes down how long it waited for each, in seconds."""

    def __init__(self, client: RolloutClient, compute: Callable[[], None]) -> None:
        self._client, self._compute = client, compute
        self._versions = itertools.count(1)
        self.waits: dict[str, list[float]] = {"leases": [], "prefetch": []}

    def train(self, way: str, steps: int) -> None:
        if way == "prefetch":
            with self._client.prefetch(max_groups=GROUPS, min_groups=GROUPS) as ahead:
                self._train(way, ahead, steps)
        else:
            leases = self._client.leases(max_groups=GROUPS, min_groups=GROUPS)
            self._train(way, leases, steps)  # the lease in hand at the end is given back with `leases`

    def _train(self, way: str, leases: Iterator[Lease], steps: int) -> None:
        for step in range(WARM_UP_STEPS + steps):
            asked = time.perf_counter()
            lease = next(leases)
            waited = time.perf_counter() - asked
            if len(lease.groups) != GROUPS:
                raise RuntimeError(f"a lease of {len(lease.groups)} groups")
            if step >= WARM_UP_STEPS:
                self.waits[way].append(waited)
            self._compute()
            self._client.post_version(next(self._versions))


def lease_bytes(url: str) -> int:
    """The size of one lease as trainers get it; it is given back."""
    body = {"max_groups": GROUPS, "min_groups": GROUPS, "wait_s": 60, "request_id": "size"}
    with httpx.Client(base_url=url, timeout=90) as http:
        answer = http.post("/leases", json=body, headers={"accept": ACCEPT}).raise_for_status()
        lease_id = http.post("/leases", json=body).raise_for_status().json()["lease_id"]
        http.post(f"/leases/{lease_id}/release").raise_for_status()
    return len(answer.content)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    arguments = argparse.ArgumentParser(description="a trainer's wait between steps, with and without prefetch")
    arguments.add_argument("--steps", type=int, default=16, help="of each way")
    arguments.add_argument("--compute-ms", type=float, default=500.0, help="of one step")
    arguments.add_argument("--busy", action="store_true", help="compute in Python instead of sleeping")
    arguments.add_argument("--output", type=Path, default=ROOT / "bench.json")
    given = arguments.parse_args()
    if given.steps < TURNS:
        arguments.error(f"--steps: at least {TURNS}, one a turn")
    seconds = given.compute_ms / 1000
    options = ("--latency", "0.05", "--lengths", "fixed", "--mean-tokens", str(TOKENS))
    with engine(*options) as engine_url, service(engine_url) as url, RolloutClient(url) as client:
        trainer = Trainer(client, (lambda: busy(seconds)) if given.busy else (lambda: time.sleep(seconds)))
        steps = given.steps // TURNS
        needed = TURNS * 2 * (WARM_UP_STEPS + steps + 2) * GROUPS
        client.submit([{"prompt_id": f"p{number}", "prompt_token_ids": PROMPT_IDS} for number in range(needed)])
        size = lease_bytes(url)
        for _ in range(TURNS):
            for way in trainer.waits:
                trainer.train(way, steps)
    report(trainer.waits, size, given)


def report(waits: dict[str, list[float]], size: int, given: argparse.Namespace) -> None:
    how = "busy in Python" if given.busy else "sleeping, as a trainer does that waits for its GPU"
    print(f"{GROUPS} groups of {ROLLOUTS} rollouts of {TOKENS} tokens a lease, {size / 1e6:.2f} MB in binary")
    print(f"{given.compute_ms:g} ms of computing a step ({how}); {len(waits['leases'])} steps each, in {TURNS} turns")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print(f"{'wait between steps':<22}{'median ms':>12}{'p95 ms':>12}{'most ms':>12}{'of the time':>14}")
    result = {}
    for way, found in waits.items():
        figures = (statistics.median(found), percentile(found, 0.95), max(found))
        share = sum(found) / (sum(found) + len(found) * given.compute_ms / 1000)
        print(f"{way:<22}" + "".join(f"{1000 * value:>12.1f}" for value in figures) + f"{share:>14.1%}")
        result[f"wait_ms_median_{way}"], result[f"wait_ms_p95_{way}"] = 1000 * figures[0], 1000 * figures[1]
    known = json.loads(given.output.read_text()) if given.output.exists() else {}
    given.output.write_text(json.dumps(known | result, indent=2) + "\n")


if __name__ == "__main__":
    main()
