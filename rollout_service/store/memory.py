"""A store that keeps values and loses them with the process: for tests, simulations and dry runs.

What always holds: it refuses what the SQLite store refuses, before anything of the batch was applied; a commit that
failed changed nothing, and further ones are refused until `load`. Every call suspends once, as a real store does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from rollout_service.core.group import Checkpoint, Group, Lease, LeaseState
from rollout_service.core.model import FailedRollout, FinishedRollout, GroupState, Prompt
from rollout_service.core.records import Batch, GroupPayload, GroupScore, RunState, Snapshot, StoredPrompt
from rollout_service.errors import StoreUnavailable
from rollout_service.store.rules import refusal
from rollout_service.store.standing import as_read, ordered, run_as_kept


@dataclass(slots=True)
class _Content:
    """What is committed. Values are frozen, so that a copy of the dicts is a copy of everything."""

    run: RunState = field(default_factory=RunState)
    groups: dict[int, Group] = field(default_factory=dict)
    known: dict[tuple[str, int], StoredPrompt] = field(default_factory=dict)
    prompts: dict[int, Prompt] = field(default_factory=dict)
    rollouts: dict[int, dict[tuple[int, int], FinishedRollout | FailedRollout]] = field(default_factory=dict)
    """By seq, then (attempt, index)."""
    scores: dict[int, dict[int, GroupScore]] = field(default_factory=dict)
    """By seq, then attempt."""
    leases: dict[str, Lease] = field(default_factory=dict)
    requests: dict[str, str] = field(default_factory=dict)
    """Request id -> lease id, for ever."""
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)

    def copy(self) -> _Content:
        return _Content(
            run=self.run,
            groups=dict(self.groups),
            known=dict(self.known),
            prompts=dict(self.prompts),
            rollouts={seq: dict(of_group) for seq, of_group in self.rollouts.items()},
            scores={seq: dict(of_group) for seq, of_group in self.scores.items()},
            leases=dict(self.leases),
            requests=dict(self.requests),
            checkpoints=dict(self.checkpoints),
        )


class MemoryStore:
    """A `Store` without a medium.

    `fail_commits`, where set, is why every commit fails (as a full disk would make it). `commits` counts those that
    took effect. `reopened` is what a process finds that starts after this one was killed.
    """

    def __init__(self, max_staleness: int) -> None:
        self.fail_commits: Exception | None = None
        self.commits = 0
        self._max_staleness = max_staleness
        self._content = _Content()
        self._opened = False
        self._failure: str | None = None

    @classmethod
    def reopened(cls, other: Self) -> Self:
        """A store that is not open yet and holds what `other` has committed; from here on the two are apart."""
        store = cls(other._max_staleness)
        store._content = other._content.copy()
        return store

    async def open(self) -> None:
        if self._opened:
            raise RuntimeError("the store is open")
        self._opened = True

    async def close(self) -> None:
        self._opened = False

    async def load(self) -> Snapshot:
        self._check_open()
        content = self._content
        loaded = Snapshot(
            run=content.run,
            groups=tuple(
                self._read(content.groups[seq])
                for seq in sorted(content.groups)
                if not content.groups[seq].state.terminal
            ),
            leases=tuple(
                sorted(
                    (lease for lease in content.leases.values() if lease.state is LeaseState.LIVE),
                    key=lambda lease: (lease.created_at, lease.lease_id),
                )
            ),
            checkpoints=tuple(sorted(content.checkpoints.values(), key=lambda checkpoint: checkpoint.number)),
        )
        self._failure = None
        await asyncio.sleep(0)
        return loaded

    async def commit(self, batch: Batch) -> None:
        self._check_open()
        if self._failure is not None:
            raise StoreUnavailable(f"{self._failure}; nothing is committed until the store was loaded again")
        if self.fail_commits is not None:
            self._failure = f"cannot commit: {self.fail_commits}"
            raise StoreUnavailable(self._failure) from self.fail_commits
        refused = refusal(batch, before=self._content, max_staleness=self._max_staleness)
        if refused is not None:
            self._failure = f"the store refused a batch: {refused}"
            raise StoreUnavailable(self._failure)
        self._apply(batch)
        self.commits += 1
        await asyncio.sleep(0)

    async def find_prompts(self, keys: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], StoredPrompt]:
        self._check_open()
        found = {key: self._content.known[key] for key in keys if key in self._content.known}
        await asyncio.sleep(0)
        return found

    async def groups(self, seqs: Collection[int]) -> Mapping[int, Group]:
        self._check_open()
        found = {seq: self._read(self._content.groups[seq]) for seq in seqs if seq in self._content.groups}
        await asyncio.sleep(0)
        return found

    async def payloads(self, seqs: Sequence[int]) -> Sequence[GroupPayload]:
        self._check_open()
        found = [self._payload(self._content.groups[seq]) for seq in seqs if seq in self._content.groups]
        await asyncio.sleep(0)
        return found

    async def prompts(self, seqs: Sequence[int]) -> Mapping[int, Prompt]:
        self._check_open()
        found = {seq: self._content.prompts[seq] for seq in seqs if seq in self._content.prompts}
        await asyncio.sleep(0)
        return found

    async def list_groups(self, states: Collection[GroupState], *, after: int, limit: int) -> Sequence[Group]:
        self._check_open()
        wanted = ordered(states)
        seqs = sorted(seq for seq, group in self._content.groups.items() if seq > after and group.state in wanted)
        found = [self._read(self._content.groups[seq]) for seq in seqs[:limit]]
        await asyncio.sleep(0)
        return found

    async def lease(self, lease_id: str) -> Lease | None:
        self._check_open()
        found = self._content.leases.get(lease_id)
        await asyncio.sleep(0)
        return found

    async def lease_by_request(self, request_id: str) -> Lease | None:
        self._check_open()
        lease_id = self._content.requests.get(request_id)
        found = None if lease_id is None else self._content.leases[lease_id]
        await asyncio.sleep(0)
        return found

    async def ended_since(self, ends: int) -> Sequence[int]:
        self._check_open()
        later = [group for group in self._content.groups.values() if (group.end_number or 0) > ends]
        await asyncio.sleep(0)
        return [group.seq for group in sorted(later, key=lambda group: group.end_number or 0)]

    def _check_open(self) -> None:
        if not self._opened:
            raise StoreUnavailable("the store is not open")

    def _read(self, group: Group) -> Group:
        rollouts = self._content.rollouts.get(group.seq, {})
        settled = {
            index: (True, rollout.payload_bytes) if isinstance(rollout, FinishedRollout) else (False, 0)
            for (attempt, index), rollout in rollouts.items()
            if attempt == group.attempt
        }
        return as_read(group, settled)

    def _payload(self, group: Group) -> GroupPayload:
        rollouts = sorted(self._content.rollouts.get(group.seq, {}).items())
        return GroupPayload(
            group=self._read(group),
            prompt=self._content.prompts.get(group.seq),
            rollouts={index: rollout for (attempt, index), rollout in rollouts if attempt == group.attempt},
            score=self._content.scores.get(group.seq, {}).get(group.attempt),
        )

    def _apply(self, batch: Batch) -> None:
        content = self._content
        if batch.run is not None:
            content.run = run_as_kept(batch.run)
        for seq, new in batch.new_groups.items():
            content.groups[seq] = new.group
            content.prompts[seq] = new.prompt
            content.known[new.group.prompt_id, new.group.epoch] = StoredPrompt(seq=seq, digest=new.digest)
        content.groups.update(batch.groups)
        for (seq, attempt, index), rollout in batch.rollouts.items():
            content.rollouts.setdefault(seq, {})[attempt, index] = rollout
        for (seq, attempt), score in batch.scores.items():
            content.scores.setdefault(seq, {})[attempt] = score
        for lease in batch.leases.values():
            known = content.leases.get(lease.lease_id)
            content.leases[lease.lease_id] = (
                lease if known is None else replace(known, expires_at=lease.expires_at, state=lease.state)
            )
            if known is None and lease.request_id is not None:
                content.requests[lease.request_id] = lease.lease_id
        self._forget(batch)

    def _forget(self, batch: Batch) -> None:
        content = self._content
        for seq in batch.forget_attempts | batch.forget_payloads:
            group = content.groups.get(seq)
            if group is None:
                continue
            kept = {
                key: rollout
                for key, rollout in content.rollouts.pop(seq, {}).items()
                if key[0] >= group.attempt
                and not (seq in batch.forget_payloads and isinstance(rollout, FinishedRollout))
            }
            if kept:
                content.rollouts[seq] = kept
            scores = content.scores.pop(seq, {})
            if seq not in batch.forget_payloads and group.attempt in scores:
                content.scores[seq] = {group.attempt: scores[group.attempt]}
        for name in batch.forget_checkpoints:
            content.checkpoints.pop(name, None)
        content.checkpoints.update(batch.checkpoints)
        if batch.forget_checkpoints:
            self._forget_kept_prompts()
        if not content.checkpoints:  # a group that ends now ends after every checkpoint, one of this batch included
            for seq in batch.forget_payloads:
                content.prompts.pop(seq, None)

    def _forget_kept_prompts(self) -> None:
        """Prompts of groups that had ended by the oldest checkpoint there is are needed by none."""
        content = self._content
        oldest = min((checkpoint.ends for checkpoint in content.checkpoints.values()), default=None)
        held = {seq for lease in content.leases.values() if lease.state is LeaseState.LIVE for seq, _ in lease.groups}
        for seq, group in content.groups.items():
            if group.end_number is not None and (oldest is None or group.end_number <= oldest) and seq not in held:
                content.prompts.pop(seq, None)
