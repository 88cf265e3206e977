"""Rows of the prompts file become groups while there is room for them.

What always holds: the position read to is committed together with the groups made of what was read, so that a restart
goes on at the next row and no row is lost or submitted twice; the last row of the last epoch declares the input final.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import structlog

from rollout_service.core.model import Prompt
from rollout_service.errors import Conflict, RolloutServiceError
from rollout_service.orchestrator.views import Submission

if TYPE_CHECKING:  # the door of this room holds an Intake; at run time the import would go round in a circle
    from rollout_service.orchestrator.orchestrator import Orchestrator

log = structlog.get_logger(__name__)

READ_AHEAD = 256
"""Groups kept pending from the file: enough for thousands of slots, few enough that a bump of the version or a change
of mind does not find an epoch queued."""
RETRY_S = 1.0
"""Between two tries when the store or the queue refuses."""


class PromptSource(Protocol):
    """Rows in a fixed order, over all epochs."""

    @property
    def total(self) -> int | None:
        """Rows over all epochs; None where it goes on for ever."""

    @property
    def fingerprint(self) -> str:
        """Changes with the content of the file or its order."""

    def read(self, position: int, count: int) -> Sequence[Prompt]:
        """Up to `count` rows from `position` on; fewer only at the end."""


class Intake:
    """The task that reads."""

    def __init__(self, source: PromptSource, digest: Callable[[Prompt], bytes], door: Orchestrator) -> None:
        self._source, self._digest, self._door = source, digest, door
        self._task: asyncio.Task[None] | None = None
        self.done = False
        """Every row was submitted; the input is final."""

    async def start(self) -> None:
        self.done = not self._align()
        self._task = asyncio.create_task(self._read(), name="intake")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def _align(self) -> bool:
        """Bring the run in line with the file, as it is now and after every reload; whether rows are left to read.

        Raises StoreUnavailable while the store is broken: what memory says then may never have been committed.
        """
        writer, source = self._door.writer, self._source
        writer.require_open()
        run = writer.run
        if run.prompts_fingerprint != source.fingerprint:
            if run.prompts_fingerprint:
                log.warning("prompts_changed", read_position=run.read_position, action="read again, known rows skipped")
            writer.read_to(0, source.fingerprint)
        left = source.total is None or writer.run.read_position < source.total
        if left and writer.core.final:
            writer.core.reopen_input()  # more epochs or rows than when it was declared final
        return left

    async def _read(self) -> None:
        writer = self._door.writer
        while True:
            writer.turned.clear()
            room = min(READ_AHEAD, self._door.max_pending_groups) - writer.core.pending
            if room * 2 < min(READ_AHEAD, self._door.max_pending_groups):
                await writer.turned.wait()
                continue
            try:
                if not self._align():
                    await self._finish()
                    return
                await self._read_some(room)
            except RolloutServiceError as error:
                log.warning("prompts_wait", error=str(error))
                await asyncio.sleep(RETRY_S)

    async def _finish(self) -> None:
        position = self._door.writer.run.read_position
        await self._door.take([], final=True, read_from=position, read_position=position)
        self.done = True

    async def _read_some(self, count: int) -> None:
        source = self._source
        position = self._door.writer.run.read_position
        rows = await asyncio.to_thread(source.read, position, count)
        rows = rows[: self._door.fitting(rows, count)]
        submissions = [Submission(prompt=row, digest=self._digest(row)) for row in rows]
        end = position + len(rows)
        last = source.total is not None and end >= source.total
        try:
            await self._door.take(submissions, final=last, read_from=position, read_position=end)
        except Conflict:
            await self._one_by_one(submissions, position)

    async def _one_by_one(self, submissions: Sequence[Submission], position: int) -> None:
        """One row's identity is known with other content: leave that row out, loudly, and take the others."""
        for at, submission in enumerate(submissions, position + 1):
            try:
                await self._door.take([submission], read_from=at - 1, read_position=at)
            except Conflict as error:
                log.error("prompt_refused", prompt_id=submission.prompt.prompt_id, error=str(error))
                await self._door.take([], read_from=at - 1, read_position=at)
