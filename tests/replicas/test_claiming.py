"""When a replica asks for groups, and what it makes of those it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rollout_service.core.model import GroupState
from rollout_service.core.scheduler import Policy
from rollout_service.orchestrator import LeaseRequest
from rollout_service.replicas import claims, watch
from rollout_service.replicas.replica import GIVE_BACK_S, TURN_S
from rollout_service.store.shared import Transaction
from tests.fakes import failed, passes, submission, until
from tests.replicas.test_replicas import Worlds, at_once
from tests.replicas.test_trouble import counted
from tests.replicas.world import Member, World

S = GroupState
NOW = LeaseRequest(max_groups=8, wait_s=0)


@pytest.fixture
def only_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is looked at because time has passed."""
    monkeypatch.setattr(claims, "AGAIN_S", 1000.0)
    monkeypatch.setattr(watch, "POLL_S", 1000.0)


def hold_looks(member: Member) -> asyncio.Event:
    """`member` hears of changes of the run only when the event is set."""
    overview, go = member.store.overview, asyncio.Event()

    async def held() -> Any:
        await go.wait()
        return await overview()

    member.store.overview = held
    return go


def claims_counted(member: Member) -> Callable[[], int]:
    """How many claims `member` asked for from now on."""
    transact, asked = member.store.transact, []

    async def call(work: Any, **how: Any) -> Any:
        task = asyncio.current_task()
        if task is not None and task.get_name() == "claims":
            asked.append(work)
        return await transact(work, **how)

    member.store.transact = call
    return lambda: len(asked)


async def test_a_claim_just_after_a_reset_is_not_taken_for_what_was_worked_for_before(worlds: Worlds):
    async with worlds(policy=Policy(slots=8)) as world:
        one, two = await world.join(), await world.join()
        two.engines.capacity = 0
        await two.door.post_version(9)
        await two.door.submit([submission("a")])
        await until(lambda: len(one.runner.held) == 4, "at work")
        go = hold_looks(one)
        await two.door.post_version(3, reset=True)
        await until(lambda: len(one.runner.jobs) == 8, "claimed again, of another attempt")
        await until(lambda: len(one.runner.cancelled) == 4, "and the attempt before it aborted")
        assert {job.attempt for job in one.runner.cancelled} == {1}
        assert one.door.resident.core.in_flight == 4
        go.set()
        one.runner.release()
        answer = await two.door.lease(LeaseRequest(max_groups=8, wait_s=5))
        assert [(payload.group.attempt, payload.group.version) for payload in answer.payloads] == [(2, 3)]


async def test_a_lease_makes_room_and_says_so(only_when_told: None, worlds: Worlds):
    async with worlds(policy=Policy(slots=4, max_ready_groups=1)) as world:
        one, two = await world.join(), await world.join()
        two.engines.capacity = 0
        await two.door.submit([submission("a"), submission("b")])
        await until(lambda: len(one.runner.held) == 4, "at work")
        one.engines.capacity = 0  # or b would be opened before a is ready
        one.runner.release()
        await until(lambda: any(move.after.state is S.READY for move in one.observer.moves), "a is ready")
        asked = claims_counted(one)
        one.engines.capacity = 10
        one.door.engines_changed()
        await until(lambda: asked() == 1, "there is no room for b")
        await until(lambda: not one.door._claims._one.locked(), "and that is known")
        assert len(one.runner.jobs) == 4
        assert len((await two.door.lease(LeaseRequest(max_groups=8, wait_s=5))).payloads) == 1
        await until(lambda: len(one.runner.jobs) == 8, "b is generated")


async def test_what_ends_without_becoming_ready_makes_room_and_says_so(only_when_told: None, worlds: Worlds):
    async with worlds(policy=Policy(slots=8, max_ready_groups=1, halt_after_failed_groups=0)) as world:
        one, two = await world.join(), await world.join()
        one.scorer.hold, two.engines.capacity = asyncio.Event(), 0
        one.runner.answer = lambda job: failed(job.index) if job.index else None
        await two.door.submit([submission("a"), submission("b")])
        await until(lambda: one.runner.held, "at work")
        one.runner.release()
        await until(lambda: len(one.runner.jobs) == 8, "a was dropped with one survivor, b is generated")


