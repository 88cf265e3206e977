"""Rewards that rollouts bring along, and a fault of ours in scoring: it costs its group and nobody waits for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollout_service.core.model import DropReason, GroupState
from rollout_service.core.scoring import OWN_REWARD
from rollout_service.orchestrator import LeaseRequest, workshop
from rollout_service.store import MemoryStore
from tests.fakes import Harness, Runner, finished, submission, until

ASK = LeaseRequest(max_groups=8, wait_s=5)


async def test_a_rollouts_own_reward_is_added_to_those_of_the_functions_and_one_without_has_theirs_alone() -> None:
    runner = Runner(answer=lambda job: replace(finished(job.index), reward=None if job.index == 3 else 10.0))
    async with Harness(store=MemoryStore(max_staleness=4), runner=runner) as door:
        await door.submit([submission("a")])
        (payload,) = (await door.lease(ASK)).payloads
    assert payload.score is not None
    assert [payload.score.rows[i].reward for i in range(4)] == [10.0, 11.0, 12.0, 3.0]
    assert [payload.score.rows[i].rewards[OWN_REWARD] for i in range(4)] == [10.0, 10.0, 10.0, None]


async def test_a_fault_of_ours_in_scoring_drops_that_group_and_the_next_is_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = workshop.judge

    def judge(*args: object, **kwargs: object) -> object:
        monkeypatch.setattr(workshop, "judge", whole)
        raise KeyError("a fault of ours")

    monkeypatch.setattr(workshop, "judge", judge)
    runner = Runner(answer=lambda job: finished(job.index))
    async with Harness(store=MemoryStore(max_staleness=4), runner=runner) as door:
        await door.submit([submission("a")])
        await until(lambda: door.status().counts.groups[GroupState.DROPPED] == 1, "the group is dropped")
        group = (await door.group("g-1")).payload.group
        assert (group.reason, "a fault of ours" in (group.error or "")) == (DropReason.UNSCORABLE, True)
        await door.submit([submission("b")])
        (payload,) = (await door.lease(ASK)).payloads
    assert payload.group.group_id == "g-2"
