"""A run of the real service in which everything happens that the dashboard shows, seen by a real Prometheus.

What always holds: Prometheus scraped the service before the run began (so that every rate sees it move) and after it
ended; `at` is the moment of that last scrape, so that what is asked of `prometheus` has one answer, for ever.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from rollout_service.keys import hash_of, new_key
from tests.faults.scripted import Act, Attempt, Engine, Rule, says
from tests.monitoring.tools import JOB, Prometheus, deployed_config, running_prometheus
from tests.service import LiveService, prompt, until

REWARDS = Path(__file__).resolve().parent.parent / "faults" / "fault_rewards.py"
REFUSED = Act(status=400, message="unlucky prompt")
FAILED = 1 + 3 + 4
"""Rollouts that fail: one of `part`, three of `lone`, all of `dead`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """The run once it is over and Prometheus has it."""

    page: str
    """What /metrics answered last."""
    prometheus: Prometheus
    at: float
    """Unix seconds."""
    without_key: int
    """What /metrics answers to whoever has no key."""


async def observe(directory: Path, stack: ExitStack) -> Observed:
    """Run it in `directory`; its Prometheus goes on until `stack` is closed."""
    read_key, key = new_key(), new_key()
    key_file = directory / "read.key"
    key_file.write_text(read_key + "\n")
    shutil.copy(REWARDS, directory)
    keys = [{"name": role, "role": role, "hash": hash_of(k)} for role, k in (("read", read_key), ("admin", key))]
    async with Engine() as engine:
        script(engine)
        live = LiveService(
            directory,
            [engine.url],
            groups={"max_staleness": 0, "halt_after_failed_groups": 0},
            dispatch={"max_attempts": 2},
            server={"keys": keys},
        )
        await live.start()
        live.http.headers["Authorization"] = f"Bearer {key}"
        try:
            config = deployed_config(directory, key_file, **{JOB: f"127.0.0.1:{live.port}", "vllm": None})
            prometheus = await asyncio.to_thread(stack.enter_context, running_prometheus(config))
            await scraped_after(prometheus, 0.0)
            await everything(live, engine)
            page = (await live.http.get("/metrics")).text
            at = await scraped_after(prometheus, time.time())
            await until(lambda: asyncio.to_thread(evaluated, prometheus), 30, "every rule evaluated")
            async with httpx.AsyncClient(base_url=live.http.base_url, trust_env=False) as stranger:
                without_key = (await stranger.get("/metrics")).status_code
        finally:
            await live.stop()
    return Observed(page=page, prometheus=prometheus, at=at, without_key=without_key)


def evaluated(prometheus: Prometheus) -> bool:
    return all(rule["health"] != "unknown" for rule in prometheus.rules())


async def scraped_after(prometheus: Prometheus, moment: float) -> float:
    """The time of the service's newest scrape, once that is later than `moment`."""

    def newest() -> float:
        found = prometheus.query("timestamp(rollout_build_info)")
        return next((value for _, value in found if value > moment), 0.0)

    return float(await until(lambda: asyncio.to_thread(newest), 30, "a scrape"))


def script(engine: Engine) -> None:
    def fails(count: int) -> Rule:
        return lambda attempt: REFUSED if attempt.nth < count else says(attempt.nth / 4)

    def flaky(attempt: Attempt) -> Act:
        return Act(status=500, message="a hiccup") if attempt.nth == 0 else says(0.5)

    engine.on("p:part;", fails(1))
    engine.on("p:lone;", fails(3))
    engine.on("p:dead;", REFUSED)
    engine.on("p:flaky;", flaky)
    engine.on("p:held;", Act(hold=True))


async def everything(live: LiveService, engine: Engine) -> None:
    """Success, failed rollouts, a drop, a failed group, a retry, a reward that raises, a stale group, an abort."""
    await live.submit(prompt("good"), prompt("part"), prompt("flaky"))
    await live.collect(3)
    lone, dead, ill = await live.submit(prompt("lone"), prompt("dead"), prompt("ill", mode="raise"))
    await live.wait_state(lone, "dropped")
    await live.wait_state(dead, "failed")
    await live.wait_state(ill, "dropped")
    old, held = await live.submit(prompt("old"), prompt("held"))
    await live.wait_state(old, "ready")
    await engine.holding(4, "p:held;")
    await live.bump(1)
    await live.wait_state(old, "stale")
    await live.wait_state(held, "stale")
    await engine.holding(0)
    await live.submit(prompt("last"))
    await live.collect(1)
