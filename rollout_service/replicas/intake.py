"""Rows of the prompts file become groups while there is room for them, read by one replica at a time.

What always holds: rows are read and submitted in one transaction that excludes every other reader, and the position
read to is committed with the groups made of them; a reader that dies leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import structlog

from rollout_service.core.model import GroupState, Prompt
from rollout_service.errors import RolloutServiceError
from rollout_service.orchestrator.intake import READ_AHEAD, PromptSource
from rollout_service.orchestrator.parts import Observer
from rollout_service.orchestrator.prompt_calls import each_alone, fitting
from rollout_service.orchestrator.views import Submission
from rollout_service.orchestrator.workshop import Rules
from rollout_service.replicas.parts import Happened
from rollout_service.replicas.prompt_calls import known, take
from rollout_service.store.shared import SharedStore, Transaction

log = structlog.get_logger(__name__)

READER = "prompts"
ROOM_S = 0.1
"""Between two looks whether there is room again, or another reader has left off."""
DONE_S = 5.0
"""Between two looks once every row was read: an operator may come back with a longer file."""
RETRY_S = 1.0


class _Next(StrEnum):
    READ = "read"
    """There may be room for more at once."""
    WAIT = "wait"
    """No room."""
    DONE = "done"
    """Every row was read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    follows: _Next
    happened: Happened


class Intake:
    """One of several readers of the same file."""

    def __init__(
        self,
        source: PromptSource,
        digest: Callable[[Prompt], bytes],
        store: SharedStore,
        rules: Rules,
        observer: Observer,
    ) -> None:
        self._source, self._digest, self._store, self._rules, self._observer = source, digest, store, rules, observer
        self.done = False
        """Every row was submitted; the input is final."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._work(), name="intake")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            try:
                step = await self._store.try_exclusively(READER, self._step)
            except RolloutServiceError as error:
                log.warning("prompts_wait", error=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            except Exception:  # a fault of ours must not end all reading
                log.exception("prompts_raised")
                await asyncio.sleep(RETRY_S)
                continue
            if step is not None:
                step.happened.tell(self._observer)
                self.done = step.follows is _Next.DONE
                if step.follows is _Next.READ:
                    continue
            await asyncio.sleep(DONE_S if self.done else ROOM_S)

    async def _step(self, tx: Transaction) -> _Step:
        """Read as many rows as there is room for. Raises what `take` raises."""
        source, policy = self._source, self._rules.policy
        nothing = Happened()
        most = min(READ_AHEAD, policy.max_pending_groups)
        if (most - tx.whole.counts[GroupState.PENDING]) * 2 < most and not self._ended(tx):
            return _Step(follows=_Next.WAIT, happened=nothing)
        await tx.hold_run()
        position = await self._align(tx)
        if source.total is not None and position >= source.total:
            if not tx.run.run.final:
                _, nothing = await take(tx, self._rules, [], final=True)
            return _Step(follows=_Next.DONE, happened=nothing)
        room = most - tx.whole.counts[GroupState.PENDING]
        if room <= 0:
            return _Step(follows=_Next.WAIT, happened=nothing)
        rows = await asyncio.to_thread(source.read, position, room)
        alone = self._rules.scoring.distillation
        rows = rows[: fitting(rows, room, alone=alone)]
        end = position + len(rows)
        last = source.total is not None and end >= source.total
        good = await self._unknown_or_same(tx, rows, alone)
        _, happened = await take(tx, self._rules, good, final=last, read_position=end)
        return _Step(follows=_Next.DONE if last else _Next.READ, happened=happened)

    def _ended(self, tx: Transaction) -> bool:
        total = self._source.total
        return total is not None and tx.run.run.read_position >= total

    async def _align(self, tx: Transaction) -> int:
        """Bring the run in line with the file; the position to read from."""
        run, source = tx.run.run, self._source
        if run.prompts_fingerprint != source.fingerprint:
            if run.prompts_fingerprint:
                log.warning("prompts_changed", read_position=run.read_position, action="read again, known rows skipped")
            run = replace(run, read_position=0, prompts_fingerprint=source.fingerprint)
        if run.final and (source.total is None or run.read_position < source.total):
            run = replace(run, final=False)  # more epochs or rows than when it was declared final
        if run != tx.run.run:
            await tx.set_run(replace(tx.run, run=run))
        return run.read_position

    async def _unknown_or_same(self, tx: Transaction, rows: Sequence[Prompt], alone: bool) -> list[Submission]:
        """Without rows whose identity is known with other content, which are left out loudly."""
        submissions = [Submission(prompt=row, digest=self._digest(row)) for row in rows]
        if alone:
            submissions = [each for submission in submissions for each in each_alone(submission)]
        before = await known(tx, submissions)
        good = []
        for submission in submissions:
            prompt = submission.prompt
            stored = before.get((prompt.prompt_id, prompt.epoch))
            if stored is not None and stored[1] != submission.digest:
                log.error("prompt_refused", prompt_id=prompt.prompt_id, error="known with other content")
            else:
                good.append(submission)
        return good
