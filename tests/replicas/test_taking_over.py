"""Groups of a replica that has gone are worked for by those that can."""

from __future__ import annotations

import asyncio

import pytest

from rollout_service.core.model import GroupState
from rollout_service.core.scheduler import Policy
from tests.fakes import submission, until
from tests.replicas.world import World

S = GroupState


@pytest.mark.parametrize("engines", ["busy", "gone"])
async def test_a_group_that_only_has_to_be_scored_waits_for_no_slot(engines: str):
    async with World(policy=Policy(slots=4)) as world:
        one, two = await world.join(), await world.join()
        two.engines.capacity = 0
        one.scorer.hold = asyncio.Event()
        await one.door.submit([submission("a")])
        await until(lambda: len(one.runner.held) == 4, "at work")
        one.runner.release()
        await until(lambda: one.scorer.jobs, "being scored")
        if engines == "busy":
            one.engines.capacity, two.engines.capacity = 0, 10
            await one.door.submit([submission("b")])
            await until(lambda: len(two.runner.held) == 4, "every slot in use")
        await one.door.stop()
        world.members.remove(one)
        await until(lambda: two.scorer.jobs, "scored by the other")
        await until(lambda: [m.after.seq for m in two.observer.moves if m.after.state is S.READY] == [1], "ready")
        assert len(two.runner.held) == (4 if engines == "busy" else 0)
