"""A queue that empties gives its slots back at once: measured at the engine of a whole service."""

from __future__ import annotations

import time
from pathlib import Path

from rollout_service.simulator import Simulator, SimulatorSettings
from tests.durability.forked import Forked
from tests.durability.lives import Lives
from tests.durability.tale import judge
from tests.service import prompt

SLOTS, READY = 64, 16
REFILLED_WITHIN_S = 1.0


async def test_when_a_lease_empties_the_ready_queue_every_slot_is_busy_again_within_a_second(
    lives: Lives, tmp_path: Path
):
    async with Simulator(SimulatorSettings(latency=0.0, mean_tokens=4)) as engine, judge() as judge_url:
        engine.faults.on("p:later", hang=True)
        service = Forked(
            lives,
            tmp_path,
            engine.url,
            judge_url,
            groups={"num_generations": 4, "max_ready_groups": READY},
            dispatch={"max_inflight_rollouts": SLOTS},
        )
        await service.start()
        try:
            await service.submit(*(prompt(f"first{number}") for number in range(READY)))
            while (await service.counts())["ready"] < READY:
                pass
            await service.submit(*(prompt(f"later{number}") for number in range(SLOTS)))
            assert (await service.status())["blocked"] == "max_ready_groups"
            assert engine.engine.running == 0
            begun = time.monotonic()
            await service.pull(READY)
            await engine.until(lambda engine: engine.engine.running == SLOTS, timeout_s=10)
            took = time.monotonic() - begun
            assert took < REFILLED_WITHIN_S, f"{took:.2f} s"
            assert (await service.status())["slots"] == {"total": SLOTS, "used": SLOTS, "free": 0}
        finally:
            await service.let_go()


async def test_prompts_are_bounded_in_bytes_and_429_says_when_to_come_again(lives: Lives, tmp_path: Path):
    async with Simulator(SimulatorSettings(latency=0.0, mean_tokens=4)) as engine, judge() as judge_url:
        engine.faults.on(None, hang=True)
        service = Forked(lives, tmp_path, engine.url, judge_url, groups={"max_ready_bytes": 2**20})
        await service.start()
        try:
            padding = "x" * 400_000
            await service.submit(prompt("a0", padding=padding), prompt("a1", padding=padding))
            answer = await service.post_prompts(prompt("a2", padding=padding))
            assert answer.status_code == 429, answer.text
            assert int(answer.headers["retry-after"]) >= 1
            assert "max_ready_bytes" in answer.json()["detail"]
            assert (await service.counts())["submitted"] == 2
            await service.submit(prompt("small"))
            await service.http.delete("/groups/g-1")
            await service.submit(prompt("a2", padding=padding))
        finally:
            await service.let_go()