async def test_while_nothing_can_be_claimed_completions_do_not_ask_for_more(only_when_told: None):
    async with World(policy=Policy(slots=40)) as world:
        one = await world.join()
        await one.door.submit([submission(f"p{n}") for n in range(8)])
        await until(lambda: len(one.runner.held) == 32, "all at work, and slots free")
        await passes()
        asked = claims_counted(one)
        for name in [f"g-{n}" for n in range(1, 9)]:
            one.runner.release(name)
            await until(lambda name=name: not any(key[0] == name for key in one.runner.held), "answered")
            await until(lambda: one.door.resident.committer.idle, "committed")
        assert asked() <= 1
        await one.door.submit([submission("more")])
        await until(lambda: len(one.runner.held) == 4, "one that comes is claimed")


@pytest.mark.parametrize("worlds", ["postgres"], indirect=True)  # in memory one looks after the other
async def test_groups_another_looks_at_are_waited_for_and_not_missing(worlds: Worlds):
    async with worlds(policy=Policy(slots=8), make_runner=at_once) as world:
        one, two = await world.join(), await world.join()
        await one.door.submit([submission("a"), submission("b")])
        ready = [member.observer.moves for member in (one, two)]
        await until(lambda: sum(m.after.state is S.READY for moves in ready for m in moves) == 2, "both ready")
        looking, go = asyncio.Event(), asyncio.Event()

        async def look(tx: Transaction) -> None:
            await tx.ready(8, oldest=0)
            looking.set()
            await go.wait()

        look_of_one = asyncio.create_task(one.store.transact(look))
        await looking.wait()
        transact, looked = two.store.transact, asyncio.Event()

        async def call(work: Any, **how: Any) -> Any:
            found = await transact(work, **how)
            looked.set()
            return found

        two.store.transact = call
        asking = asyncio.create_task(two.door.lease(NOW))
        await looked.wait()
        go.set()
        await look_of_one
        assert len((await asking).payloads) == 2


async def test_a_group_that_is_only_scored_stays_with_a_replica_without_engines():
    async with World(policy=Policy(slots=4)) as world:
        one, two = await world.join(), await world.join()
        two.engines.capacity, one.scorer.hold = 0, asyncio.Event()
        await two.door.submit([submission("a")])
        await until(lambda: len(one.runner.held) == 4, "at work")
        one.runner.release()
        await until(lambda: one.scorer.jobs, "being scored")
        one.engines.capacity, two.engines.capacity = 0, 10
        await two.door.heart.beat()
        await one.door.heart.beat()
        await until(
            lambda: [seen.replica.healthy_engines for seen in one.door.watch.overview.replicas] == [0, 1], "known"
        )
        looked = counted(one.door, "expire")
        await until(lambda: looked() >= 2, "housekeeping has seen it")
        world.clock.now += GIVE_BACK_S + 1
        await one.door.heart.beat()
        await two.door.heart.beat()
        seen = looked()
        await until(lambda: looked() >= seen + 2, "and sees it again")
        one.scorer.hold.set()
        await until(lambda: any(move.after.state is S.READY for move in one.observer.moves), "scored here")
        assert not two.scorer.jobs


async def test_with_no_engine_anywhere_one_replica_fails_one_group():
    async with World(policy=Policy(slots=4), engine_wait_s=30) as world:
        members = [await world.join() for _ in range(3)]
        for member in members:
            member.engines.capacity = 0
            await member.door.heart.beat()
        await members[0].door.submit([submission(f"p{n}") for n in range(4)])
        looked = [counted(member.door, "expire") for member in members]
        await until(lambda: all(count() >= 3 for count in looked), "all of them wait")
        for seconds in (30, TURN_S, TURN_S):
            world.clock.now += seconds
            for member in members:
                await member.door.heart.beat()
            before = [count() for count in looked]
            await until(
                lambda before=before: all(count() >= was + 3 for count, was in zip(looked, before, strict=True)),
                "they had time to see it",
            )
        assert (await world.counts())[S.FAILED] == 1
        assert all(member.door.status().halt is not None for member in members)


async def test_a_halt_is_told_though_the_answer_to_its_commit_was_lost():
    async with World(policy=Policy(slots=4)) as world:
        one = await world.join()
        await one.door.submit([submission("a")])
        await until(lambda: len(one.runner.held) == 4, "at work")
        one.store.lost_answers = 3  # whoever else asks meanwhile may have one of them
        for key, future in list(one.runner.held.items()):
            future.set_result(failed(key[2]))
        await until(lambda: one.store.lost_answers == 0 and not one.door.resident.claims, "settled")
        await until(lambda: one.door.status().halt, "halted")
        assert len(one.observer.halts) == 1
