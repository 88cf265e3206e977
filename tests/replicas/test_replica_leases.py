"""Lease calls that meet at several replicas, or follow each other on the same groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rollout_service.core.model import GroupState
from rollout_service.orchestrator import LeaseAnswer, LeaseRequest, LeaseStatus
from rollout_service.orchestrator.waiters import HungUp
from tests.fakes import passes, submission, until
from tests.replicas.test_replicas import at_once
from tests.replicas.world import Member, World

Worlds = Callable[..., World]

S = GroupState
ONE = LeaseRequest(max_groups=1, wait_s=5)
NOW = LeaseRequest(max_groups=1, wait_s=0)


def names(answer: LeaseAnswer) -> list[str]:
    return [payload.group.group_id for payload in answer.payloads]


async def all_ready(world: World, count: int) -> None:
    ready = await world.counts()
    while ready[S.READY] < count:
        await asyncio.sleep(0.005)  # between two looks
        ready = await world.counts()


async def test_a_lease_is_answered_again_with_what_was_acked_under_it_when_an_earlier_one_of_the_group_ends(
    worlds: Worlds,
):
    async with worlds(make_runner=at_once) as world:
        one, two = await world.join(), await world.join()
        await one.door.submit([submission(name) for name in "abc"])
        await all_ready(world, 3)
        first = await one.door.lease(LeaseRequest(max_groups=2, wait_s=5))
        assert first.lease is not None
        assert names(first) == ["g-1", "g-2"]
        await two.door.release(first.lease.lease_id, ["g-1"])
        ask = LeaseRequest(max_groups=2, wait_s=5, request_id="step-1")
        second = await two.door.lease(ask)
        assert second.lease is not None
        assert names(second) == ["g-1", "g-3"]
        await one.door.ack(second.lease.lease_id, ["g-1"])
        await two.door.ack(first.lease.lease_id, ["g-2"])  # the first lease is over, the second lives
        again = await one.door.lease(ask)
        assert names(again) == ["g-1", "g-3"]
        assert again.payloads[0].rollouts == second.payloads[0].rollouts
        await one.door.ack(second.lease.lease_id, None)
        payloads = await one.store.payloads([1, 2, 3])
        assert [payload.rollouts for payload in payloads] == [{}, {}, {}], "nothing is kept for ever"


@pytest.mark.parametrize("end", ["expire", "release", "ack"])
async def test_a_payload_goes_with_the_lease_it_was_acked_under_however_the_earlier_one_ends(worlds: Worlds, end: str):
    async with worlds(make_runner=at_once) as world:
        one, two = await world.join(), await world.join()
        await one.door.submit([submission(name) for name in "abc"])
        await all_ready(world, 3)
        short = LeaseRequest(max_groups=2, wait_s=5, lease_s=1 if end == "expire" else 600)
        first = await one.door.lease(short)
        assert first.lease is not None
        await one.door.release(first.lease.lease_id, ["g-1"])
        ask = LeaseRequest(max_groups=2, wait_s=5, request_id="step-1")
        second = await two.door.lease(ask)
        assert second.lease is not None
        await two.door.ack(second.lease.lease_id, ["g-1"])
        match end:
            case "expire":
                world.clock.now += 2
                while (await one.store.lease(first.lease.lease_id)).state == "live":
                    await asyncio.sleep(0.005)  # between two looks
            case "release":
                await two.door.release(first.lease.lease_id, None)
            case "ack":
                await two.door.ack(first.lease.lease_id, ["g-2"])
        assert names(await one.door.lease(ask)) == names(second)


def held_transactions(member: Member) -> tuple[asyncio.Event, asyncio.Event]:
    """(begun, go): from now on the member's transactions begin when `go` is set."""
    transact, begun, go = member.store.transact, asyncio.Event(), asyncio.Event()

    async def held(work: Any, **how: Any) -> Any:
        begun.set()
        await go.wait()
        return await transact(work, **how)

    member.store.transact = held
    return begun, go


@pytest.mark.parametrize(("groups", "status"), [(2, LeaseStatus.OK), (0, LeaseStatus.EXHAUSTED)])
async def test_a_caller_that_will_not_wait_is_looked_for_though_another_is_being_served(
    groups: int, status: LeaseStatus
):
    async with World(make_runner=at_once) as world:
        one = await world.join()
        await one.door.submit([submission(f"p{n}") for n in range(groups)], final=True)
        await all_ready(world, groups)
        await until(lambda: not one.door.resident.claims, "settled")
        begun, go = held_transactions(one)
        first = asyncio.create_task(one.door.lease(ONE))
        await begun.wait()
        second = asyncio.create_task(one.door.lease(NOW))
        await passes()
        go.set()
        answers = await asyncio.gather(first, second)
        assert [answer.status for answer in answers] == [status, status]
        assert [name for answer in answers for name in names(answer)] == [f"g-{n + 1}" for n in range(groups)]


async def test_a_caller_that_will_not_wait_is_not_kept_by_one_that_waits_for_more():
    async with World(make_runner=at_once) as world:
        one = await world.join()
        await one.door.submit([submission("a")])
        await all_ready(world, 1)
        first = asyncio.create_task(one.door.lease(LeaseRequest(max_groups=2, min_groups=2, wait_s=5)))
        await until(lambda: len(one.door._serving.line), "in the line")
        async with asyncio.timeout(2):
            assert (await one.door.lease(NOW)).status is LeaseStatus.EMPTY
        await one.door.submit([submission("b")])
        assert names(await first) == ["g-1", "g-2"]


@pytest.mark.parametrize("moment", [0, 1, 2, 3, 5, 8, 13, 21])
async def test_one_of_two_callers_with_one_request_id_hangs_up_and_there_is_one_lease(worlds: Worlds, moment: int):
    async with worlds(make_runner=at_once) as world:
        one, two = await world.join(), await world.join()
        await one.door.submit([submission("a"), submission("b")])
        await all_ready(world, 2)
        ask = LeaseRequest(max_groups=1, wait_s=5, request_id="step-1")
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        calls = [asyncio.create_task(one.door.lease(ask, gone)), asyncio.create_task(two.door.lease(ask))]
        await passes(moment)
        gone.set_result(None)
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(second, LeaseAnswer)
        assert isinstance(first, HungUp) or names(first) == names(second)
        assert len(names(second)) == 1
        assert names(await one.door.lease(ask)) == names(second), "whoever asks again has the same"
        overview = await one.store.overview()
        assert (overview.leases, overview.whole.counts[S.LEASED], overview.whole.counts[S.READY]) == (1, 1, 1)


async def test_a_caller_behind_another_gets_the_lease_its_request_id_made_at_another_replica(worlds: Worlds):
    async with worlds(make_runner=at_once) as world:
        one, two = await world.join(), await world.join()
        await one.door.submit([submission("a")])
        await all_ready(world, 1)
        first_in_line = asyncio.create_task(two.door.lease(LeaseRequest(max_groups=9, min_groups=9, wait_s=30)))
        await until(lambda: len(two.door._serving.line), "in the line")
        ask = LeaseRequest(max_groups=1, wait_s=2, request_id="step-1")
        behind = asyncio.create_task(two.door.lease(ask))
        await until(lambda: len(two.door._serving.line) == 2, "behind it")
        made = await one.door.lease(ask)
        assert names(made) == names(await behind) == ["g-1"]
        first_in_line.cancel()
        await asyncio.gather(first_in_line, return_exceptions=True)
