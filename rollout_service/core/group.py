"""One group and one lease as the core sees them: who they are and where they stand, never their tokens.

A row of the group's current attempt is in exactly one of `waiting`, `running`, `finished`, `failed`; a row in none of
them was used up by an earlier attempt (design 3.1.3). Only lifecycle.apply makes a changed copy of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollout_service.core.model import DropReason, GroupState

GROUP_PREFIX = "g-"


def group_id(seq: int) -> str:
    """The public id of the group submitted as number `seq` (from 1)."""
    return f"{GROUP_PREFIX}{seq}"


def group_seq(public_id: str) -> int | None:
    """The submission number behind a public group id; None where it cannot be one."""
    digits = public_id.removeprefix(GROUP_PREFIX)
    if digits == public_id or not digits.isascii() or not digits.isdigit() or digits[0] == "0" or len(digits) > 15:
        return None
    return int(digits)


class OnStale(StrEnum):
    """What becomes of a group that is too old (design 3.1.4)."""

    DROP = "drop"
    """It ends; rows never dispatched go on as a smaller group."""
    REQUEUE = "requeue"
    """Its whole prompt is generated again, up to `max_group_attempts`."""


class LeaseState(StrEnum):
    """Where a lease is in its life."""

    LIVE = "live"
    """At least one group is held by it."""
    ENDED = "ended"
    """Every group was acked, given back, cancelled or the lease expired."""
    VOID = "void"
    """A reset or rewind took its groups back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The standing of one group."""

    seq: int
    """Submission number from 1; the order of leases within a version."""
    prompt_id: str
    epoch: int
    num_generations: int
    """n: rows of the whole prompt."""
    state: GroupState = GroupState.PENDING
    attempt: int = 1
    """Fencing token: only what carries the current one can settle anything. Never falls."""
    tries: int = 1
    """Whole attempts used of `max_group_attempts` (a smaller rest and a reset use none)."""
    version: int | None = None
    """Policy version at the first dispatch of this attempt; None while pending."""
    waiting: tuple[int, ...]
    """Rows not dispatched yet, ascending."""
    running: frozenset[int] = frozenset()
    """Rows in flight; each holds one slot."""
    finished: frozenset[int] = frozenset()
    """Rows that survived."""
    failed: frozenset[int] = frozenset()
    """Rows that failed."""
    payload_bytes: int = 0
    """Bytes of the finished rollouts of this attempt."""
    reason: DropReason | None = None
    """Set if and only if dropped."""
    error: str | None = None
    """The last error met, for people."""
    engine: str | None = None
    """The engine of that error."""
    lease_id: str | None = None
    """The live lease that holds it; set if and only if leased."""
    acked_by: str | None = None
    """The lease it was acked under; set if and only if acked."""
    end_number: int | None = None
    """Ends are numbered from 1 over the whole run; set if and only if the group has ended. A rewind to a checkpoint
    opens the groups with a higher number than the checkpoint's again."""
    submitted_at: float
    """Unix seconds."""
    changed_at: float
    """Unix seconds of the last change of state."""

    @property
    def group_id(self) -> str:
        return group_id(self.seq)

    @property
    def rows(self) -> tuple[int, ...]:
        """All rows of the current attempt, ascending."""
        return tuple(sorted((*self.waiting, *self.running, *self.finished, *self.failed)))

    def staleness(self, current_version: int) -> int | None:
        return None if self.version is None else current_version - self.version


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Scored groups handed to one consumer for a limited time."""

    lease_id: str
    request_id: str | None = None
    consumer: str | None = None
    max_groups: int
    min_groups: int
    lease_s: int
    policy_version: int
    """The version current when the lease was made."""
    created_at: float
    expires_at: float
    """Unix seconds; at that moment it is over."""
    groups: tuple[tuple[int, int], ...]
    """(seq, attempt) of every group it was made with, in delivery order."""
    state: LeaseState = LeaseState.LIVE

    def attempt_of(self, seq: int) -> int | None:
        return next((attempt for member, attempt in self.groups if member == seq), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A point the trainer can go back to (design 4.9)."""

    name: str
    number: int
    """Order of creation from 1."""
    policy_version: int
    ends: int
    """How many ends there were in the run by then: later ones are undone by a rewind."""
    created_at: float
    """Unix seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPolicy:
    """The rules of one group's life, from `[groups]`."""

    max_staleness: int = 4
    min_group_size: int = 2
    on_stale: OnStale = OnStale.DROP
    max_group_attempts: int = 3
