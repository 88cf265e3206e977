"""Points a trainer can go back to (design 4.9)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_service.core.changes import Bumped
from rollout_service.core.group import Checkpoint, Group
from rollout_service.core.model import Prompt
from rollout_service.core.scheduler import NameTaken
from rollout_service.errors import Conflict, NotFound, StoreUnavailable
from rollout_service.orchestrator.calls import Calls
from rollout_service.orchestrator.parts import Clock
from rollout_service.orchestrator.workshop import Rules
from rollout_service.orchestrator.writer import Writer
from rollout_service.store.protocol import Store

READ_CHUNK = 1000
"""Prompts read at once: bounds the memory of one answer of the store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewound:
    """What going back did."""

    checkpoint: Checkpoint
    bumped: Bumped
    reopened_groups: int
    """Groups that had ended since and are pending again."""


class CheckpointCalls(Calls):
    def __init__(self, writer: Writer, store: Store, rules: Rules, clock: Clock) -> None:
        super().__init__(writer, store, rules, clock)
        self._rewinding = asyncio.Lock()

    async def mark(self, name: str) -> Checkpoint:
        """Remember this point under `name`. Raises Conflict where the name stands for another point."""
        writer = self._writer
        writer.require_open()
        try:
            checkpoint = writer.core.mark(name, now=self._clock())
        except NameTaken as error:
            raise Conflict(f"{error}; DELETE it first or take another name", name=name) from error
        writer.turn()
        await writer.settled()
        return checkpoint

    async def checkpoints(self) -> Sequence[Checkpoint]:
        """Oldest first."""
        return sorted(self._writer.core.checkpoints.values(), key=lambda checkpoint: checkpoint.number)

    async def forget(self, name: str) -> None:
        """Let a point go, and the prompts that only it kept. Raises NotFound."""
        writer = self._writer
        writer.require_open()
        if not writer.core.forget(name):
            raise NotFound(f"there is no checkpoint {name!r}")
        writer.turn()
        await writer.settled()

    async def rewind(self, name: str) -> Rewound:
        """Return to a point: as a reset to its version, and what ended since is pending again. Raises NotFound."""
        writer = self._writer
        async with self._rewinding:
            ended: dict[int, tuple[Group, Prompt]] = {}
            seen = -1
            while True:
                writer.require_open()
                checkpoint = writer.core.checkpoints.get(name)
                if checkpoint is None:
                    raise NotFound(f"there is no checkpoint {name!r}")
                if seen == writer.core.ends:  # nothing ended while we read
                    break
                after, seen = max(seen, checkpoint.ends), writer.core.ends
                await writer.settled()
                ended |= await self._ended(after)
            bumped = writer.reopen(checkpoint, ended)
            writer.turn()
            await writer.settled()
        return Rewound(checkpoint=checkpoint, bumped=bumped, reopened_groups=len(ended))

    async def _ended(self, after: int) -> dict[int, tuple[Group, Prompt]]:
        """Groups whose end number is above `after`, with their prompts."""
        found: dict[int, tuple[Group, Prompt]] = {}
        seqs = await self._store.ended_since(after)
        for start in range(0, len(seqs), READ_CHUNK):
            for payload in await self._store.payloads(seqs[start : start + READ_CHUNK]):
                if payload.prompt is None:
                    raise StoreUnavailable(f"the prompt of {payload.group.group_id} is gone; it cannot be opened again")
                found[payload.group.seq] = (payload.group, payload.prompt)
        return found
