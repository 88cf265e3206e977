"""What is told of groups is what was stored of them, however late its answer comes."""

from __future__ import annotations

import asyncio
from typing import Any

from rollout_service.core.model import GroupState
from rollout_service.core.scheduler import Policy
from tests.fakes import submission, until
from tests.replicas.world import Member, World

S = GroupState


def answers_held(world: World, member: Member, state: GroupState) -> tuple[asyncio.Event, asyncio.Event]:
    """(committed, go): the commit that brings g-1 to `state` is answered when `go` is set."""
    transact, committed, go = member.store.transact, asyncio.Event(), asyncio.Event()

    async def held(work: Any, **how: Any) -> Any:
        result = await transact(work, **how)
        task = asyncio.current_task()
        if task is not None and task.get_name() == "committer" and world.memory.content.groups[1].state is state:
            committed.set()
            await go.wait()
        return result

    member.store.transact = held
    return committed, go


async def test_what_was_committed_is_told_though_claims_were_taken_before_its_answer_came():
    async with World(policy=Policy(slots=8)) as world:
        one, two = await world.join(), await world.join()
        two.engines.capacity = 0
        await two.door.submit([submission("a"), submission("b")])
        await until(lambda: len(one.runner.held) == 8, "at work")
        committed, go = answers_held(world, one, S.READY)
        one.runner.release("g-1")
        await committed.wait()
        await two.door.cancel("g-2")
        await until(lambda: one.door.resident.known.taken == 1, "heard of")
        go.set()
        await until(lambda: not one.door.resident.claims, "settled")
        await one.door.resident.settled()
        told = [moved.after.state for moved in one.observer.moves if moved.after.seq == 1]
        assert told == [S.GENERATING, S.SCORING, S.READY]
        assert len(one.observer.settled) == 4
        (dropped,) = [moved for x in (one, two) for moved in x.observer.moves if moved.after.state is S.DROPPED]
        assert dropped.after.seq == 2


async def test_a_group_that_went_stale_after_its_last_commit_is_told_once():
    async with World(policy=Policy(slots=8)) as world:
        one, two = await world.join(), await world.join()
        two.engines.capacity = 0
        await two.door.submit([submission("a")])
        await until(lambda: len(one.runner.held) == 4, "at work")
        committed, go = answers_held(world, one, S.READY)
        one.runner.release()
        await committed.wait()
        await two.door.post_version(100)  # the group is stored as ready, and one does not know it yet
        await until(lambda: one.door.version == 100, "heard of")
        go.set()
        await until(lambda: not one.door.resident.claims, "settled")
        await one.door.resident.settled()
        told = [moved.after.state for x in (one, two) for moved in x.observer.moves]
        assert sorted(told) == sorted([S.GENERATING, S.SCORING, S.READY, S.STALE])
