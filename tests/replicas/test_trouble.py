"""Replicas that lose their store, their time or their claims; answers that get lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rollout_service.core.group import GroupPolicy
from rollout_service.core.model import GroupState, Scores
from rollout_service.core.records import Batch
from rollout_service.core.scheduler import Policy
from rollout_service.errors import StoreUnavailable
from rollout_service.orchestrator import LeaseRequest, LeaseStatus
from rollout_service.replicas.replica import GIVE_BACK_S
from rollout_service.store.shared import Transaction
from tests.fakes import finished, submission, until
from tests.replicas.test_replicas import at_once
from tests.replicas.world import Member, World

S = GroupState
ASK = LeaseRequest(max_groups=8, wait_s=5)
FOUR = Policy(slots=4)


def counted(thing: Any, name: str) -> Callable[[], int]:
    """How often `thing`'s method was called from now on."""
    method, calls = getattr(thing, name), []

    def call(*given: Any, **named: Any) -> Any:
        calls.append(name)
        return method(*given, **named)

    setattr(thing, name, call)
    return lambda: len(calls)


async def test_a_replica_cut_off_from_the_store_aborts_before_its_claims_end_and_another_goes_on():
    async with World(policy=FOUR, lease_s=1.5) as world:
        one, two = await world.join(), await world.join()
        two.engines.capacity = 0
        await two.door.submit([submission("a")])
        await until(lambda: len(one.runner.held) == 4, "at work")
        one.runner.held["g-1", 1, 0].set_result(finished(0))
        await until(lambda: len(one.observer.settled) == 1, "one is kept")
        one.store.cut = True
        await until(lambda: len(one.runner.cancelled) == 3, "aborted")
        assert not one.door.status().store_ok
        assert not two.runner.jobs, "nobody has taken anything over yet"
        two.engines.capacity = 10
        world.clock.now += 3.0
        await two.door.heart.beat()
        await until(lambda: len(two.runner.held) == 3, "taken over")
        assert {(job.attempt, job.index) for job in two.runner.jobs} == {(1, 1), (1, 2), (1, 3)}
        two.runner.release()
        answer = await two.door.lease(ASK)
        assert sorted(answer.payloads[0].rollouts) == [0, 1, 2, 3]
        one.store.cut = False
        await until(lambda: one.door.status().store_ok, "back")
        await two.door.submit([submission("b"), submission("c")])
        await until(lambda: one.runner.held and two.runner.held, "both at work again")


async def test_a_short_outage_costs_nothing():
    async with World(policy=FOUR, lease_s=5) as world:
        one = await world.join()
        await one.door.submit([submission("a")])
        await until(lambda: len(one.runner.held) == 4, "at work")
        world.memory.broken = "no space left"
        one.runner.release()
        await until(lambda: not one.runner.held, "answered")
        tried = counted(one.store, "transact")
        await until(lambda: tried() >= 5, "tried again and again")
        assert (one.observer.settled, one.runner.cancelled) == ([], [])
        world.memory.broken = None
        answer = await one.door.lease(ASK)
        assert len(answer.payloads[0].rollouts) == 4
        assert len(one.observer.settled) == 4


async def test_a_heartbeat_that_failed_is_tried_again_sooner_than_the_next_is_due():
    async with World(policy=FOUR, lease_s=25) as world:  # a beat every 5 s
        one = await world.join()
        beats = counted(one.store, "beat")
        one.store.cut = True
        await until(lambda: beats() >= 4, "tried again and again", within_s=12)  # not before 15 s, were they only due
        one.store.cut = False
        tried = beats()
        await until(lambda: beats() > tried, "and once more")
        assert one.door.status().store_ok


async def test_a_commit_whose_answer_was_lost_is_made_once():
    async with World(policy=FOUR, lease_s=5) as world:
        one = await world.join()
        await one.door.submit([submission("a")])
        await until(lambda: len(one.runner.held) == 4, "at work")
        me = one.door.resident.replica_id
        one.store.lost_answers = 3  # whoever else asks meanwhile may have one of them
        one.runner.release()
        await until(lambda: one.store.lost_answers == 0 and not one.door.resident.claims, "all settled")
        answer = await one.door.lease(ASK)
        assert len(answer.payloads[0].rollouts) == 4
        assert [str(m.after.state) for m in one.observer.moves].count("ready") == 1
        assert one.door.resident.replica_id == me, "it did not have to begin again"


