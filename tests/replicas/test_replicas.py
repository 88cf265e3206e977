"""Several replicas share one run: any answers any call, each works for what it has claimed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from rollout_service.core.group import GroupPolicy
from rollout_service.core.model import GroupState, Prompt
from rollout_service.core.scheduler import Admission, Policy
from rollout_service.errors import ConfigError, Conflict
from rollout_service.orchestrator import LeaseRequest, LeaseStatus
from tests.fakes import Runner, finished, prompt, submission, until
from tests.replicas.world import World

Worlds = Callable[..., World]

S = GroupState
ASK = LeaseRequest(max_groups=8, wait_s=5)
NOW = LeaseRequest(max_groups=8, wait_s=0)


def at_once() -> Runner:
    return Runner(answer=lambda job: finished(job.index))


async def test_what_one_replica_takes_another_generates_and_a_third_hands_out(worlds: Worlds):
    async with worlds(make_runner=at_once) as world:
        one = await world.join()
        one.engines.capacity = 0
        two, three = await world.join(), await world.join()
        three.engines.capacity = 0
        assert await one.door.submit([submission("a", x=1)], final=True) == [("g-1", "a")]
        answer = await three.door.lease(ASK)
        (payload,) = answer.payloads
        assert (answer.status, payload.group.state) == (LeaseStatus.OK, S.LEASED)
        assert payload.prompt is not None
        assert payload.prompt.columns == {"x": 1}
        assert payload.score is not None
        assert [payload.score.rows[i].reward for i in range(4)] == [0.0, 1.0, 2.0, 3.0]
        assert len(two.runner.jobs) == 4
        assert answer.lease is not None
        assert await one.door.ack(answer.lease.lease_id, None) == ["g-1"]
        assert await two.door.ack(answer.lease.lease_id, ["g-1"]) == ["g-1"], "an ack can be repeated anywhere"
        assert (await one.door.lease(ASK)).status is LeaseStatus.EXHAUSTED
        assert (await world.counts())[S.ACKED] == 1


async def test_replicas_share_the_groups_and_none_is_generated_twice(worlds: Worlds):
    async with worlds(policy=Policy(slots=8)) as world:
        members = [await world.join() for _ in range(3)]
        await members[0].door.submit([submission(f"p{n}") for n in range(6)])
        await until(lambda: sum(len(m.runner.held) for m in members) == 24, "every slot in use")
        assert [len(m.runner.held) for m in members] == [8, 8, 8]
        jobs = [(job.group_id, job.index) for m in members for job in m.runner.jobs]
        assert len(set(jobs)) == len(jobs)


async def test_a_version_posted_at_one_replica_aborts_at_all_before_its_answer(worlds: Worlds):
    async with worlds(policy=Policy(group=GroupPolicy(max_staleness=0), slots=4)) as world:
        members = [await world.join() for _ in range(3)]
        await members[0].door.submit([submission(f"p{n}") for n in range(3)])
        await until(lambda: all(len(m.runner.held) == 4 for m in members), "all at work")
        bumped = await members[0].door.post_version(1)
        assert (bumped.stale_groups, bumped.aborted_rollouts) == (3, 12)
        assert sum(len(m.runner.cancelled) for m in members) == 12
        assert (await world.counts())[S.STALE] == 3
        assert [m.door.version for m in members] == [1, 1, 1]


@pytest.mark.parametrize("pushes", [True, False])
async def test_a_version_reaches_replicas_that_must_ask_too(pushes: bool):
    async with World(policy=Policy(group=GroupPolicy(max_staleness=0), slots=4)) as world:
        one, two = await world.join(), await world.join()
        two.store.pushes = pushes
        one.engines.capacity = 0
        await one.door.submit([submission("a")])
        await until(lambda: len(two.runner.held) == 4, "two at work")
        assert (await one.door.post_version(1)).stale_groups == 1
        assert len(two.runner.cancelled) == 4


async def test_a_ready_group_that_went_stale_is_leased_nowhere(worlds: Worlds):
    async with worlds(policy=Policy(group=GroupPolicy(max_staleness=0)), make_runner=at_once) as world:
        one, two = await world.join(), await world.join()
        await one.door.submit([submission("a")])
        await until(lambda: sum(m.after.state is S.READY for x in (one, two) for m in x.observer.moves), "ready")
        bumped = await two.door.post_version(1)
        assert bumped.stale_groups == 1
        assert (await one.door.lease(NOW)).status is LeaseStatus.EMPTY
        assert (await world.counts())[S.STALE] == 1


async def test_a_lower_version_is_refused_and_a_reset_takes_everything_back(worlds: Worlds):
    async with worlds(policy=Policy(slots=4)) as world:
        one, two = await world.join(), await world.join()
        await one.door.post_version(5)
        with pytest.raises(Conflict, match="below"):
            await two.door.post_version(4)
        await one.door.submit([submission("a"), submission("b")])
        await until(lambda: len(one.runner.held) == len(two.runner.held) == 4, "both at work")
        bumped = await two.door.post_version(3, reset=True)
        assert (bumped.version, bumped.previous, bumped.aborted_rollouts) == (3, 5, 8)
        await until(lambda: len(one.runner.held) == len(two.runner.held) == 4, "both at work again")
        assert {job.attempt for m in (one, two) for job in m.runner.jobs[4:]} == {2}
        assert {job.policy_version for m in (one, two) for job in m.runner.jobs[4:]} == {3}


async def test_the_claims_of_a_replica_that_stopped_are_taken_over_at_once(worlds: Worlds):
    async with worlds(policy=Policy(slots=4)) as world:
        one, two = await world.join(), await world.join()
        two.engines.capacity = 0
        await two.door.submit([submission("a")])
        await until(lambda: len(one.runner.held) == 4, "at work")
        one.runner.held["g-1", 1, 2].set_result(finished(2))
        await until(lambda: len(one.observer.settled) == 1, "a rollout is kept")
        two.engines.capacity = 10
        await one.door.stop()
        await until(lambda: len(two.runner.held) == 3, "the other three rows")
        assert sorted(job.index for job in two.runner.jobs) == [0, 1, 3]
        two.runner.release()
        answer = await two.door.lease(ASK)
        assert sorted(answer.payloads[0].rollouts) == [0, 1, 2, 3]
        world.members.remove(one)


async def test_callers_with_one_request_id_at_two_replicas_get_one_lease(worlds: Worlds):
    async with worlds(make_runner=at_once) as world:
        one, two = await world.join(), await world.join()
        ask = LeaseRequest(max_groups=4, wait_s=5, request_id="step-1")
        calls = [asyncio.create_task(m.door.lease(ask)) for m in (one, two)]
        await one.door.submit([submission("a")])
        answers = await asyncio.gather(*calls)
        assert len({a.lease.lease_id for a in answers if a.lease}) == 1
        assert [[p.group.group_id for p in a.payloads] for a in answers] == [["g-1"], ["g-1"]]
        with pytest.raises(Conflict, match="max_groups 4"):
            await two.door.lease(LeaseRequest(max_groups=5, wait_s=0, request_id="step-1"))


async def test_a_cancelled_group_stops_where_it_is_worked_for(worlds: Worlds):
    async with worlds() as world:
        one, two = await world.join(), await world.join()
        two.engines.capacity = 0
        await two.door.submit([submission("a")])
        await until(lambda: len(one.runner.held) == 4, "at work")
        assert (await two.door.cancel("g-1")).state is S.DROPPED
        await until(lambda: len(one.runner.cancelled) == 4, "stopped")
        assert (await world.counts())[S.DROPPED] == 1


async def test_a_rewind_at_one_replica_undoes_what_another_acked(worlds: Worlds):
    async with worlds(make_runner=at_once) as world:
        one, two = await world.join(), await world.join()
        await one.door.submit([submission("a"), submission("b")])
        first = await one.door.lease(LeaseRequest(max_groups=1, wait_s=5))
        assert first.lease is not None
        await two.door.ack(first.lease.lease_id, None)
        mark = await two.door.mark("step-1")
        assert (mark.ends, [m.name for m in await one.door.checkpoints()]) == (1, ["step-1"])
        second = await two.door.lease(LeaseRequest(max_groups=1, wait_s=5))
        assert second.lease is not None
        await one.door.ack(second.lease.lease_id, None)
        assert (await world.counts())[S.ACKED] == 2
        rewound = await one.door.rewind("step-1")
        assert (rewound.reopened_groups, (await world.counts())[S.ACKED]) == (1, 1)
        third = await one.door.lease(LeaseRequest(max_groups=1, wait_s=5))
        assert [(p.group.group_id, p.group.attempt) for p in third.payloads] == [("g-2", 2)]
        with pytest.raises(Conflict):
            await two.door.ack(second.lease.lease_id, None)


async def test_the_pace_bounds_what_all_replicas_open_together(worlds: Worlds):
    paced = Policy(group=GroupPolicy(max_staleness=1), slots=64, admission=Admission.PACE, groups_per_step=2)
    async with worlds(policy=paced, make_runner=at_once) as world:
        members = [await world.join() for _ in range(3)]
        await members[0].door.submit([submission(f"p{n}") for n in range(12)])
        await until(lambda: sum(m.after.state is S.READY for x in members for m in x.observer.moves) == 4, "four")
        answer = await members[1].door.lease(LeaseRequest(max_groups=2, wait_s=5))
        assert answer.lease is not None
        await members[2].door.ack(answer.lease.lease_id, None)
        await members[0].door.refresh()
        assert members[0].door.status().blocked == "pace"
        assert (await world.counts())[S.PENDING] == 8
        await members[2].door.post_version(1)
        await until(lambda: sum(m.after.state is S.READY for x in members for m in x.observer.moves) == 6, "two more")
        assert (await world.counts())[S.PENDING] == 6


class Rows:
    """A prompts file of `total` rows, of which each reader says what it read."""

    fingerprint = "rows"

    def __init__(self, total: int) -> None:
        self.total = total
        self.read_at: list[int] = []

    def read(self, position: int, count: int) -> Sequence[Prompt]:
        self.read_at.append(position)
        return [prompt(f"row-{at}", 2) for at in range(position, min(position + count, self.total))]


async def test_a_prompts_file_is_read_once_by_whoever_is_there(worlds: Worlds):
    rows = Rows(600)
    async with worlds(
        policy=Policy(slots=64, max_ready_groups=10_000),
        make_runner=at_once,
        source=rows,
        digest=lambda row: row.prompt_id.encode(),
    ) as world:
        one, two = await world.join(), await world.join()
        await until(lambda: len(rows.read_at) >= 2, "some are read")
        await one.door.stop()
        world.members.remove(one)
        done = 0
        while (answer := await two.door.lease(LeaseRequest(max_groups=64, wait_s=5))).lease is not None:
            done += len(await two.door.ack(answer.lease.lease_id, None))
        assert (answer.status, done) == (LeaseStatus.EXHAUSTED, 600)
        assert rows.read_at == sorted(rows.read_at), "nobody goes back"
        assert two.door.status().final


async def test_a_replica_with_another_file_or_other_rules_is_refused(worlds: Worlds):
    async with worlds() as world:
        await world.join(rules="these")
        with pytest.raises(ConfigError, match="replica-1"):
            await world.join(rules="others")
