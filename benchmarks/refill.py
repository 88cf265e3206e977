"""How soon slots are busy again: after a version cancels everything, and after a full ready queue empties.

What is measured, from the engine's journal: the share of the slots whose requests decode at the engine 250 ms after the
trainer's call was sent. First call: `POST /policy_version` with all slots busy and `max_staleness` 0, so that every
rollout is cancelled. Second call: a lease of all ready groups, while the full ready queue had stopped dispatch and no
rollout was in flight. The figure is the worse of the two, with 256 slots; `benchmarks.aborts` tells it of 1,000.

    python -m benchmarks.refill [--rounds 5] [--quick]
"""

from __future__ import annotations

import time
from functools import partial

import httpx

from benchmarks.aborts import REFILLED_S, SETTLE_S, WITHIN_S, bump_full, tables
from benchmarks.load import GROUP
from benchmarks.processes import wait_for
from benchmarks.report import Figure, alternate, at_least, median, run_alone, shown
from benchmarks.serving import Engine, lean_engine, running_at, service, submit
from trainer_client.binary import ACCEPT

SLOTS = 256
POSTS, QUICK_POSTS = 3, 1
"""Cancels, and full queues, of one run."""
LONG_S, SHORT_S = 600.0, 0.5
"""The engine's latency: nothing ends by itself; a ready queue fills."""


def after_cancel(engine: Engine, slots: int, posts: int) -> float:
    with service(engine.url, tables(slots)) as running:
        sent = bump_full(engine, running, in_flight=slots, posts=posts)
        entries = engine.journal()
    return median(running_at(entries, moment + REFILLED_S, since=moment) / slots for moment in sent)


def after_full_queue(engine: Engine, slots: int, posts: int) -> float:
    """The ready queue holds as many groups as the slots; when it is full, a trainer leases all of it."""
    groups = slots // GROUP
    settings: dict[str, dict[str, object]] = {
        "groups": {"max_ready_groups": groups, "num_generations": GROUP},
        "dispatch": {"max_inflight_rollouts": slots},
    }
    sent = []
    with (
        service(engine.url, settings) as running,
        httpx.Client(base_url=running.url, timeout=60, headers={"accept": ACCEPT}) as http,
    ):
        submit(running.url, (2 * posts + 4) * groups)
        for _ in range(posts):
            wait_for(lambda: _full(running.url, groups) and not engine.running(), WITHIN_S, "the ready queue is full")
            time.sleep(SETTLE_S)
            body = {"max_groups": 1024, "min_groups": groups, "wait_s": 1}
            sent.append(time.monotonic())
            answer = http.post("/leases", json=body).raise_for_status()
            if len(answer.content) < groups * GROUP:
                raise RuntimeError("the full queue gave no lease")
        time.sleep(REFILLED_S + SHORT_S)
        entries = engine.journal()
    return median(running_at(entries, moment + REFILLED_S, since=moment) / slots for moment in sent)


def _full(url: str, groups: int) -> bool:
    ready: int = httpx.get(f"{url}/status", timeout=10).raise_for_status().json()["groups"]["ready"]
    return ready >= groups


def measure(rounds: int, *, quick: bool) -> list[Figure]:
    posts = QUICK_POSTS if quick else POSTS
    with lean_engine(LONG_S) as endless, lean_engine(SHORT_S) as short:
        found = alternate(
            rounds,
            {
                "cancel": partial(after_cancel, endless, SLOTS, posts),
                "full queue": partial(after_full_queue, short, SLOTS, posts),
            },
        )
    worse = min(found, key=lambda way: median(found[way]))
    return [
        Figure(
            key="refill_share_250ms",
            what=f"slots busy again 250 ms after a mass cancel or a full queue that empties, the worse; {SLOTS} slots",
            value=median(found[worse]),
            unit="%",
            beside=", ".join(f"{way} {shown(median(shares), '%')}" for way, shares in found.items()),
            goal=at_least(0.95),
            runs=tuple(found[worse]),
        )
    ]


if __name__ == "__main__":
    run_alone(measure, "how soon slots are busy again")
