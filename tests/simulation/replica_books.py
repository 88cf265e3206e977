"""What replicas store and what they tell their observers, entered side by side as it happens.

What always holds: an end of a group's attempt is told once at most, by one replica, and only if it was stored; a
replica that saw its transaction return tells what it ended. Whatever a live lease still hands out can be read. A row of
failures in the store is as long as the groups that failed in a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from rollout_service.core.changes import Moved
from rollout_service.core.group import Group
from rollout_service.core.model import FinishedRollout, GroupState
from rollout_service.core.shared import SharedRun
from rollout_service.core.streaks import UNPRODUCTIVE, Streak
from rollout_service.store.shared_memory import SharedMemory
from rollout_service.store.shared_memory_content import SharedContent
from tests.fakes import Recorder

S = GroupState
WORKED_ON = (S.GENERATING, S.SCORING)
AGAIN = "again"


class End(NamedTuple):
    """How an attempt of a group ended."""

    seq: int
    attempt: int
    how: str
    """The terminal state, or AGAIN where another attempt follows."""


class Books:
    """The entries, and what is wrong with them."""

    def __init__(self) -> None:
        self.met: Counter[str] = Counter()
        self.wrong: dict[str, None] = {}
        self._stored: set[End] = set()
        self._told: set[End] = set()
        self._owed: dict[End, str] = {}
        """By whom: its transaction returned to it."""
        self._just: list[End] = []

    def _find(self, wrong: str) -> None:
        self.wrong[wrong] = None

    # what is stored

    def committed(self, before: SharedContent, after: SharedContent) -> None:
        """`before` became `after`, in one transaction."""
        changed = [
            (before.groups[seq], group)
            for seq, group in after.groups.items()
            if before.groups.get(seq, group) is not group
        ]
        for was, now in changed:
            for end in _ends(was, now):
                self._stored.add(end)
                self._just.append(end)
        self._check_streak(before.row, after.row, changed)
        self._check_leases(after)
        self._count(before.row, after.row)

    def take(self) -> list[End]:
        """The ends in what was committed since this was asked last."""
        just, self._just = self._just, []
        return just

    def _check_streak(self, before: SharedRun, after: SharedRun, changed: list[tuple[Group, Group]]) -> None:
        failed = sum(now.state is S.FAILED is not was.state for was, now in changed)
        dropped = sum(now.state is S.DROPPED is not was.state and now.reason in UNPRODUCTIVE for was, now in changed)
        good = any(was.state in WORKED_ON and now.state not in WORKED_ON for was, now in changed) and any(
            # what was outdated, reset or cancelled may have been scored a moment before, in the same transaction
            was.state in WORKED_ON and (now.state in (S.READY, S.PENDING, S.STALE) or now.attempt > was.attempt)
            for was, now in changed
        )
        most = Streak(failed=before.streak.failed + failed, unproductive=before.streak.unproductive + failed + dropped)
        if after.streak == most or (not changed and not after.streak):
            return
        if good and after.streak.failed <= failed and after.streak.unproductive <= failed + dropped:
            return
        self._find(f"{failed} failed, {dropped} dropped: {before.streak} became {after.streak}")

    def _check_leases(self, content: SharedContent) -> None:
        for lease in content.live.values():
            for seq, attempt in lease.groups:
                group = content.groups[seq]
                if group.attempt != attempt or lease.lease_id not in (group.lease_id, group.acked_by):
                    continue
                rollouts = content.rollouts.get(seq, {})
                kept = {index for (of, index), one in rollouts.items() if of == attempt and _finished(one)}
                if kept != group.finished or attempt not in content.scores.get(seq, {}) or seq not in content.prompts:
                    self._find(f"lease {lease.lease_id} lives and {group.group_id} ({group.state}) is forgotten")

    def _count(self, before: SharedRun, after: SharedRun) -> None:
        self.met["halted"] += before.halt is None is not after.halt
        self.met["paused"] += after.run.paused > before.run.paused
        self.met["pace_relaxed"] += after.pace_relaxed is not None and after.pace_relaxed != before.pace_relaxed
        self.met["claims_taken"] += after.taken > before.taken
        self.met["streak_ended"] += bool(before.streak) and not after.streak

    # what is told

    def owes(self, name: str, ends: list[End]) -> None:
        """A transaction with `ends` returned to the replica `name`."""
        self._owed.update(dict.fromkeys(ends, name))

    def told(self, moved: Moved) -> None:
        for end in _ends(moved.before, moved.after):
            if end not in self._stored:
                self._find(f"told and not stored: {end}")
            if end in self._told:
                self._find(f"told twice: {end}")
            self._told.add(end)

    def untold(self) -> Mapping[End, str]:
        """What a replica knows to be stored and did not tell; by whom."""
        return {end: name for end, name in self._owed.items() if end not in self._told}


class BookedMemory(SharedMemory):
    """A shared store in memory whose commits are entered."""

    def __init__(self, max_staleness: int, clock: object, books: Books) -> None:
        self.books = books
        super().__init__(max_staleness, clock)  # type: ignore[arg-type]  # a clock

    @property  # type: ignore[override]  # an attribute there, that every commit assigns
    def content(self) -> SharedContent:
        return self._now

    @content.setter
    def content(self, content: SharedContent) -> None:
        if hasattr(self, "_now") and content is not self._now:
            self.books.committed(self._now, content)
        self._now = content

    def time_over(self, replica_id: str) -> None:
        """The replica's heartbeat is long past."""
        content = self.content.copy()
        seen = content.replicas.get(replica_id)
        if seen is not None:
            content.replicas[replica_id] = replace(seen, expires_at=0.0)
            self.content = content


class BookedRecorder(Recorder):
    """Keeps nothing, but for the books."""

    def __init__(self, books: Books) -> None:
        super().__init__()
        self._books = books

    def group_moved(self, moved: Moved) -> None:
        self._books.told(moved)


def _ends(was: Group, now: Group) -> list[End]:
    ends = []
    if now.attempt != was.attempt:
        ends.append(End(was.seq, was.attempt, AGAIN))
    if now.state.terminal and (was.state is not now.state or now.attempt != was.attempt):
        ends.append(End(now.seq, now.attempt, now.state.value))
    return ends


def _finished(rollout: object) -> bool:
    return isinstance(rollout, FinishedRollout)
