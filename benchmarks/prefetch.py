"""How long a trainer waits between two steps: `client.leases` beside `client.prefetch`, on one running service.

What is measured: from the end of a step's computing until the next lease is in hand, with the ack of the one before.
The service runs in a process of its own with SQLite in FULL and a reward on, and generates on a lean engine all the
while. Computing is sleeping: a trainer on a GPU waits for it with the interpreter free, and that is when prefetch
works; one that computes in Python holds the interpreter and gains less. The two ways take turns.

    python -m benchmarks.prefetch [--rounds 5] [--quick]
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from functools import partial

from benchmarks.load import PROMPT_IDS
from benchmarks.report import Figure, alternate, median, percentile, run_alone
from benchmarks.serving import lean_engine, service, submit
from trainer_client import Lease, RolloutClient

GROUPS, ROLLOUTS, TOKENS = 8, 16, 1024
"""Of one lease; TOKENS are a rollout's completion."""
COMPUTE_S = 0.4
STEPS, QUICK_STEPS = 5, 2
"""Of one run."""
WARM_UP_STEPS = 1
"""The first lease of a way imports what it needs, and nothing was fetched ahead of it."""
LATENCY_S = 0.05

Waits = list[float]
"""Seconds before each step."""


class Trainer:
    """Takes steps, each under a new version."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._versions = itertools.count(1)

    def leases(self, steps: int) -> Waits:
        taken = self._client.leases(max_groups=GROUPS, min_groups=GROUPS)
        return self._train(taken, steps)  # the lease in hand at the end is given back with `taken`

    def prefetch(self, steps: int) -> Waits:
        with self._client.prefetch(max_groups=GROUPS, min_groups=GROUPS) as ahead:
            return self._train(ahead, steps)

    def _train(self, leases: Iterator[Lease], steps: int) -> Waits:
        waits = []
        for step in range(WARM_UP_STEPS + steps):
            asked = time.perf_counter()
            lease = next(leases)
            waited = time.perf_counter() - asked
            if len(lease.groups) != GROUPS:
                raise RuntimeError(f"a lease of {len(lease.groups)} groups")
            if step >= WARM_UP_STEPS:
                waits.append(waited)
            time.sleep(COMPUTE_S)
            self._client.post_version(next(self._versions))
        return waits


def measure(rounds: int, *, quick: bool) -> list[Figure]:
    steps = QUICK_STEPS if quick else STEPS
    tables: dict[str, dict[str, object]] = {
        "groups": {"num_generations": ROLLOUTS, "max_staleness": 1000, "max_ready_groups": 64},
        "sampling": {"max_tokens": TOKENS},
    }
    with (
        lean_engine(LATENCY_S, tokens=TOKENS) as engine,
        service(engine.url, tables) as running,
        RolloutClient(running.url) as client,
    ):
        submit(running.url, 2 * rounds * (WARM_UP_STEPS + steps + 2) * GROUPS, PROMPT_IDS)
        trainer = Trainer(client)
        found = alternate(
            rounds, {"leases": partial(trainer.leases, steps), "prefetch": partial(trainer.prefetch, steps)}
        )
    return [_figure(way, found[way], found["leases" if way == "prefetch" else "prefetch"]) for way in found]


def _figure(way: str, runs: list[Waits], others: list[Waits]) -> Figure:
    waits, beside = ([wait for run in some for wait in run] for some in (runs, others))
    other = "prefetch" if way == "leases" else "leases"
    return Figure(
        key=f"wait_ms_median_{way}",
        what=f"a trainer's wait between steps with client.{way}, {GROUPS} groups of {ROLLOUTS} x {TOKENS} tokens",
        value=1000 * median(waits),
        unit="ms",
        beside=f"p95 {1000 * percentile(waits, 0.95):.1f} ms; {other} {1000 * median(beside):.1f} ms",
        runs=tuple(1000 * median(run) for run in runs),
    )


if __name__ == "__main__":
    run_alone(measure, "a trainer's wait between steps, with and without prefetch")
