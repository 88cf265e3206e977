"""One transaction on shared memory.

What always holds: it reads what it has written; `content` is the committed one until the first change and a copy from
then on, so that forgetting the transaction is all there is to undoing it. Using it after its end is a fault of the
caller (RuntimeError), and so is writing the run's row without holding it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from rollout_service.core.group import Checkpoint, Group, Lease
from rollout_service.core.model import FinishedRollout, GroupState, Prompt
from rollout_service.core.records import Batch, GroupPayload, StoredPrompt
from rollout_service.core.shared import Claimed, SharedRun, Whole
from rollout_service.errors import BatchRefused, StoreUnavailable
from rollout_service.store.rules import refusal
from rollout_service.store.shared import Signal
from rollout_service.store.shared_memory_content import NOBODY, WORKED_ON, SharedContent

S = GroupState
_OPENED = frozenset({S.GENERATING, S.SCORING, S.READY, S.LEASED})


class MemoryTransaction:
    """A `Transaction`. `check` raises StoreUnavailable where the store cannot be reached."""

    def __init__(
        self, content: SharedContent, *, now: float, alone: bool, max_staleness: int, check: Callable[[], None]
    ) -> None:
        self.content = content
        self.signals: list[Signal] = []
        self.over = False
        self._committed = content
        self._now = now
        self._holds_run = alone
        self._max_staleness = max_staleness
        self._check = check
        self._made: list[Lease] = []
        """Leases that are new in it."""
        self._look_at_run()

    @property
    def now(self) -> float:
        return self._now

    @property
    def run(self) -> SharedRun:
        return self._run

    @property
    def whole(self) -> Whole:
        return self._whole

    async def hold_run(self) -> None:
        await self._step()
        self._holds_run = True
        self._look_at_run()

    async def set_run(self, run: SharedRun) -> None:
        await self._step()
        if not self._holds_run:
            raise RuntimeError("the run's row is written without holding it")
        content = self.changed()
        content.run = replace(run.run, ended=content.run.ended, ends=content.run.ends)
        content.row = run
        oldest = content.run.policy_version - self._max_staleness
        for seq, _ in (member for lease in self._made for member in lease.groups):
            group = content.groups[seq]
            if group.state is S.LEASED and (group.version or 0) < oldest:
                raise StoreUnavailable(f"a lease may not take group {seq}: older than version {oldest}")
        self._look_at_run()

    async def groups(self, seqs: Collection[int]) -> Mapping[int, Claimed]:
        await self._step()
        return {seq: self.content.claimed(seq) for seq in seqs if seq in self.content.groups}

    async def claims(self, seqs: Collection[int]) -> Mapping[int, tuple[str | None, int]]:
        await self._step()
        return {seq: self.content.claims.get(seq, NOBODY) for seq in seqs if seq in self.content.groups}

    async def claims_of(self, replica_id: str) -> Mapping[int, int]:
        await self._step()
        return {seq: claim for seq, (owner, claim) in self.content.claims.items() if owner == replica_id}

    async def claimable(self, limit: int, *, pending: bool) -> Sequence[Claimed]:
        await self._step()
        found = self._free(lambda group: True)
        if pending:
            waiting = [group for group in self.content.outstanding.values() if group.state is S.PENDING]
            found += sorted(waiting, key=lambda group: (group.attempt == 1, group.seq))
        return [self.content.claimed(group.seq) for group in found[:limit]]

    async def claimable_to_score(self, limit: int) -> Sequence[Claimed]:
        await self._step()
        found = self._free(lambda group: group.state is S.SCORING)
        return [self.content.claimed(group.seq) for group in found[:limit]]

    async def ready(self, limit: int, *, oldest: int) -> Sequence[Group]:
        await self._step()
        found = [
            (group.version, group.seq, group)
            for group in self.content.outstanding.values()
            if group.state is S.READY and group.version is not None and group.version >= oldest
        ]
        return self._read(group for _, _, group in sorted(found)[:limit])

    async def outdated(self, oldest: int) -> Sequence[Group]:
        await self._step()

        def old(group: Group) -> bool:
            return group.version is not None and group.version < oldest

        waiting = [group for group in self.content.outstanding.values() if group.state is S.READY and old(group)]
        return self._read(sorted(waiting + self._free(old), key=_seq))

    async def opened(self) -> Sequence[Group]:
        await self._step()
        found = [group for group in self.content.outstanding.values() if group.state in _OPENED]
        return self._read(sorted(found, key=_seq))

    async def lease(self, lease_id: str) -> Lease | None:
        await self._step()
        return self.content.leases.get(lease_id)

    async def lease_by_request(self, request_id: str) -> Lease | None:
        await self._step()
        return self.content.lease_by_request(request_id)

    async def leases_due(self, limit: int) -> Sequence[Lease]:
        await self._step()
        due = [lease for lease in self.content.live.values() if lease.expires_at <= self._now]
        return sorted(due, key=lambda lease: (lease.expires_at, lease.lease_id))[:limit]

    async def live_leases(self) -> Sequence[Lease]:
        await self._step()
        return self.content.live_leases()

    async def checkpoints(self) -> Sequence[Checkpoint]:
        await self._step()
        return sorted(self.content.checkpoints.values(), key=lambda checkpoint: checkpoint.number)

    async def ended_since(self, ends: int) -> Sequence[int]:
        await self._step()
        return self.content.ended_since(ends)

    async def payloads(self, seqs: Sequence[int]) -> Sequence[GroupPayload]:
        await self._step()
        return [self.content.payload(self.content.groups[seq]) for seq in seqs if seq in self.content.groups]

    async def paced(self, *, acked: bool) -> Collection[int]:
        await self._step()
        content, counted = self.content, set()
        for lease in content.leases.values():
            if lease.policy_version != content.run.policy_version:
                continue
            for seq, _ in lease.groups:
                group = content.groups[seq]
                if lease.lease_id in (group.lease_id, group.acked_by if acked else None):
                    counted.add(seq)
        return counted

    async def find_prompts(self, keys: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], StoredPrompt]:
        await self._step()
        return {key: self.content.known[key] for key in keys if key in self.content.known}

    async def prompts(self, seqs: Sequence[int]) -> Mapping[int, Prompt]:
        await self._step()
        return {seq: self.content.prompts[seq] for seq in seqs if seq in self.content.prompts}

    async def tokens(self, seqs: Collection[int]) -> Mapping[int, int]:
        await self._step()
        found = {}
        for seq in seqs:
            group = self.content.groups.get(seq)
            counts = [
                rollout.output_tokens
                for (attempt, _), rollout in self.content.rollouts.get(seq, {}).items()
                if group is not None and attempt == group.attempt and isinstance(rollout, FinishedRollout)
            ]
            if counts:
                found[seq] = sum(counts)
        return found

    async def once(self, replica_id: str, number: int) -> bool:
        await self._step()
        if number <= self.content.numbers.get(replica_id, -1):
            return False
        self.changed().numbers[replica_id] = number
        return True

    async def write(self, batch: Batch, *, owner: str | None = None) -> Mapping[int, int]:
        await self._step()
        numbered = self.content.numbered(batch)
        refused = refusal(numbered, before=self.content, max_staleness=self._max_staleness)
        if refused is not None:
            raise BatchRefused(f"the store refused a batch: {refused}")
        self._made += [lease for key, lease in batch.leases.items() if key not in self._committed.leases]
        return self.changed().change(numbered, owner=owner)

    def signal(self, signal: Signal) -> None:
        self._check_running()
        self.signals.append(signal)

    def changed(self) -> SharedContent:
        """The transaction's own content."""
        self._check_running()
        if self.content is self._committed:
            self.content = self._committed.copy()
        return self.content

    async def _step(self) -> None:
        self._check_running()
        await asyncio.sleep(0)
        self._check()

    def _check_running(self) -> None:
        if self.over:
            raise RuntimeError("the transaction is over")

    def _look_at_run(self) -> None:
        self._run, self._whole = self.content.shared_run(), self.content.whole()

    def _free(self, wanted: Callable[[Group], bool]) -> list[Group]:
        """Opened groups whose owner is gone, by number."""
        found = [
            group
            for group in self.content.outstanding.values()
            if group.state in WORKED_ON and self.content.owner(group.seq) is None and wanted(group)
        ]
        return sorted(found, key=_seq)

    def _read(self, groups: Iterable[Group]) -> list[Group]:
        return [self.content.read(group) for group in groups]


def _seq(group: Group) -> int:
    return group.seq