async def test_a_claim_whose_answer_was_lost_is_found_again():
    async with World(policy=FOUR) as world:
        one, two = await world.join(), await world.join()
        two.engines.capacity = one.engines.capacity = 0
        await two.door.submit([submission("a")])
        one.engines.capacity = 10
        one.store.lost_answers = 1
        one.door.engines_changed()
        await until(lambda: len(one.runner.held) == 4, "at work", within_s=8)
        one.runner.release()
        assert (await two.door.lease(ASK)).status is LeaseStatus.OK


async def test_a_lease_whose_answer_was_lost_goes_back():
    async with World(policy=FOUR, make_runner=at_once) as world:
        one, two = await world.join(), await world.join()
        await two.door.submit([submission("a")])
        await until(lambda: any(m.after.state is S.READY for x in (one, two) for m in x.observer.moves), "ready")
        await until(lambda: not one.door.resident.claims and not two.door.resident.claims, "all settled")
        one.store.lost_answers = 1
        failed = await asyncio.gather(one.door.lease(ASK), return_exceptions=True)
        assert "StoreUnavailable" in repr(failed), failed
        answer = await two.door.lease(ASK)
        assert [payload.group.group_id for payload in answer.payloads] == ["g-1"]


async def test_a_lease_that_was_still_being_made_when_its_answer_was_given_up_goes_back_too():
    async with World(policy=FOUR, make_runner=at_once) as world:
        one, two = await world.join(), await world.join()
        two.engines.capacity = 0
        await two.door.submit([submission("a")])
        await until(lambda: any(m.after.state is S.READY for m in one.observer.moves), "ready")
        await until(lambda: not one.door.resident.claims, "settled")
        transact, going, land = one.store.transact, [], asyncio.Event()

        async def late(work: Any, **how: Any) -> Any:
            await land.wait()
            return await transact(work, **how)

        async def lost(work: Any, **how: Any) -> Any:
            if going or getattr(work, "func", None) != one.door._serving._make:
                return await transact(work, **how)
            going.append(asyncio.create_task(late(work, **how)))
            raise StoreUnavailable("the connection was lost during a commit; it may have taken effect")

        released = counted(one.door, "release")
        one.store.transact = lost
        failed = await asyncio.gather(one.door.lease(ASK), return_exceptions=True)
        assert "StoreUnavailable" in repr(failed), failed
        await until(lambda: released() >= 1, "it was not there")
        land.set()
        await asyncio.gather(*going)
        assert (await world.counts())[S.LEASED] == 1
        answer = await two.door.lease(ASK)
        assert [payload.group.group_id for payload in answer.payloads] == ["g-1"]


async def test_a_replica_taken_for_dead_settles_nothing_and_comes_back():
    async with World(policy=FOUR, lease_s=2) as world:
        one, two = await world.join(), await world.join()
        two.engines.capacity = 0
        await two.door.submit([submission("a")])
        await until(lambda: len(one.runner.held) == 4, "at work")
        world.clock.now += 60  # a host that slept: its time is over, and it does not know
        await two.door.heart.beat()
        one.engines.capacity, two.engines.capacity = 0, 10
        assert await two.store.expel() == ["replica-1"]
        one.runner.release()
        two.door.engines_changed()
        await until(lambda: len(two.runner.held) == 4, "taken over")
        await until(lambda: one.door.status().store_ok and one.door.resident.replica_id, "back")
        assert (await world.counts())[S.GENERATING] == 1
        two.runner.release()
        answer = await one.door.lease(ASK)
        assert len(answer.payloads) == 1
        assert one.observer.moves == [m for m in one.observer.moves if m.after.state is not S.READY]


async def test_groups_that_fail_whole_halt_every_replica():
    async with World(policy=FOUR, make_runner=at_once) as world:
        one, two = await world.join(), await world.join()
        two.engines.capacity = 0
        one.scorer.answer = lambda job: Scores(rewards={"accuracy": [None] * len(job.rollouts)})
        waiting = asyncio.create_task(two.door.lease(ASK))
        for n in range(40):
            await two.door.submit([submission(f"p{n}")])
        failed = await asyncio.gather(waiting, return_exceptions=True)
        assert "32 groups in a row" in repr(failed)
        await until(lambda: two.door.status().halt is not None, "known here")
        assert (await world.counts())[S.DROPPED] >= 32
        await one.door.resume()
        assert two.door.resident.core.halt is None


