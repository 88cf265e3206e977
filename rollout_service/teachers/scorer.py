"""The door of this room: survivors in, what their teacher and the reward functions said of them out.

`score` raises nothing but its caller's cancellation (or that of `stop`). A rollout whose teacher failed has no table
and is named, counted and logged; nothing is put in its place. Rewards run beside the teacher, and a failure of the one
changes nothing for the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import structlog

from rollout_service.core.model import FinishedRollout, ScoreJob, Scores, TeacherTokens
from rollout_service.core.sequences import token_sequences
from rollout_service.prompts import TEACHER_ID
from rollout_service.teachers.spec import TeacherSpec
from rollout_service.teachers.teacher import Teacher, TeacherFailed

log = structlog.get_logger(__name__)


class Rewards(Protocol):
    """Asks the reward functions, of which there may be none."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def score(self, job: ScoreJob) -> Scores: ...


class TeacherScorer:
    """Implements the orchestrator's Scorer."""

    def __init__(
        self,
        specs: Sequence[TeacherSpec],
        *,
        rewards: Rewards,
        on_error: Callable[[str], None] = lambda teacher: None,
        wait_s: float = 0.0,
    ) -> None:
        """`specs`: at least one, with different ids; `on_error` is called with a teacher's id for every rollout it
        failed on; `wait_s`: how long a sample waits for a teacher that is down."""
        # One thread: answers decoded side by side would only take the interpreter away from the event loop.
        self._decoding = ThreadPoolExecutor(1, thread_name_prefix="teacher-answers")
        self._teachers = {spec.id: Teacher(spec, self._decoding, wait_s=wait_s) for spec in specs}
        self._rewards = rewards
        self._on_error = on_error
        self._stopped = False

    async def start(self) -> None:
        """Raises ConfigError where a reward, or a teacher that answers, is wrong. One that is down may still come."""
        try:
            await self._rewards.start()
            started = await asyncio.gather(*(t.start() for t in self._teachers.values()), return_exceptions=True)
            for error in filter(None, started):
                raise error
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Closes connections. Scoring under way is cancelled: it must not settle a group."""
        self._stopped = True
        for teacher in self._teachers.values():
            await teacher.stop()
        self._decoding.shutdown(wait=False, cancel_futures=True)
        await self._rewards.stop()

    async def score(self, job: ScoreJob) -> Scores:
        """Rewards and tables of the job's rollouts, in their order."""
        errors: dict[str, str] = {}
        async with asyncio.TaskGroup() as tasks:
            rewards = tasks.create_task(self._rewards.score(job))
            tables = [tasks.create_task(self._taught(job, rollout, errors)) for rollout in job.rollouts]
        scores, teacher = rewards.result(), [table.result() for table in tables]
        if self._stopped:  # what failed now failed because of the shutdown
            raise asyncio.CancelledError
        return replace(scores, errors={**scores.errors, **errors}, teacher=teacher)

    async def _taught(
        self, job: ScoreJob, rollout: FinishedRollout, errors: dict[str, str]
    ) -> tuple[TeacherTokens, ...] | None:
        """One table a sample of the rollout; None, with a line in `errors`, where its teacher failed."""
        teacher_id = self._teacher_id(job)
        teacher = self._teachers.get(teacher_id)
        try:
            if teacher is None:
                raise TeacherFailed("no teacher of this id is configured")
            return await teacher.score(token_sequences(rollout.turns, fork_threshold=rollout.fork_threshold))
        except TeacherFailed as failed:
            error = str(failed)
        except Exception as fault:  # ours: it costs this sample only, and is counted with the teacher's
            if not self._stopped:
                log.exception("teacher_raised", teacher=teacher_id, group_id=job.group_id)
            error = repr(fault)
        if not self._stopped:  # the shutdown is no fault of the teacher's
            errors[f"teacher:{teacher_id}"] = error
            self._on_error(teacher_id)
            about = {"group_id": job.group_id, "attempt": job.attempt, "index": rollout.index}
            log.warning("teacher_failed", teacher=teacher_id, **about, error=error)
        return None

    def _teacher_id(self, job: ScoreJob) -> str:
        named = job.prompt.columns.get(TEACHER_ID)
        if named is None and len(self._teachers) == 1:
            return next(iter(self._teachers))
        return str(named)
