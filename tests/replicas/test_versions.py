"""What a version costs a replica, and when."""

from __future__ import annotations

import asyncio
from typing import Any

from rollout_service.core.group import GroupPolicy
from rollout_service.core.model import GroupState
from rollout_service.core.scheduler import Policy
from tests.fakes import submission, until
from tests.replicas.world import Member, World

NO_STALENESS = Policy(group=GroupPolicy(max_staleness=0), slots=4)


def hold_commits(member: Member) -> asyncio.Event:
    """The commits of `member` wait until the event is set."""
    transact, go = member.store.transact, asyncio.Event()

    async def held(work: Any, **how: Any) -> Any:
        task = asyncio.current_task()
        if task is not None and task.get_name() == "committer":
            await go.wait()
        return await transact(work, **how)

    member.store.transact = held
    return go


async def test_what_went_stale_is_aborted_before_the_replica_can_commit_it():
    async with World(policy=NO_STALENESS) as world:
        one, two = await world.join(), await world.join()
        one.engines.capacity = 0
        await one.door.submit([submission("a")])
        await until(lambda: len(two.runner.held) == 4, "two at work")
        go = hold_commits(two)
        await one.door.post_version(1)
        await until(lambda: len(two.runner.cancelled) == 4, "aborted")
        assert (await world.counts())[GroupState.GENERATING] == 1, "not committed yet"
        go.set()
        await until(lambda: not two.door.resident.claims, "settled")
        assert (await world.counts())[GroupState.STALE] == 1
