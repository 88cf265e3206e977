"""Safeguards that no other test would miss: each is taken away by a patch in mutants/, and its test here must fail."""

from __future__ import annotations

import asyncio

import pytest

from rollout_service.core.group import Group, GroupPolicy
from rollout_service.core.lifecycle import IllegalEvent, Scored, apply
from rollout_service.core.model import GroupState
from rollout_service.core.records import Batch
from rollout_service.core.scheduler import Policy
from rollout_service.orchestrator import LeaseRequest, LeaseStatus
from rollout_service.store import MemoryStore
from tests.fakes import Harness, Runner, finished, submission, until


class Recording(MemoryStore):
    """Keeps every batch, and holds commits back while `go` is clear."""

    def __init__(self, max_staleness: int) -> None:
        super().__init__(max_staleness)
        self.batches: list[Batch] = []
        self.go = asyncio.Event()
        self.go.set()
        self.holds = False

    async def commit(self, batch: Batch) -> None:
        self.holds = True
        await self.go.wait()
        self.holds = False
        await super().commit(batch)
        self.batches.append(batch)


async def test_a_lease_asked_for_before_a_bump_is_committed_before_it():
    store = Recording(0)
    policy = Policy(group=GroupPolicy(max_staleness=0), slots=16)
    harness = Harness(store=store, policy=policy, runner=Runner(answer=lambda job: finished(job.index)))
    async with harness as door:
        await door.submit([submission("p")])
        await until(lambda: door.status().counts.groups[GroupState.READY] == 1, "a ready group")
        await until(lambda: door.writer.committer.idle, "everything committed")
        store.go.clear()
        pausing = asyncio.create_task(door.pause())
        await until(lambda: store.holds, "a commit under way")
        leasing = asyncio.create_task(door.lease(LeaseRequest(max_groups=1, wait_s=5)))
        await until(lambda: door.status().counts.groups[GroupState.LEASED] == 1, "a lease decided")
        bumping = asyncio.create_task(door.post_version(1))
        await asyncio.sleep(0)
        store.go.set()
        lease, bumped, _ = await asyncio.gather(leasing, bumping, pausing)
        assert lease.status is LeaseStatus.OK
        assert (lease.policy_version, bumped.version) == (0, 1)
        (with_lease,) = [number for number, batch in enumerate(store.batches) if batch.leases]
        (with_bump,) = [number for number, batch in enumerate(store.batches) if batch.run and batch.run.policy_version]
        assert with_lease < with_bump
        assert harness.observer.failures == []


def test_a_score_of_an_attempt_that_is_over_is_refused():
    group = Group(
        seq=1,
        prompt_id="p",
        epoch=0,
        num_generations=2,
        state=GroupState.SCORING,
        attempt=2,
        version=1,
        waiting=(),
        finished=frozenset({0, 1}),
        submitted_at=0.0,
        changed_at=0.0,
    )
    with pytest.raises(IllegalEvent):
        apply(group, Scored(attempt=1), policy=GroupPolicy(), now=1.0)
    after, _ = apply(group, Scored(attempt=2), policy=GroupPolicy(), now=1.0)
    assert after.state is GroupState.READY
