"""Rows of the prompts file become groups while there is room for them, read by one replica at a time.

What always holds: who reads excludes every other reader until what was read is committed, together with the position
read to; a reader that dies leaves nothing behind; while the disk is read nobody waits but other readers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import structlog

from rollout_service.core.model import GroupState, Prompt
from rollout_service.core.shared import SharedRun, Whole
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
ROOM_S = 0.25
"""Between two looks whether there is room again: it is when half of it is free, and then it is much."""
OTHER_S = 1.0
"""Between two looks whether another reader has left off."""
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
    happened: Happened = field(default_factory=Happened)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    position: int
    rows: Sequence[Prompt]


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
                step = await self._store.try_exclusively(READER, self._read, self._step)
            except RolloutServiceError as error:
                log.warning("prompts_wait", error=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            except Exception:  # a fault of ours must not end all reading
                log.exception("prompts_raised")
                await asyncio.sleep(RETRY_S)
                continue
            if step is None:
                await asyncio.sleep(OTHER_S)
                continue
            step.happened.tell(self._observer)
            self.done = step.follows is _Next.DONE
            if step.follows is not _Next.READ:
                await asyncio.sleep(DONE_S if self.done else ROOM_S)

    async def _read(self, run: SharedRun, whole: Whole) -> _Read:
        """Rows from where the run is, as many as there is room for."""
        source = self._source
        position = run.run.read_position if run.run.prompts_fingerprint == source.fingerprint else 0
        if source.total is not None and position >= source.total:
            return _Read(position=position, rows=())
        most = min(READ_AHEAD, self._rules.policy.max_pending_groups)
        room = most - whole.counts[GroupState.PENDING]
        if room * 2 < most:
            return _Read(position=position, rows=())
        rows = await asyncio.to_thread(source.read, position, room)
        return _Read(position=position, rows=rows[: fitting(rows, room, alone=self._alone)])

    async def _step(self, read: _Read, tx: Transaction) -> _Step:
        """Submit what was read. Raises what `take` raises."""
        source = self._source
        await tx.hold_run()
        position = await self._align(tx)
        if source.total is not None and position >= source.total:
            if tx.run.run.final:
                return _Step(follows=_Next.DONE)
            _, happened = await take(tx, self._rules, [], final=True)
            return _Step(follows=_Next.DONE, happened=happened)
        if not read.rows:
            return _Step(follows=_Next.WAIT)
        if read.position != position:  # the file is another one than the run had begun with
            return _Step(follows=_Next.READ)
        end = position + len(read.rows)
        last = source.total is not None and end >= source.total
        good = await self._unknown_or_same(tx, read.rows)
        _, happened = await take(tx, self._rules, good, final=last, read_position=end)
        return _Step(follows=_Next.DONE if last else _Next.READ, happened=happened)

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

    @property
    def _alone(self) -> bool:
        return self._rules.scoring.distillation

    async def _unknown_or_same(self, tx: Transaction, rows: Sequence[Prompt]) -> list[Submission]:
        """Without rows whose identity is known with other content, which are left out loudly."""
        submissions = [Submission(prompt=row, digest=self._digest(row)) for row in rows]
        if self._alone:
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
