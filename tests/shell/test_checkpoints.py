"""Going back: a rewind opens again what ended since the checkpoint, whatever became of it, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_service.core.group import GroupPolicy
from rollout_service.core.model import GroupState
from rollout_service.core.scheduler import Policy
from rollout_service.errors import Conflict, NotFound
from rollout_service.orchestrator import LeaseRequest, LeaseStatus, Orchestrator
from rollout_service.store import MemoryStore, SqliteStore
from tests.fakes import Harness, Runner, failed, finished, submission, until

S = GroupState
ASK = LeaseRequest(max_groups=1, wait_s=5)


@pytest.fixture(params=["memory", "sqlite"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """Each call gives the same store as a process finds it that starts after the last one was killed."""
    stores: list[Any] = []

    def again() -> Any:
        if request.param == "sqlite":
            return SqliteStore(tmp_path / "r.db", max_staleness=4)
        stores.append(MemoryStore.reopened(stores[-1]) if stores else MemoryStore(max_staleness=4))
        return stores[-1]

    return again


def runner() -> Runner:
    return Runner(answer=lambda job: failed(job.index) if job.prompt.prompt_id == "bad" else finished(job.index))


async def take(door: Orchestrator) -> tuple[str, str]:
    """Lease one group; (lease id, prompt id)."""
    answer = await door.lease(ASK)
    assert answer.lease is not None
    (payload,) = answer.payloads
    return answer.lease.lease_id, payload.group.prompt_id


async def train_one(door: Orchestrator) -> str:
    lease_id, prompt_id = await take(door)
    await door.ack(lease_id, None)
    return prompt_id


async def states(door: Orchestrator) -> dict[str, GroupState]:
    return {group.prompt_id: group.state for group in await door.groups([], after=0, limit=100)}


POLICY = Policy(group=GroupPolicy(), slots=16, halt_after_failed_groups=0)


async def test_what_ended_since_is_pending_again_and_what_had_ended_before_is_not(reopen: Callable[[], Any]):
    harness = Harness(store=reopen(), policy=POLICY, runner=runner())
    async with harness as door:
        await door.post_version(3)
        await door.submit([submission("before")])
        assert await train_one(door) == "before"
        await door.mark("step-3")
        await door.post_version(5)
        await door.submit([submission("acked"), submission("bad"), submission("cancelled"), submission("leased")])
        await until(lambda: door.status().counts.groups[S.FAILED] == 1)
        await until(lambda: door.status().counts.groups[S.READY] == 3)
        await door.cancel("g-4")
        assert await train_one(door) == "acked"
        lease_id, _ = await take(door)
        harness.runner.answer = lambda job: None
        rewound = await door.rewind("step-3")
        assert (rewound.bumped.version, rewound.bumped.previous, rewound.reopened_groups) == (3, 5, 3)
        await until(lambda: len(harness.runner.held) == 16)
        assert await states(door) == {
            "before": S.ACKED,
            "acked": S.GENERATING,
            "bad": S.GENERATING,
            "cancelled": S.GENERATING,
            "leased": S.GENERATING,
        }
        with pytest.raises(Conflict):
            await door.ack(lease_id, None)
        counts = door.status().counts
        assert counts.submitted == sum(counts.groups.values()) == 5


async def test_a_rewind_survives_a_kill_and_so_do_the_prompts_it_needs(reopen: Callable[[], Any]):
    async with Harness(store=reopen(), policy=POLICY, runner=runner()) as door:
        await door.mark("start")
        await door.submit([submission(key, colour=key) for key in "abc"], final=True)
        assert {await train_one(door) for _ in "abc"} == set("abc")
        assert (await door.lease(ASK)).status is LeaseStatus.EXHAUSTED
    async with Harness(store=reopen(), policy=POLICY, runner=runner()) as door:
        assert [checkpoint.name for checkpoint in await door.checkpoints()] == ["start"]
        assert (await door.rewind("start")).reopened_groups == 3
    second = Harness(store=reopen(), policy=POLICY, runner=runner())
    async with second as door:
        assert sorted([await train_one(door) for _ in "abc"]) == ["a", "b", "c"]
        assert {job.prompt.columns["colour"] for job in second.scorer.jobs} <= set("abc")
        assert (await door.lease(ASK)).status is LeaseStatus.EXHAUSTED
        assert (await door.rewind("start")).reopened_groups == 3, "the same point can be returned to again"


async def test_later_checkpoints_are_removed_and_earlier_ones_stay(reopen: Callable[[], Any]):
    async with Harness(store=reopen(), policy=POLICY, runner=runner()) as door:
        for name in ("one", "two", "three"):
            await door.mark(name)
            await door.submit([submission(name)])
            await train_one(door)
        await door.rewind("two")
        assert [checkpoint.name for checkpoint in await door.checkpoints()] == ["one", "two"]
        await until(lambda: door.status().counts.groups[S.READY] == 2)
        assert (await states(door))["one"] is S.ACKED
        with pytest.raises(NotFound):
            await door.rewind("three")


async def test_a_name_stands_for_one_point_and_can_be_asked_for_again_while_nothing_ended(reopen: Callable[[], Any]):
    async with Harness(store=reopen(), policy=POLICY, runner=runner()) as door:
        first = await door.mark("step")
        assert await door.mark("step") == first
        await door.submit([submission("a")])
        await train_one(door)
        with pytest.raises(Conflict, match="stands for"):
            await door.mark("step")
        await door.forget("step")
        assert (await door.mark("step")).ends == 1
        with pytest.raises(NotFound):
            await door.forget("other")


async def test_prompts_are_kept_back_to_the_oldest_checkpoint_and_go_with_it(reopen: Callable[[], Any]):
    async with Harness(store=reopen(), policy=POLICY, runner=runner()) as door:

        async def has_prompt(group_id: str) -> bool:
            return (await door.group(group_id)).payload.prompt is not None

        await door.submit([submission("a")])
        await train_one(door)
        assert not await has_prompt("g-1"), "without a checkpoint an ended group keeps nothing"
        await door.mark("one")
        await door.submit([submission("b")])
        await train_one(door)
        await door.mark("two")
        await door.submit([submission("c")])
        await train_one(door)
        assert [await has_prompt(g) for g in ("g-2", "g-3")] == [True, True]
        await door.forget("one")
        assert [await has_prompt(g) for g in ("g-2", "g-3")] == [False, True]
        await door.forget("two")
        assert not await has_prompt("g-3")


async def test_groups_that_end_while_a_rewind_reads_are_opened_again_too():
    class Slow(MemoryStore):
        """Lets a group end between the reading and the return to the point."""

        hook: Any = None

        async def payloads(self, seqs: Any) -> Any:
            found = await super().payloads(seqs)
            hook, self.hook = self.hook, None
            if hook is not None:
                await hook()
            return found

    store = Slow(max_staleness=4)
    harness = Harness(store=store, policy=POLICY, runner=runner())
    async with harness as door:
        await door.mark("start")
        await door.submit([submission("a"), submission("b")])
        await train_one(door)
        lease_id, _ = await take(door)

        async def ack() -> None:
            await door.ack(lease_id, None)

        store.hook = ack
        assert (await door.rewind("start")).reopened_groups == 2
        await asyncio.sleep(0)
        assert door.status().counts.groups[S.ACKED] == 0
