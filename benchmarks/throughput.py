"""Completions a second and CPU per completion: the service beside a bare aiohttp client, on the same simulated engine.

What is measured: 1,024 completions of 64 tokens in flight, 2 s each. The service runs with SQLite in FULL on a real
disk and a reward on; its completions are counted when the ack of their group was answered. Runs alternate, medians
count, so that a noisy machine is noisy for both. Writes bench.json.

    python -m benchmarks.throughput [--rounds 3] [--window 12] [--store sqlite|memory]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.load import ENGINE_OPTIONS
from benchmarks.processes import CLIENT_CORE, ENGINE_CORE, answers_200, engine, pinned, process, wait_for

ROOT = Path(__file__).resolve().parents[1]
IN_FLIGHT, LATENCY_S, GROUP = 1024, 2.0, 8
WARM_UP_S = 6.0
"""Three completions' time: the start is a wave, the window wants the mixed state."""
REWARDS = """
def brevity(prompts, completions, completion_ids, **columns):
    return [1.0 / len(ids) for ids in completion_ids]
"""
CONFIG = """
[[engines]]
url = "{engine}"
max_inflight = 8192
[groups]
num_generations = {group}
max_ready_groups = 4096
max_pending_groups = 10000
[dispatch]
max_inflight_rollouts = {in_flight}
[sampling]
max_tokens = 64
[[rewards]]
name = "brevity"
function = "bench_rewards:brevity"
[store]
url = "{store}"
"""

Figures = dict[str, float]


def bare(url: str, in_flight: int, window_s: float) -> Figures:
    command = [sys.executable, "-m", "benchmarks.bare", url, str(in_flight), str(WARM_UP_S), str(window_s)]
    return _last_line(pinned(command, CLIENT_CORE))


def service(url: str, window_s: float, store: str) -> Figures:
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=ROOT))  # a real disk, where the temporary folder may be memory
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (folder / "bench_rewards.py").write_text(REWARDS)
        stored = "memory://" if store == "memory" else f"sqlite:///{folder}/bench.db"
        config = CONFIG.format(engine=url, group=GROUP, in_flight=IN_FLIGHT, store=stored)
        (folder / "bench.toml").write_text(config)
        command = [sys.executable, "-m", "rollout_service", "serve", "--config", str(folder / "bench.toml")]
        command += ["--port", str(port), "--log-level", "error"]
        with process(command, CLIENT_CORE, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}) as child:
            base = f"http://127.0.0.1:{port}"
            wait_for(lambda: answers_200(f"{base}/readyz"), 60, "the service is ready")
            trainer = [sys.executable, "-m", "benchmarks.trainer", base, str(child.pid)]
            return _last_line(pinned([*trainer, str(WARM_UP_S), str(window_s)], ENGINE_CORE))
    finally:
        shutil.rmtree(folder)


def _last_line(command: list[str]) -> Figures:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def median(runs: list[Figures], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def main() -> None:
    arguments = argparse.ArgumentParser(description="throughput beside a bare client")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--window", type=float, default=12.0)
    arguments.add_argument("--output", type=Path, default=ROOT / "bench.json")
    given = arguments.parse_args()
    runs: dict[str, list[Figures]] = {"bare": [], "service": [], "service, memory store": []}
    with engine("--latency", str(LATENCY_S), *ENGINE_OPTIONS) as url:
        for number in range(given.rounds):
            runs["bare"].append(bare(url, IN_FLIGHT, given.window))
            runs["service"].append(service(url, given.window, "sqlite"))
            runs["service, memory store"].append(service(url, given.window, "memory"))
            latest = {name: found[-1] for name, found in runs.items()}
            print(f"round {number + 1} of {given.rounds}: {latest}", flush=True)
        most = bare(url, 4 * IN_FLIGHT, given.window)
    print(f"\n{IN_FLIGHT} in flight, {LATENCY_S:g} s, 64 tokens; medians of {given.rounds} alternating runs")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print(f"{'client':<24}{'completions/s':>14}{'CPU ms each':>14}")
    for name, found in runs.items():
        print(f"{name:<24}{median(found, 'per_s'):>14.1f}{median(found, 'cpu_ms'):>14.3f}")
    print(f"\nThe engine is not the limit: at {4 * IN_FLIGHT} in flight it gave a bare client {most['per_s']:.0f}/s.")
    result = {
        "throughput_ratio_1024": median(runs["service"], "per_s") / median(runs["bare"], "per_s"),
        "cpu_ms_per_completion": median(runs["service"], "cpu_ms"),
        "cpu_ms_bare": median(runs["bare"], "cpu_ms"),
        "durability_cost_1024": 1 - median(runs["service"], "per_s") / median(runs["service, memory store"], "per_s"),
        "engine_most_per_s": most["per_s"],
    }
    given.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"throughput_ratio_1024 = {result['throughput_ratio_1024']:.3f}  -> {given.output.name}")


if __name__ == "__main__":
    main()
