"""What replicas that share memory have committed: a store's content, who works on what, and the counters.

What always holds: the counters are those of the groups, for the same call changes both; a group has an owner only in
generating and scoring; a claim's number never falls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rollout_service.core.group import Group
from rollout_service.core.model import OUTSTANDING, TERMINAL, GroupState, prompt_size
from rollout_service.core.records import Batch
from rollout_service.core.shared import Claimed, EngineWish, SeenReplica, SharedRun, Whole
from rollout_service.store.memory_content import Content
from rollout_service.store.standing import run_as_kept

WORKED_ON = frozenset({GroupState.GENERATING, GroupState.SCORING})
HELD = frozenset({GroupState.SCORING, GroupState.READY})
NOBODY: tuple[None, int] = (None, 0)


@dataclass(kw_only=True, slots=True)
class SharedContent(Content):
    """`copy` copies all of it."""

    row: SharedRun = field(default_factory=SharedRun)
    """All of the run's row but its `run`, which is the content's."""
    claims: dict[int, tuple[str | None, int]] = field(default_factory=dict)
    """(owner, claim) by seq, of groups that were claimed ever."""
    sizes: dict[int, int] = field(default_factory=dict)
    """`prompt_size` by seq."""
    counts: dict[GroupState, int] = field(default_factory=dict)
    """Of outstanding groups; those that ended are counted in the run."""
    held_bytes: int = 0
    prompt_bytes: int = 0
    replicas: dict[str, SeenReplica] = field(default_factory=dict)
    wishes: dict[str, EngineWish] = field(default_factory=dict)
    """By engine."""
    wished_at: dict[str, float] = field(default_factory=dict)
    wished: int = 0
    """The newest number of a wish."""
    numbers: dict[str, int] = field(default_factory=dict)
    """The newest batch number by replica, for ever."""

    def shared_run(self) -> SharedRun:
        return replace(self.row, run=self.run)

    def whole(self) -> Whole:
        counts = {state: self.counts.get(state, 0) or self.run.ended.get(state, 0) for state in GroupState}
        return Whole(counts=counts, held_bytes=self.held_bytes, prompt_bytes=self.prompt_bytes)

    def removed_by(self, number: int) -> list[str]:
        """The engine that wish `number` does not want, or none."""
        return [wish.engine_id for wish in self.wishes.values() if wish.number == number and not wish.wanted]

    def claimed(self, seq: int) -> Claimed:
        owner, claim = self.claims.get(seq, NOBODY)
        return Claimed(group=self.read(self.groups[seq]), owner=owner, claim=claim)

    def owner(self, seq: int) -> str | None:
        return self.claims.get(seq, NOBODY)[0]

    def forget_replica(self, replica_id: str) -> bool:
        """Give its claims back; whether it had any."""
        self.replicas.pop(replica_id, None)
        owned = [(seq, claim) for seq, (owner, claim) in self.claims.items() if owner == replica_id]
        self.claims.update({seq: (None, claim) for seq, claim in owned})
        return bool(owned)

    def numbered(self, batch: Batch) -> Batch:
        """`batch` without its run, its ends numbered from the newest one on."""
        groups, ends = {}, self.run.ends
        standings = batch.groups | {
            seq: new.group
            for seq, new in batch.new_groups.items()
            if seq not in batch.groups and new.group.state.terminal
        }
        for seq, group in standings.items():
            was = self.groups.get(seq)
            number = None
            if group.state in TERMINAL:
                if was is not None and was.state in TERMINAL and was.attempt == group.attempt:
                    number = was.end_number
                else:
                    number = ends = ends + 1
            groups[seq] = replace(group, end_number=number)
        return replace(batch, run=None, groups=groups)

    def change(self, batch: Batch, *, owner: str | None) -> dict[int, int]:
        """Apply a `numbered` batch that breaks no rule; the claims of `owner` in it."""
        before = {seq: self.groups.get(seq) for seq in (*batch.new_groups, *batch.groups)}
        self.apply(batch)
        self.sizes.update({seq: prompt_size(new.prompt) for seq, new in batch.new_groups.items()})
        self._count(before)
        return {seq: claim for seq in before if (claim := self._claim(seq, owner)) is not None}

    def change_whole(self, batch: Batch) -> None:
        """Apply a batch of `Store.commit`: its run is the truth, where it has one, and its ends keep their numbers."""
        self.change(replace(batch, run=None), owner=None)
        if batch.run is not None:
            self.run = run_as_kept(batch.run)

    def _claim(self, seq: int, owner: str | None) -> int | None:
        held_by, claim = self.claims.get(seq, NOBODY)
        if self.groups[seq].state not in WORKED_ON or owner is None:
            if held_by is not None:
                self.claims[seq] = (None, claim)
            return None
        if held_by != owner:
            claim += 1
            self.claims[seq] = (owner, claim)
        return claim

    def _count(self, before: Mapping[int, Group | None]) -> None:
        counts = Counter(self.counts) + Counter(self.run.ended)
        ends = self.run.ends
        for seq, was in before.items():
            now = self.groups[seq]
            for group, sign in ((was, -1), (now, 1)):
                if group is None:
                    continue
                counts[group.state] += sign
                self.held_bytes += sign * group.payload_bytes if group.state in HELD else 0
                self.prompt_bytes += sign * self.sizes.get(seq, 0) if group.state in OUTSTANDING else 0
            ends = max(ends, now.end_number or 0)
        self.counts = {state: counts[state] for state in OUTSTANDING}
        self.run = run_as_kept(replace(self.run, ended={state: counts[state] for state in TERMINAL}, ends=ends))
