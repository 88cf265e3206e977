"""The one writer on fakes: what is visible when, what callers get, what a restart and a failing store leave."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout_service.core.group import GroupPolicy, OnStale
from rollout_service.core.model import DropReason, GroupState, Prompt, Scores
from rollout_service.core.records import Batch
from rollout_service.core.scheduler import Policy
from rollout_service.errors import Conflict, Halted, InvalidField, NotFound, QueueFull, ShuttingDown, StoreUnavailable
from rollout_service.orchestrator import HungUp, LeaseRequest, LeaseStatus, Orchestrator
from rollout_service.store import MemoryStore, SqliteStore
from tests.fakes import Clock, Harness, Runner, failed, finished, passes, prompt, submission, until

S = GroupState
ASK = LeaseRequest(max_groups=8, wait_s=5)
NOW = LeaseRequest(max_groups=8, wait_s=0)


def at_once() -> Runner:
    return Runner(answer=lambda job: finished(job.index))


def memory(max_staleness: int = 4) -> MemoryStore:
    return MemoryStore(max_staleness=max_staleness)


async def state(door: Orchestrator, group_id: str) -> GroupState:
    return (await door.group(group_id)).payload.group.state


async def ready(door: Orchestrator, *keys: str) -> list[str]:
    ids = [group for group, _ in await door.submit([submission(key) for key in keys])]
    await until(lambda: door.status().counts.groups[S.READY] >= len(keys), "ready groups")
    return ids


async def test_a_group_is_generated_scored_leased_and_acked():
    harness = Harness(store=memory(), runner=at_once())
    async with harness as door:
        assert await door.submit([submission("a", x=1)]) == [("g-1", "a")]
        answer = await door.lease(ASK)
        (payload,) = answer.payloads
        assert (answer.status, payload.group.group_id, payload.group.state) == (LeaseStatus.OK, "g-1", S.LEASED)
        assert payload.score is not None
        assert [payload.score.rows[i].reward for i in range(4)] == [0.0, 1.0, 2.0, 3.0]
        assert payload.prompt is not None
        assert payload.prompt.columns == {"x": 1}
        assert answer.lease is not None
        assert await door.ack(answer.lease.lease_id, None) == ["g-1"]
        assert await door.ack(answer.lease.lease_id, ["g-1"]) == ["g-1"], "an ack can be repeated"
        assert await state(door, "g-1") is S.ACKED
        assert door.status().counts.outstanding == 0


async def test_nothing_is_dispatched_before_its_opening_is_committed():
    class SlowStore(MemoryStore):
        """Lets commits through one at a time."""

        def __init__(self) -> None:
            super().__init__(max_staleness=4)
            self.go = asyncio.Semaphore(0)
            self.committed: list[Batch] = []

        async def commit(self, batch: Batch) -> None:
            await self.go.acquire()
            await super().commit(batch)
            self.committed.append(batch)

    store = SlowStore()
    harness = Harness(store=store)
    async with harness as door:
        submitting = asyncio.create_task(door.submit([submission("a")]))
        await passes()
        assert not submitting.done()
        assert harness.runner.jobs == []
        store.go.release()
        await submitting
        while not harness.runner.jobs:
            assert all(group.state is not S.GENERATING for b in store.committed for group in b.groups.values())
            store.go.release()
            await passes()
        assert any(group.state is S.GENERATING for b in store.committed for group in b.groups.values())
        for _ in range(50):
            store.go.release()


async def test_a_bump_aborts_the_stale_group_and_leaves_the_fresh_one_alone():
    harness = Harness(store=memory(1), policy=Policy(group=GroupPolicy(max_staleness=1), slots=16))
    async with harness as door:
        await door.submit([submission("old")])
        await until(lambda: len(harness.runner.held) == 4)
        await door.post_version(1)
        await door.submit([submission("fresh")])
        await until(lambda: len(harness.runner.held) == 8)
        bumped = await door.post_version(2)
        assert (bumped.stale_groups, bumped.aborted_rollouts, bumped.previous) == (1, 4, 1)
        await until(lambda: len(harness.runner.held) == 4)
        assert {job.group_id for job in harness.runner.cancelled} == {"g-1"}
        assert await state(door, "g-1") is S.STALE
        harness.runner.release()
        answer = await door.lease(ASK)
        assert [(p.group.group_id, p.group.version) for p in answer.payloads] == [("g-2", 1)]
        assert answer.policy_version == 2


async def test_a_late_answer_after_a_bump_is_never_scored_and_is_counted_as_wasted():
    class Deaf(Runner):
        """Finishes although it was cancelled, as an engine that ignores aborts does."""

        async def run(self, job: Any, gate: Any) -> Any:
            try:
                return await super().run(job, gate)
            except asyncio.CancelledError:
                return finished(job.index)

    harness = Harness(store=memory(0), runner=Deaf(), policy=Policy(group=GroupPolicy(max_staleness=0), slots=4))
    async with harness as door:
        await door.submit([submission("a")])
        await until(lambda: len(harness.runner.held) == 4)
        await door.post_version(1)
        await until(lambda: not harness.runner.held)
        assert await state(door, "g-1") is S.STALE
        assert harness.scorer.jobs == []
        assert door.status().slots_used == 0


async def test_a_partly_dispatched_group_comes_back_smaller_with_its_own_row_numbers():
    policy = Policy(group=GroupPolicy(max_staleness=1), slots=3)
    harness = Harness(store=memory(1), policy=policy)
    async with harness as door:
        await door.submit([submission("a", 5)])
        await until(lambda: len(harness.runner.held) == 3)
        harness.runner.answer = lambda job: finished(job.index)
        await door.post_version(2)
        answer = await door.lease(ASK)
        (payload,) = answer.payloads
        assert sorted(payload.rollouts) == [3, 4]
        assert (payload.group.attempt, payload.group.version) == (2, 2)


async def test_requeue_generates_the_whole_prompt_again():
    policy = Policy(group=GroupPolicy(max_staleness=0, on_stale=OnStale.REQUEUE, max_group_attempts=2), slots=8)
    harness = Harness(store=memory(0), policy=policy)
    async with harness as door:
        await door.submit([submission("a")])
        await until(lambda: len(harness.runner.held) == 4)
        await door.post_version(1)
        await until(lambda: len(harness.runner.held) == 4 and len(harness.runner.jobs) == 8)
        await door.post_version(2)
        assert await state(door, "g-1") is S.STALE
        assert {job.attempt for job in harness.runner.jobs} == {1, 2}


async def test_a_lower_version_is_a_conflict_and_a_reset_takes_leases_back():
    harness = Harness(store=memory(), runner=at_once())
    async with harness as door:
        await door.post_version(5)
        await ready(door, "a")
        answer = await door.lease(ASK)
        assert answer.lease is not None
        with pytest.raises(Conflict):
            await door.post_version(4)
        assert door.version == 5
        assert (await door.post_version(5)).previous == 5
        assert (await door.post_version(3, reset=True)).previous == 5
        with pytest.raises(Conflict):
            await door.ack(answer.lease.lease_id, None)
        with pytest.raises(Conflict):
            await door.renew(answer.lease.lease_id, None)
        again = await door.lease(ASK)
        assert [(p.group.attempt, p.group.version) for p in again.payloads] == [(2, 3)]


async def test_concurrent_versions_end_at_the_highest():
    async with Harness(store=memory()) as door:
        results = await asyncio.gather(*(door.post_version(v) for v in (3, 9, 1, 7, 9)), return_exceptions=True)
        assert door.version == 9
        assert sum(isinstance(result, Conflict) for result in results) == 2


async def test_a_failed_whole_group_halts_and_resume_goes_on():
    runner = Runner(answer=lambda job: failed(job.index) if job.group_id == "g-1" else finished(job.index))
    harness = Harness(store=memory(), runner=runner)
    async with harness as door:
        waiting = asyncio.create_task(door.lease(ASK))
        await asyncio.sleep(0)
        await door.submit([submission("bad")])
        with pytest.raises(Halted, match="unlucky prompt 4711") as halted:
            await waiting
        assert halted.value.facts["group_id"] == "g-1"
        assert halted.value.facts["engine"] == "http://engine"
        await door.submit([submission("good")])
        with pytest.raises(Halted):
            await door.lease(NOW)
        assert door.status().counts.groups[S.PENDING] == 1
        await door.resume()
        assert [p.prompt.prompt_id for p in (await door.lease(ASK)).payloads if p.prompt] == ["good"]


async def test_ready_groups_go_out_while_halted_even_fewer_than_min_groups():
    harness = Harness(store=memory(), runner=at_once())
    async with harness as door:
        await ready(door, "good")
        harness.runner.answer = lambda job: failed(job.index)
        await door.submit([submission("bad")])
        await until(lambda: door.status().halt)
        answer = await door.lease(LeaseRequest(max_groups=4, min_groups=3, wait_s=0))
        assert [p.group.group_id for p in answer.payloads] == ["g-1"]


async def test_a_request_id_gives_the_same_lease_until_it_ends_and_a_conflict_afterwards():
    harness = Harness(store=memory(), runner=at_once())
    async with harness as door:
        await ready(door, "a", "b")
        ask = LeaseRequest(max_groups=1, wait_s=1, request_id="step-1", consumer="rank0")
        first = await door.lease(ask)
        other_rank = LeaseRequest(max_groups=1, wait_s=0, request_id="step-1", consumer="rank1")
        await door.post_version(3)
        second = await door.lease(other_rank)
        assert first.lease is not None
        assert second.lease is not None
        assert (first.lease.lease_id, first.payloads) == (second.lease.lease_id, second.payloads)
        assert second.policy_version == 0
        with pytest.raises(Conflict, match="max_groups 1"):
            await door.lease(LeaseRequest(max_groups=2, wait_s=0, request_id="step-1"))
        await door.ack(first.lease.lease_id, None)
        with pytest.raises(Conflict, match="has ended"):
            await door.lease(ask)


async def test_callers_with_one_request_id_share_one_wait_and_one_lease():
    harness = Harness(store=memory())
    async with harness as door:
        ask = LeaseRequest(max_groups=8, wait_s=5, request_id="step-1")
        callers = [asyncio.create_task(door.lease(ask)) for _ in range(3)]
        await until(lambda: door.status().waiting_lease_calls == 1)
        await door.submit([submission("a")])
        await until(lambda: len(harness.runner.held) == 4)
        harness.runner.release()
        answers = await asyncio.gather(*callers)
        assert len({answer.lease.lease_id for answer in answers if answer.lease}) == 1
        assert all(answer.payloads for answer in answers)
        assert len(harness.observer.delivered) == 1


async def test_an_empty_answer_is_not_remembered():
    harness = Harness(store=memory(), runner=at_once())
    async with harness as door:
        ask = LeaseRequest(max_groups=1, wait_s=0, request_id="step-1")
        assert (await door.lease(ask)).status is LeaseStatus.EMPTY
        await ready(door, "a")
        assert (await door.lease(ask)).status is LeaseStatus.OK


async def test_waiting_callers_are_served_first_come_first_served():
    harness = Harness(store=memory())
    async with harness as door:
        order: list[int] = []

        async def caller(number: int) -> None:
            answer = await door.lease(LeaseRequest(max_groups=1, wait_s=5))
            assert answer.payloads
            order.append(number)

        callers = []
        for number in range(3):
            callers.append(asyncio.create_task(caller(number)))
            await until(lambda: door.status().waiting_lease_calls == len(callers))
        await door.submit([submission(key) for key in "abc"])
        await until(lambda: len(harness.runner.held) == 12)
        for served, group_id in enumerate(("g-3", "g-1", "g-2"), 1):
            harness.runner.release(group_id)
            await until(lambda served=served: len(order) == served)
        await asyncio.gather(*callers)
        assert order == [0, 1, 2]


async def test_min_groups_waits_and_is_met_by_what_is_left_when_nothing_more_can_come():
    harness = Harness(store=memory(), runner=at_once())
    async with harness as door:
        await ready(door, "a")
        ask = LeaseRequest(max_groups=4, min_groups=2, wait_s=0)
        assert (await door.lease(ask)).status is LeaseStatus.EMPTY
        waiting = asyncio.create_task(door.lease(LeaseRequest(max_groups=4, min_groups=2, wait_s=5)))
        await until(lambda: door.status().waiting_lease_calls)
        await door.submit([], final=True)
        assert len((await waiting).payloads) == 1


async def test_waiting_callers_hear_at_once_that_the_run_is_exhausted():
    harness = Harness(store=memory(), runner=at_once())
    async with harness as door:
        await ready(door, "a")
        answer = await door.lease(ASK)
        await door.submit([], final=True)
        waiting = asyncio.create_task(door.lease(ASK))
        await until(lambda: door.status().waiting_lease_calls)
        assert answer.lease is not None
        await door.ack(answer.lease.lease_id, None)
        assert (await waiting).status is LeaseStatus.EXHAUSTED
        with pytest.raises(Conflict, match="final"):
            await door.submit([submission("late")])
        assert await door.submit([submission("a")], final=True) == [("g-1", "a")]


async def test_a_caller_that_hangs_up_while_waiting_takes_nothing():
    harness = Harness(store=memory())
    async with harness as door:
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(door.lease(ASK, gone))
        await until(lambda: door.status().waiting_lease_calls)
        gone.set_result(None)
        with pytest.raises(HungUp):
            await waiting
        assert door.status().waiting_lease_calls == 0
        await door.submit([submission("a")])
        await until(lambda: len(harness.runner.held) == 4)
        harness.runner.release()
        assert (await door.lease(ASK)).status is LeaseStatus.OK


async def test_an_answer_that_was_not_delivered_is_given_back_unless_it_can_be_fetched_again():
    harness = Harness(store=memory(), runner=at_once())
    async with harness as door:
        await ready(door, "a")
        first = await door.lease(NOW)
        assert first.lease is not None
        await door.abandon(first.lease)
        named = await door.lease(LeaseRequest(max_groups=8, wait_s=0, request_id="r"))
        assert named.lease is not None
        await door.abandon(named.lease)
        assert (await door.lease(NOW)).status is LeaseStatus.EMPTY
        assert (await door.lease(LeaseRequest(max_groups=8, wait_s=0, request_id="r"))).payloads == named.payloads


async def test_an_expired_lease_gives_its_groups_to_the_next_and_a_late_ack_is_a_conflict():
    harness = Harness(store=memory(), runner=at_once())
    async with harness as door:
        await ready(door, "a")
        first = await door.lease(LeaseRequest(max_groups=8, wait_s=0, lease_s=10))
        harness.clock.now += 10
        assert first.lease is not None
        second = await door.lease(NOW)
        assert second.lease is not None
        assert [p.group.group_id for p in second.payloads] == ["g-1"]
        with pytest.raises(Conflict, match="leased"):
            await door.ack(first.lease.lease_id, None)
        with pytest.raises(Conflict, match="over"):
            await door.renew(first.lease.lease_id, None)
        await door.ack(second.lease.lease_id, None)


async def test_a_late_ack_counts_while_the_group_is_ready_again_in_the_same_attempt():
    harness = Harness(store=memory(), runner=at_once())
    async with harness as door:
        await ready(door, "a")
        first = await door.lease(LeaseRequest(max_groups=8, wait_s=0, lease_s=10))
        harness.clock.now += 10
        assert first.lease is not None
        assert await door.ack(first.lease.lease_id, None) == ["g-1"]
        assert (await door.lease(NOW)).status is LeaseStatus.EMPTY


async def test_renewal_extends_and_parts_can_be_acked_and_released():
    harness = Harness(store=memory(), runner=at_once())
    async with harness as door:
        await ready(door, "a", "b", "c")
        answer = await door.lease(LeaseRequest(max_groups=3, wait_s=0, lease_s=10))
        assert answer.lease is not None
        lease_id = answer.lease.lease_id
        harness.clock.now += 8
        renewed = await door.renew(lease_id, None)
        assert renewed.expires_at == harness.clock.now + 10
        harness.clock.now += 8
        assert await door.ack(lease_id, ["g-2"]) == ["g-2"]
        assert await door.release(lease_id, ["g-1"]) == ["g-1"]
        assert await door.release(lease_id, ["g-1"]) == []
        assert await door.release(lease_id, None) == ["g-3"]
        assert [p.group.group_id for p in (await door.lease(NOW)).payloads] == ["g-1", "g-3"]


async def test_unknown_leases_and_groups_are_not_found_and_strangers_a_conflict():
    harness = Harness(store=memory(), runner=at_once())
    async with harness as door:
        await ready(door, "a", "b")
        answer = await door.lease(LeaseRequest(max_groups=1, wait_s=0))
        assert answer.lease is not None
        for call in (door.ack("nope", None), door.release("nope", None), door.renew("nope", None)):
            with pytest.raises(NotFound):
                await call
        with pytest.raises(NotFound):
            await door.ack(answer.lease.lease_id, ["g-99"])
        with pytest.raises(Conflict, match="g-2"):
            await door.ack(answer.lease.lease_id, ["g-1", "g-2"])
        assert await state(door, "g-1") is S.LEASED, "nothing of a refused call is done"
        for call in (door.group("g-99"), door.group("x"), door.cancel("g-99")):
            with pytest.raises(NotFound):
                await call


async def test_a_group_too_old_when_it_comes_back_goes_stale():
    harness = Harness(store=memory(1), runner=at_once(), policy=Policy(group=GroupPolicy(max_staleness=1), slots=16))
    async with harness as door:
        await ready(door, "a")
        answer = await door.lease(NOW)
        await door.post_version(2)
        assert await state(door, "g-1") is S.LEASED, "a bump does not touch a leased group"
        assert answer.lease is not None
        await door.release(answer.lease.lease_id, None)
        assert await state(door, "g-1") is S.STALE


async def test_cancelling_ends_a_group_in_any_outstanding_state():
    harness = Harness(store=memory())
    async with harness as door:
        await door.submit([submission("a")])
        await until(lambda: len(harness.runner.held) == 4)
        assert (await door.cancel("g-1")).reason is DropReason.CANCELLED
        await until(lambda: not harness.runner.held)
        with pytest.raises(Conflict, match="dropped"):
            await door.cancel("g-1")


async def test_known_prompts_come_back_and_other_content_is_a_conflict():
    harness = Harness(store=memory(), runner=at_once())
    async with harness as door:
        assert await door.submit([submission("a"), submission("a")]) == [("g-1", "a"), ("g-1", "a")]
        with pytest.raises(Conflict, match="other content"):
            await door.submit([submission("b"), submission("a", x=2)])
        assert door.status().counts.submitted == 1, "all or nothing"
        assert await door.submit([submission("a", epoch=1)]) == [("g-2", "a")]
        answer = await door.lease(LeaseRequest(max_groups=2, min_groups=2, wait_s=5))
        assert answer.lease is not None
        await door.ack(answer.lease.lease_id, None)
        assert await door.submit([submission("a")]) == [("g-1", "a")], "known after its end too"


async def test_a_full_queue_refuses_and_takes_nothing():
    policy = Policy(group=GroupPolicy(), slots=1, max_pending_groups=3)
    async with Harness(store=memory(), policy=policy) as door:
        await door.submit([submission("a")])
        await until(lambda: door.status().counts.groups[S.GENERATING])
        await door.submit([submission("b"), submission("c")])
        with pytest.raises(QueueFull):
            await door.submit([submission("d"), submission("e")])
        await door.submit([submission("d")])
        with pytest.raises(InvalidField):
            await door.submit([submission(str(i)) for i in range(4)])
        assert door.status().counts.submitted == 4


async def test_a_pause_stops_dispatch_and_survives_a_restart():
    store = memory()
    harness = Harness(store=store)
    async with harness as door:
        await door.pause()
        await door.submit([submission("a")])
        assert door.status().paused
    second = Harness(store=MemoryStore.reopened(store))
    async with second as door:
        await passes()
        assert (door.status().paused, second.runner.jobs) == (True, [])
        await door.resume()
        await until(lambda: len(second.runner.held) == 4)


async def test_with_no_engine_groups_wait_and_then_one_of_them_fails_loudly():
    harness = Harness(store=memory(), engine_wait_s=10)
    harness.engines.capacity = 0
    async with harness as door:
        await door.submit([submission("a"), submission("b")])
        assert door.status().counts.groups[S.PENDING] == 2
        harness.clock.now += 9
        door.engines_changed()
        await passes()
        assert door.status().halt is None
        harness.clock.now += 1
        door.engines_changed()
        await until(lambda: door.status().halt)
        counts = door.status().counts.groups
        assert (counts[S.FAILED], counts[S.PENDING]) == (1, 1)
        with pytest.raises(Halted, match=r"no engine was healthy for 10 s .http://engine: refused") as halted:
            await door.lease(NOW)
        assert halted.value.facts["engine"] == "http://engine"
        assert harness.runner.jobs == []


@pytest.mark.parametrize("seconds", [86_400, -86_400])
async def test_setting_the_clock_makes_the_wait_for_an_engine_no_shorter_or_longer(seconds: int):
    harness = Harness(store=memory(), engine_wait_s=10, steady=Clock())
    harness.engines.capacity = 0
    async with harness as door:
        await door.submit([submission("a"), submission("b")])
        harness.clock.now += seconds
        door.engines_changed()
        await passes()
        assert door.status().halt is None
        harness.steady.now += 10
        door.engines_changed()
        await until(lambda: door.status().halt)


async def test_a_restart_goes_on_with_everything_that_was_committed(tmp_path: Path):
    path = tmp_path / "r.db"
    runner = Runner(answer=lambda job: finished(job.index) if job.group_id != "g-3" or job.index == 2 else None)
    first = Harness(store=SqliteStore(path, max_staleness=4), runner=runner)
    async with first as door:
        await door.post_version(3)
        await ready(door, "leased", "ready")
        leased = await door.lease(LeaseRequest(max_groups=1, wait_s=0, request_id="step-1"))
        await door.submit([submission("half")])
        await until(lambda: len(first.runner.held) == 3 and len(first.observer.settled) == 9)
    second = Harness(store=SqliteStore(path, max_staleness=4), clock=first.clock)
    async with second as door:
        status = door.status()
        assert (status.policy_version, status.counts.submitted, status.leases) == (3, 3, 1)
        again = await door.lease(LeaseRequest(max_groups=1, wait_s=0, request_id="step-1"))
        assert again.payloads == leased.payloads
        await until(lambda: len(second.runner.held) == 3)
        assert sorted(index for _, _, index in second.runner.held) == [0, 1, 3], "row 2 was finished and is kept"
        second.runner.release()
        rest = await door.lease(LeaseRequest(max_groups=8, min_groups=2, wait_s=5))
        assert [(p.group.group_id, p.group.version, sorted(p.rollouts)) for p in rest.payloads] == [
            ("g-2", 3, [0, 1, 2, 3]),
            ("g-3", 3, [0, 1, 2, 3]),
        ]


class Failing(MemoryStore):
    """A medium that fails while a test says so."""

    failing = False

    async def commit(self, batch: Batch) -> None:
        if self.failing:
            raise StoreUnavailable("disk full")
        await super().commit(batch)


async def test_a_failed_commit_undoes_what_was_decided_and_the_run_goes_on_when_the_store_is_back():
    store = Failing(max_staleness=4)
    harness = Harness(store=store)
    async with harness as door:
        await door.submit([submission("a")])
        await until(lambda: len(harness.runner.held) == 4)
        store.failing = True
        for call in (door.post_version(9), door.submit([submission("b")]), door.pause()):
            with pytest.raises(StoreUnavailable):
                await call
        assert not door.status().store_ok
        await until(lambda: not harness.runner.held, "in flight is stopped")
        with pytest.raises(StoreUnavailable):
            await door.lease(NOW)
        store.failing = False
        await until(lambda: door.status().store_ok, "the store is tried again")
        assert (door.version, door.status().counts.submitted, door.status().paused) == (0, 1, False)
        await until(lambda: len(harness.runner.held) == 4, "what was in flight is generated again")
        harness.runner.release()
        assert [p.group.group_id for p in (await door.lease(ASK)).payloads] == ["g-1"]


async def test_waiting_callers_are_answered_when_the_service_ends():
    harness = Harness(store=memory())
    async with harness as door:
        waiting = asyncio.create_task(door.lease(ASK))
        await until(lambda: door.status().waiting_lease_calls)
        await door.stop()
        assert (await waiting).status is LeaseStatus.EMPTY
        with pytest.raises(ShuttingDown):
            await door.post_version(1)


async def test_a_reward_that_cancels_drops_only_its_group_and_one_that_scores_nobody_makes_it_unscorable():
    harness = Harness(store=memory(), runner=at_once())
    says = {
        "g-1": Scores(rewards={}, cancelled="cancelled by user code"),
        "g-2": Scores(rewards={"accuracy": [None] * 4}, errors={"accuracy": "boom"}),
    }
    usual = harness.scorer.answer
    harness.scorer.answer = lambda job: says[job.group_id] if job.group_id in says else usual(job)
    async with harness as door:
        await door.submit([submission(key) for key in "abc"])
        await until(lambda: door.status().counts.groups[S.READY] == 1)
        one, two = [(await door.group(key)).payload.group for key in ("g-1", "g-2")]
        assert (one.state, one.reason) == (S.DROPPED, DropReason.REWARD_CANCELLED)
        assert (two.state, two.reason, two.error) == (S.DROPPED, DropReason.UNSCORABLE, "accuracy: boom")


class Rows:
    """A prompts file of `count` rows."""

    def __init__(self, count: int, epochs: int = 1) -> None:
        self.count, self.epochs, self.fingerprint = count, epochs, "f"

    @property
    def total(self) -> int | None:
        return self.count * self.epochs

    def read(self, position: int, count: int) -> Sequence[Prompt]:
        end = min(position + count, self.count * self.epochs)
        return [prompt(f"row-{at % self.count}", epoch=at // self.count) for at in range(position, end)]


async def test_a_prompts_file_is_read_as_there_is_room_and_its_end_is_the_end_of_the_run():
    policy = Policy(group=GroupPolicy(), slots=8, max_pending_groups=5)
    harness = Harness(store=memory(), runner=at_once(), policy=policy, source=Rows(7, 2), digest=lambda p: b"x")
    seen: list[tuple[str, int]] = []
    async with harness as door:
        while (answer := await door.lease(ASK)).status is not LeaseStatus.EXHAUSTED:
            assert door.status().counts.groups[S.PENDING] <= 5
            assert answer.lease is not None
            seen += [(p.prompt.prompt_id, p.prompt.epoch) for p in answer.payloads if p.prompt]
            await door.ack(answer.lease.lease_id, None)
    assert sorted(seen) == sorted((f"row-{row}", epoch) for row in range(7) for epoch in range(2))


async def test_a_restart_goes_on_at_the_next_row_of_the_file():
    store = memory()
    policy = Policy(group=GroupPolicy(), slots=4, max_pending_groups=2)
    async with Harness(store=store, policy=policy, source=Rows(9), digest=lambda p: b"x") as door:
        await until(lambda: door.status().counts.submitted >= 3)
        before = door.status()
        with pytest.raises(Conflict, match="still being read"):
            await door.submit([], final=True)
    second = Harness(
        store=MemoryStore.reopened(store), policy=policy, runner=at_once(), source=Rows(9), digest=lambda p: b"x"
    )
    async with second as door:
        assert door.status().read_position == before.read_position
        seen = []
        while (answer := await door.lease(ASK)).lease is not None:
            seen += [p.prompt.prompt_id for p in answer.payloads if p.prompt]
            await door.ack(answer.lease.lease_id, None)
        assert answer.status is LeaseStatus.EXHAUSTED
    assert sorted(seen) == sorted(f"row-{row}" for row in range(9))
