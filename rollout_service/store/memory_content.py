"""What a store in memory has committed, and how a batch changes it.

What always holds: every value is frozen and no inner dict is ever changed, so that a copy of the outer ones is a copy
of everything; `apply` checks nothing (`store.rules` did).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from rollout_service.core.group import Checkpoint, Group, Lease, LeaseState
from rollout_service.core.model import FailedRollout, FinishedRollout, Prompt
from rollout_service.core.records import Batch, GroupPayload, GroupScore, RunState, Snapshot, StoredPrompt
from rollout_service.store.standing import as_read, run_as_kept

Rollouts = Mapping[tuple[int, int], FinishedRollout | FailedRollout]
"""By (attempt, index)."""


@dataclass(kw_only=True, slots=True)
class Content:
    """What is committed."""

    run: RunState = field(default_factory=RunState)
    groups: dict[int, Group] = field(default_factory=dict)
    outstanding: dict[int, Group] = field(default_factory=dict)
    """Of `groups`, those that have not ended."""
    known: dict[tuple[str, int], StoredPrompt] = field(default_factory=dict)
    prompts: dict[int, Prompt] = field(default_factory=dict)
    rollouts: dict[int, Rollouts] = field(default_factory=dict)
    """By seq."""
    scores: dict[int, Mapping[int, GroupScore]] = field(default_factory=dict)
    """By seq, then attempt."""
    leases: dict[str, Lease] = field(default_factory=dict)
    live: dict[str, Lease] = field(default_factory=dict)
    """Of `leases`, those that are not over."""
    requests: dict[str, str] = field(default_factory=dict)
    """Request id -> lease id, for ever."""
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)

    def copy(self) -> Self:
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        copied: dict[str, Any] = {name: dict(value) for name, value in values.items() if isinstance(value, dict)}
        return replace(self, **copied)

    def snapshot(self) -> Snapshot:
        """As `Store.load` gives it."""
        return Snapshot(
            run=self.run,
            groups=tuple(self.read(self.outstanding[seq]) for seq in sorted(self.outstanding)),
            leases=self.live_leases(),
            checkpoints=tuple(sorted(self.checkpoints.values(), key=lambda checkpoint: checkpoint.number)),
        )

    def live_leases(self) -> tuple[Lease, ...]:
        """By creation."""
        return tuple(sorted(self.live.values(), key=lambda lease: (lease.created_at, lease.lease_id)))

    def lease_by_request(self, request_id: str) -> Lease | None:
        lease_id = self.requests.get(request_id)
        return None if lease_id is None else self.leases[lease_id]

    def ended_since(self, ends: int) -> list[int]:
        """Seqs whose end number is above `ends`, in the order they ended."""
        later = [(group.end_number, group.seq) for group in self.groups.values() if group.end_number is not None]
        return [seq for number, seq in sorted(later) if number > ends]

    def read(self, group: Group) -> Group:
        """`group` with its rows as a store gives them."""
        settled = {
            index: (True, rollout.payload_bytes) if isinstance(rollout, FinishedRollout) else (False, 0)
            for (attempt, index), rollout in self.rollouts.get(group.seq, {}).items()
            if attempt == group.attempt
        }
        return as_read(group, settled)

    def payload(self, group: Group) -> GroupPayload:
        rollouts = sorted(self.rollouts.get(group.seq, {}).items())
        return GroupPayload(
            group=self.read(group),
            prompt=self.prompts.get(group.seq),
            rollouts={index: rollout for (attempt, index), rollout in rollouts if attempt == group.attempt},
            score=self.scores.get(group.seq, {}).get(group.attempt),
        )

    def apply(self, batch: Batch) -> None:
        if batch.run is not None:
            self.run = run_as_kept(batch.run)
        for seq, new in batch.new_groups.items():
            self._stand(new.group)
            self.prompts[seq] = new.prompt
            self.known[new.group.prompt_id, new.group.epoch] = StoredPrompt(seq=seq, digest=new.digest)
        for group in batch.groups.values():
            self._stand(group)
        for (seq, attempt, index), rollout in batch.rollouts.items():
            self.rollouts[seq] = {**self.rollouts.get(seq, {}), (attempt, index): rollout}
        for (seq, attempt), score in batch.scores.items():
            self.scores[seq] = {**self.scores.get(seq, {}), attempt: score}
        for lease in batch.leases.values():
            self._lease(lease)
        self._forget(batch)

    def _stand(self, group: Group) -> None:
        self.groups[group.seq] = group
        if group.state.terminal:
            self.outstanding.pop(group.seq, None)
        else:
            self.outstanding[group.seq] = group

    def _lease(self, lease: Lease) -> None:
        known = self.leases.get(lease.lease_id)
        kept = lease if known is None else replace(known, expires_at=lease.expires_at, state=lease.state)
        self.leases[lease.lease_id] = kept
        if kept.state is LeaseState.LIVE:
            self.live[lease.lease_id] = kept
        else:
            self.live.pop(lease.lease_id, None)
        if known is None and lease.request_id is not None:
            self.requests[lease.request_id] = lease.lease_id

    def _forget(self, batch: Batch) -> None:
        for seq in batch.forget_attempts | batch.forget_payloads:
            group = self.groups.get(seq)
            if group is None:
                continue
            kept = {
                key: rollout
                for key, rollout in self.rollouts.pop(seq, {}).items()
                if key[0] >= group.attempt
                and not (seq in batch.forget_payloads and isinstance(rollout, FinishedRollout))
            }
            if kept:
                self.rollouts[seq] = kept
            scores = self.scores.pop(seq, {})
            if seq not in batch.forget_payloads and group.attempt in scores:
                self.scores[seq] = {group.attempt: scores[group.attempt]}
        for name in batch.forget_checkpoints:
            self.checkpoints.pop(name, None)
        self.checkpoints.update(batch.checkpoints)
        if batch.forget_checkpoints:
            self._forget_kept_prompts()
        if not self.checkpoints:  # a group that ends now ends after every checkpoint, one of this batch included
            for seq in batch.forget_payloads:
                self.prompts.pop(seq, None)

    def _forget_kept_prompts(self) -> None:
        """Prompts of groups that had ended by the oldest checkpoint there is are needed by none."""
        oldest = min((checkpoint.ends for checkpoint in self.checkpoints.values()), default=None)
        held = {seq for lease in self.live.values() for seq, _ in lease.groups}
        for seq, group in self.groups.items():
            if group.end_number is not None and (oldest is None or group.end_number <= oldest) and seq not in held:
                self.prompts.pop(seq, None)
