"""What every group of calls has: the writer, the store to read from, the clock, the rules."""

from __future__ import annotations

from rollout_service.core.group import group_seq
from rollout_service.errors import NotFound
from rollout_service.orchestrator.parts import Clock
from rollout_service.orchestrator.workshop import Rules
from rollout_service.orchestrator.writer import Writer
from rollout_service.store.protocol import Store


class Calls:
    """Base of the calls of one resource. All methods belong to the event loop that runs the writer."""

    def __init__(self, writer: Writer, store: Store, rules: Rules, clock: Clock) -> None:
        self._writer, self._store, self._rules, self._clock = writer, store, rules, clock

    @property
    def writer(self) -> Writer:
        """For the rooms of this package only."""
        return self._writer

    @property
    def version(self) -> int:
        """The current policy version, as it is on disk."""
        return self._writer.version

    @property
    def version_returns(self) -> int:
        """How often the version was lowered since the start: the same number then stands for other weights."""
        return self._writer.returns

    def _seq(self, public_id: str) -> int:
        seq = group_seq(public_id)
        if seq is None:
            raise NotFound(f"there is no group {public_id!r}")
        return seq

    async def _settled(self) -> None:
        """Reads show what is committed, and everything decided before them; a broken store can still be read."""
        if self._writer.broken is None and not self._writer.closing:
            await self._writer.settled()
