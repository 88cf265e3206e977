"""One setting of the staleness simulation on the real service over HTTP, ten times as fast as its clock says.

What always holds: the service, its store, the engine and the trainer's calls are real; only the engine's tokens and the
trainer's step are made up. Both sides count alike: trained tokens as those of acked groups, decoded ones as the
engine's own counter has them.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.processes import CLIENT_CORE, answers_200, engine, process, wait_for
from benchmarks.staleness_world import KEEP_PENDING, Setting, simulate
from trainer_client import RolloutClient
from trainer_client.types import Lease

ROOT = Path(__file__).resolve().parents[1]
SPEED = 10.0
"""Virtual seconds in one real one: slow enough that neither the service nor the engine is what limits."""
WARM_UP_S, WINDOW_S = 300.0, 1200.0
"""Virtual seconds; two and a half real minutes in all."""
REWARDS = """
def brevity(prompts, completions, completion_ids, **columns):
    return [1.0 / len(ids) for ids in completion_ids]
"""
CONFIG = """
[[engines]]
url = "{engine}"
max_inflight = {slots}
[groups]
num_generations = {num_generations}
max_staleness = {max_staleness}
on_stale = "{on_stale}"
max_ready_groups = {max_ready_groups}
[dispatch]
max_inflight_rollouts = {slots}
admission = "{admission}"
groups_per_step = {groups_per_step}
[sampling]
max_tokens = {max_tokens}
allow_raw_logprobs = true
[[rewards]]
name = "brevity"
function = "check_rewards:brevity"
[store]
url = "sqlite:///{folder}/check.db"
"""


@dataclass(kw_only=True, slots=True)
class Seen:
    """What the trainer of the real run counted, in virtual seconds."""

    seconds: float
    trained: int
    decoded: int
    groups: int
    staleness: int


@contextmanager
def _service(setting: Setting, engine_url: str) -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=ROOT))  # a real disk, where the temporary folder may be memory
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        facts = {name: getattr(setting, name) for name in setting.__slots__}
        (folder / "check_rewards.py").write_text(REWARDS)
        (folder / "check.toml").write_text(CONFIG.format(engine=engine_url, folder=folder, **facts))
        command = [sys.executable, "-m", "rollout_service", "serve", "--config", str(folder / "check.toml")]
        command += ["--port", str(port), "--log-level", "error"]
        with process(command, CLIENT_CORE, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}):
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: answers_200(f"{url}/readyz"), 60, "the service is ready")
            yield url
    finally:
        shutil.rmtree(folder)


def _decoded(engine_url: str) -> int:
    with urllib.request.urlopen(f"{engine_url}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    found = re.search(r"^vllm:generation_tokens_total\S* (\S+)$", page, re.MULTILINE)
    if found is None:
        raise RuntimeError("the engine does not say how many tokens it has generated")
    return int(float(found[1]))


def _feed(url: str, stop: threading.Event) -> None:
    numbers = itertools.count()
    with RolloutClient(url) as client:
        while not stop.wait(0.05):
            if client.status().groups["pending"] < KEEP_PENDING:
                rows = [{"prompt_id": f"p{next(numbers)}", "prompt_token_ids": [65, 66]} for _ in range(KEEP_PENDING)]
                client.submit(rows)


def run(setting: Setting, *, warm_up_s: float, window_s: float) -> Seen:
    """The real run; times in virtual seconds."""
    options = {
        "--tokens-per-s": setting.tokens_per_s * SPEED,
        "--batch-half": setting.batch_half,
        "--max-num-seqs": setting.max_num_seqs,
        "--mean-tokens": setting.mean_tokens,
        "--sigma": setting.sigma,
        "--max-model-len": 2 * setting.max_tokens,
    }
    words = [str(word) for option in options.items() for word in option]
    with engine(*words) as engine_url, _service(setting, engine_url) as url:
        stop = threading.Event()
        feeder = threading.Thread(target=_feed, args=(url, stop), daemon=True)
        feeder.start()
        try:
            with RolloutClient(url) as client:
                return _train(client, engine_url, setting, warm_up_s=warm_up_s, window_s=window_s)
        finally:
            stop.set()
            feeder.join()


def _train(client: RolloutClient, engine_url: str, setting: Setting, *, warm_up_s: float, window_s: float) -> Seen:
    """Steps until the window is over; it begins and ends where a step does."""
    begun = time.monotonic()
    before: tuple[float, int] | None = None
    seen = Seen(seconds=0, trained=0, decoded=0, groups=0, staleness=0)
    for step in itertools.count(1):
        if before is None and time.monotonic() - begun >= warm_up_s / SPEED:
            before = (time.monotonic(), _decoded(engine_url))
        lease = _lease(client, setting)
        leased = time.monotonic()
        tokens = sum(int(np.sum(sample.completion_mask, dtype=np.int64)) for sample in lease.samples)
        time.sleep(max(0.0, leased + setting.step_s / SPEED - time.monotonic()))
        client.post_version(step)
        client.ack(lease)
        if before is None:
            continue
        seen.trained += tokens
        seen.groups += len(lease.groups)
        seen.staleness += sum(group.staleness for group in lease.groups)
        seen.seconds = (time.monotonic() - before[0]) * SPEED
        if seen.seconds >= window_s:
            seen.decoded = _decoded(engine_url) - before[1]
            break
    return seen


def _lease(client: RolloutClient, setting: Setting) -> Lease:
    size = setting.groups_per_step
    while not (lease := client.lease(max_groups=size, min_groups=size, wait_s=30)).groups:
        pass
    return lease


def check(setting: Setting) -> None:
    """Print both."""
    print(f"{setting}\nthe real service, {(WARM_UP_S + WINDOW_S) / SPEED:.0f} s:", flush=True)
    seen = run(setting, warm_up_s=WARM_UP_S, window_s=WINDOW_S)
    tally = simulate(setting, warm_up_s=WARM_UP_S, window_s=4 * WINDOW_S)
    rows = {
        "trained tokens a virtual second": (seen.trained / seen.seconds, tally.trained_per_s),
        "decoded tokens a virtual second": (seen.decoded / seen.seconds, tally.decoded / tally.seconds),
        "decoded and not trained": (1 - seen.trained / seen.decoded, 1 - tally.trained / tally.decoded),
        "mean staleness": (seen.staleness / seen.groups, tally.mean_staleness),
    }
    print(f"{'':<34}{'service':>10}{'simulated':>12}{'ratio':>8}")
    for what, (real, simulated) in rows.items():
        print(f"{what:<34}{real:>10.3f}{simulated:>12.3f}{real / simulated if simulated else 1:>8.3f}")
