"""Claims that are taken back while word of them is on its way."""

from __future__ import annotations

import asyncio
from typing import Any

from rollout_service.core.scheduler import Policy
from tests.fakes import passes, submission, until
from tests.replicas.world import Member, World


def answers_held(member: Member, task: str) -> tuple[asyncio.Event, asyncio.Event]:
    """(committed, go): what `task` asks the store next is answered when `go` is set."""
    transact, committed, go = member.store.transact, asyncio.Event(), asyncio.Event()

    async def held(work: Any, **how: Any) -> Any:
        result = await transact(work, **how)
        running = asyncio.current_task()
        if running is not None and running.get_name() == task and result is not None:
            committed.set()
            await go.wait()
        return result

    member.store.transact = held
    return committed, go


async def test_a_claim_that_was_taken_back_before_its_answer_came_is_not_worked_for():
    async with World(policy=Policy(slots=4)) as world:
        one, two = await world.join(), await world.join()
        two.engines.capacity = 0
        await two.door.post_version(5)
        claimed, adopt = answers_held(one, "claims")
        await two.door.submit([submission("a")])
        await claimed.wait()
        asked, told = answers_held(one, "watch")
        posted = asyncio.create_task(two.door.post_version(4, reset=True))
        await asked.wait()  # which of its claims are still its own: before it knows of this one
        adopt.set()
        await passes()
        told.set()
        await posted
        await until(lambda: [attempt for _, attempt, _ in one.runner.held] == [2] * 4, "at work on what there is")
        assert {job.attempt for job in one.runner.jobs} == {2}
        assert one.door.resident.claims == await one.store.transact(
            lambda tx: tx.claims_of(one.door.resident.replica_id)
        )
