"""What every client of these benchmarks is asked to do, so that they differ in nothing but themselves.

One request: 16 prompt ids, 64 completion tokens with logprobs. One service: groups of 8, prompts from a file, a reward
function in worker processes, SQLite in FULL.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

MODEL = "simulated"
PROMPT_IDS = list(range(65, 81))
TOKENS = 64
GROUP = 8
SAMPLING = {"max_tokens": TOKENS, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
BODY = json.dumps({"model": MODEL, "prompt": PROMPT_IDS, "logprobs": 0, "return_token_ids": True, **SAMPLING}).encode()

REWARDS = """
def brevity(prompts, completions, completion_ids, **columns):
    return [1.0 / len(ids) for ids in completion_ids]
"""
CONFIG = """
[[engines]]
url = "{engine}"
max_inflight = 16384
[prompts]
path = "{prompts}"
epochs = 0
[groups]
num_generations = {group}
max_ready_groups = {ready}
max_pending_groups = {pending}
[dispatch]
max_inflight_rollouts = {in_flight}
[sampling]
max_tokens = {tokens}
[[rewards]]
name = "brevity"
function = "bench_rewards:brevity"
[reward_workers]
processes = 4
[store]
url = "{store}"
"""
MOST_WARM_UP = 4
"""A client is warm when it has completed as many as it keeps in flight, or after so many times its warm-up."""
PROMPTS_FILE = "prompts.jsonl"


class Times(NamedTuple):
    """How long one run goes, seconds."""

    warm_up_s: float
    window_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run of one client gave in its window."""

    per_s: float
    """Completions a second; of the service: delivered and acked, or finished, whichever is less."""
    cpu_ms: float
    """CPU of the client's process for one completion."""
    helpers_cpu_ms: float = 0.0
    """CPU of its child processes (reward workers) for one completion."""
    finished_per_s: float = math.nan
    """Of the service: completions that came from the engine, acked yet or not."""
    lag_p99_ms: float = math.nan
    """How late its event loop woke a sleeper; NaN where nobody measured."""

    def line(self) -> str:
        return json.dumps(asdict(self))


def config(
    engine: str, *, in_flight: int, store: str = "sqlite:///bench.db", prompts: str = PROMPTS_FILE, ready: int = 4096
) -> str:
    """The service's TOML; `prompts` "" for prompts over HTTP alone."""
    # Twice what is opened at once waits, so that reading the file is part of the run and not of its start.
    pending = max(256, 2 * in_flight // GROUP) if prompts else 16_384
    return CONFIG.format(
        engine=engine,
        in_flight=in_flight,
        store=store,
        prompts=prompts,
        group=GROUP,
        pending=pending,
        tokens=TOKENS,
        ready=ready,
    )


def prompts(count: int) -> str:
    """A dataset of `count` rows, JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows(0, count))


def rows(first: int, count: int) -> list[dict[str, object]]:
    """Rows as a file or `POST /prompts` takes them."""
    return [{"prompt_id": f"p{number}", "prompt_token_ids": PROMPT_IDS} for number in range(first, first + count)]
