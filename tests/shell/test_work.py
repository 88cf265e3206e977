"""The tasks of rollouts: how many begin in one pass of the loop, and what a stop finds of those that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace

import pytest

from rollout_service.core.group import Group
from rollout_service.core.model import (
    FailedRollout,
    FailureReason,
    FinishedRollout,
    GroupState,
    Prompt,
    RolloutJob,
    ScoreJob,
    Scores,
)
from rollout_service.orchestrator.gate import PauseGate
from rollout_service.orchestrator.parts import Gate
from rollout_service.orchestrator.work import STARTS, RolloutKey, Work

ROWS = 3 * STARTS + 5


class Runner:
    """Rollouts that end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.end = asyncio.Event()
        self.slow: asyncio.Event | None = None
        """Set where a cancelled rollout takes its time, until this is."""

    async def run(self, job: RolloutJob, gate: Gate) -> FinishedRollout | FailedRollout:
        self.begun.append(job.index)
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled.append(job.index)
            if self.slow is not None:
                await self.slow.wait()
            raise
        return FailedRollout(index=job.index, reason=FailureReason.REJECTED, error="no")


class Scorer:
    async def score(self, job: ScoreJob) -> Scores:
        raise AssertionError("nothing is scored here")


def group(rows: int = ROWS) -> Group:
    return Group(
        seq=1,
        prompt_id="p",
        epoch=0,
        num_generations=rows,
        state=GroupState.GENERATING,
        version=0,
        waiting=(),
        running=frozenset(range(rows)),
        submitted_at=0.0,
        changed_at=0.0,
    )


async def nothing(rollouts: Collection[str]) -> None:
    pass


Abort = Callable[[Collection[str]], Awaitable[None]]


def work(runner: Runner, settled: list[RolloutKey], abort: Abort = nothing) -> Work:
    return Work(
        runner,
        Scorer(),
        PauseGate(),
        abort=abort,
        settled=lambda key, outcome, seconds: settled.append(key),
        scored=lambda group, job, scores: None,
    )


PROMPT = Prompt(prompt_id="p", num_generations=ROWS)


async def test_a_pass_of_the_loop_begins_so_many_and_the_rest_follows_in_order() -> None:
    runner, settled = Runner(), []
    tested = work(runner, settled)
    tested.start_rollouts(group(), range(ROWS), PROMPT)
    seen = []
    while len(runner.begun) < ROWS:
        await asyncio.sleep(0)
        seen.append(len(runner.begun))
    assert runner.begun == list(range(ROWS))
    steps = [after - before for before, after in zip([0, *seen], seen, strict=False)]
    assert max(steps) == STARTS
    runner.end.set()
    while len(settled) < ROWS:
        await asyncio.sleep(0)
    assert sorted(index for _, _, index in settled) == list(range(ROWS))


async def test_groups_given_in_one_pass_share_what_may_begin_in_it() -> None:
    runner = Runner()
    tested = work(runner, [])
    for index in range(ROWS):
        tested.start_rollouts(group(), [index], PROMPT)
    await asyncio.sleep(0)
    assert len(runner.begun) == STARTS
    await tested.stop_all(within_s=1)


async def test_what_is_stopped_before_it_began_never_begins_and_does_not_count() -> None:
    runner = Runner()
    tested = work(runner, [])
    tested.start_rollouts(group(), range(ROWS), PROMPT)
    await asyncio.sleep(0)
    assert tested.stop_rollouts(group(), range(ROWS)) == 2 * STARTS  # the second pass's have a task each already
    async with asyncio.timeout(10):
        while len(runner.cancelled) < 2 * STARTS:
            await asyncio.sleep(0)
    for _ in range(20):  # passes of the loop in which more would begin
        await asyncio.sleep(0)
    assert runner.begun == list(range(2 * STARTS))
    assert sorted(runner.cancelled) == runner.begun


async def test_what_was_stopped_ends_before_anything_new_begins() -> None:
    runner = Runner()
    tested = work(runner, [])
    tested.start_rollouts(group(STARTS), range(STARTS), PROMPT)
    await asyncio.sleep(0)
    began = len(runner.begun)
    tested.stop_rollouts(group(STARTS), range(STARTS))
    tested.start_rollouts(replace(group(8), seq=2), range(8), PROMPT)
    while len(runner.begun) == began:
        await asyncio.sleep(0)
    assert len(runner.cancelled) == STARTS
    await tested.stop_all(within_s=1)


async def test_a_stopped_rollout_that_takes_its_time_holds_new_ones_up_for_a_moment_only() -> None:
    runner = Runner()
    runner.slow = asyncio.Event()
    tested = work(runner, [])
    tested.start_rollouts(group(1), [0], PROMPT)
    await asyncio.sleep(0)
    tested.stop_rollouts(group(1), [0])
    tested.start_rollouts(replace(group(8), seq=2), range(8), PROMPT)
    async with asyncio.timeout(10):
        while len(runner.begun) < 9:
            await asyncio.sleep(0.01)
    assert not runner.slow.is_set()
    runner.slow.set()
    await tested.stop_all(within_s=1)


async def test_the_engines_are_told_once_for_all_before_any_task_is_cancelled() -> None:
    runner, told = Runner(), []

    async def abort(rollouts: Collection[str]) -> None:
        told.append(sorted(rollouts))
        assert runner.cancelled == []
        await asyncio.sleep(0)
        assert runner.cancelled == []

    tested = work(runner, [], abort)
    for seq in (1, 2):
        tested.start_rollouts(replace(group(2), seq=seq), range(2), PROMPT)
    await asyncio.sleep(0)
    for seq in (1, 2):
        tested.stop_rollouts(replace(group(2), seq=seq), range(2))
    async with asyncio.timeout(10):
        while len(runner.cancelled) < 4:
            await asyncio.sleep(0)
    assert told == [["g-1.1.0", "g-1.1.1", "g-2.1.0", "g-2.1.1"]]


async def hanging(rollouts: Collection[str]) -> None:
    await asyncio.Event().wait()


async def raising(rollouts: Collection[str]) -> None:
    raise RuntimeError("a fault of ours")


@pytest.mark.parametrize("abort", [hanging, raising])
async def test_tasks_are_cancelled_whatever_the_abort_call_does(abort: Abort) -> None:
    runner = Runner()
    tested = work(runner, [], abort)
    tested.start_rollouts(group(2), range(2), PROMPT)
    await asyncio.sleep(0)
    tested.stop_rollouts(group(2), range(2))
    async with asyncio.timeout(10):
        while len(runner.cancelled) < 2:
            await asyncio.sleep(0.001)


async def test_the_end_of_all_work_ends_what_waits_too() -> None:
    runner = Runner()
    tested = work(runner, [])
    tested.start_rollouts(group(), range(ROWS), PROMPT)
    await asyncio.sleep(0)
    await tested.stop_all(within_s=1)
    assert len(runner.begun) == len(runner.cancelled) == STARTS
