"""The heartbeat waits for nothing but itself."""

from __future__ import annotations

import asyncio
from typing import Any

from rollout_service.core.scheduler import Policy
from tests.fakes import submission, until
from tests.replicas.world import World

LEASE_S = 1.0


async def test_a_look_for_dead_replicas_that_waits_for_a_lock_costs_no_claims():
    async with World(policy=Policy(slots=4), lease_s=LEASE_S) as world:
        one = await world.join()
        await one.door.submit([submission("a")])
        await until(lambda: len(one.runner.held) == 4, "at work")
        released, beats = asyncio.Event(), 0
        expel, beat = one.store.expel, one.store.beat

        async def waiting() -> Any:
            await released.wait()
            return await expel()

        async def slow(*given: Any, **more: Any) -> Any:
            nonlocal beats
            await asyncio.sleep(LEASE_S / 10)  # a busy network: far from losing anything
            beats += 1
            return await beat(*given, **more)

        one.store.expel, one.store.beat = waiting, slow
        resident = one.door.resident
        await until(lambda: beats >= 12 or resident.away or one.runner.cancelled, "three leases long", within_s=20)
        released.set()
        assert not one.runner.cancelled, f"abandoned after {beats} beats, all answered: {one.door.heart.error}"