async def without_engines(world: World) -> tuple[Member, Member, Callable[[], int]]:
    """One is at work and has no engine any more, two has some, and one knows; how often one has kept house since."""
    one, two = await world.join(), await world.join()
    two.engines.capacity = 0
    await two.door.submit([submission("a")])
    await until(lambda: len(one.runner.held) == 4, "at work")
    one.engines.capacity, two.engines.capacity = 0, 10
    await two.door.heart.beat()
    await until(lambda: [seen.replica.healthy_engines for seen in one.door.watch.overview.replicas][1:] == [1], "known")
    looked = counted(one.door, "expire")
    await until(lambda: looked() >= 2, "housekeeping has seen it")
    return one, two, looked


async def test_a_replica_without_engines_leaves_its_groups_to_those_that_have_some():
    async with World(policy=FOUR) as world:
        one, two, _ = await without_engines(world)
        world.clock.now += 9
        await two.door.heart.beat()
        await one.door.heart.beat()
        assert not one.runner.cancelled, "a hiccup is waited out"
        world.clock.now += 2
        await two.door.heart.beat()
        await one.door.heart.beat()
        await until(lambda: len(two.runner.held) == 4, "taken over")
        assert len(one.runner.cancelled) == 4


@pytest.mark.parametrize("seconds", [86_400, -86_400])
async def test_setting_the_clock_of_a_replica_makes_no_wait_shorter_or_longer(seconds: int):
    async with World(policy=FOUR) as world:
        one, two, looked = await without_engines(world)
        world.wall.now += seconds
        await until(lambda: looked() >= 4, "and the new time")
        assert not one.runner.cancelled
        world.clock.now += GIVE_BACK_S
        await two.door.heart.beat()
        await one.door.heart.beat()
        await until(lambda: len(two.runner.held) == 4, "taken over")


async def test_a_replica_that_is_ending_is_not_ready():
    async with World(policy=FOUR) as world:
        one = await world.join()
        assert not one.door.status().closing
        await one.door.stop()
        world.members.remove(one)
        assert one.door.status().closing


async def test_what_was_lost_without_a_word_is_not_settled():
    async with World(policy=FOUR) as world:
        one = await world.join()
        await one.door.submit([submission("a")])
        await until(lambda: len(one.runner.held) == 4, "at work")

        async def steal(tx: Transaction) -> None:
            group = (await tx.groups([1]))[1].group
            await tx.write(Batch(groups={1: group}), owner="a stranger")  # and no new revision says so

        await one.store.transact(steal)
        one.runner.release()
        await until(lambda: not one.door.resident.claims, "given up")
        assert await one.store.transact(lambda tx: tx.claims([1])) == {1: ("a stranger", 2)}
        assert (await one.store.payloads([1]))[0].rollouts == {}
        assert one.observer.settled == []


async def test_a_version_that_comes_while_a_commit_is_on_its_way_counts_for_it():
    async with World(policy=Policy(group=GroupPolicy(max_staleness=0), slots=4)) as world:
        one, two = await world.join(), await world.join()
        two.engines.capacity = 0
        one.scorer.hold = asyncio.Event()
        await two.door.submit([submission("a")])
        await until(lambda: len(one.runner.held) == 4, "at work")
        one.runner.release()
        await until(lambda: one.scorer.jobs, "scored")
        transact, on_the_way, go = one.store.transact, asyncio.Event(), asyncio.Event()

        async def slow(work: Any, **how: Any) -> Any:
            task = asyncio.current_task()
            if task is not None and task.get_name() == "committer":
                on_the_way.set()
                await go.wait()
            return await transact(work, **how)

        one.store.transact = slow
        one.scorer.hold.set()
        await on_the_way.wait()  # with a group that is ready, as it was decided at version 0
        await two.door.post_version(1)
        await until(lambda: one.door.version == 1, "heard of")
        go.set()
        await until(lambda: not one.door.resident.claims, "settled")
        assert (await world.counts())[S.STALE] == 1
