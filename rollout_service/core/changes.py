"""What one or more events changed: values to commit and effects to carry out after that commit, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout_service.core.group import Checkpoint, Group, Lease
from rollout_service.core.lifecycle import Effect, EventKind
from rollout_service.core.model import GroupState


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """A group changed its state; observers count and log it."""

    before: Group
    after: Group
    kind: EventKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Halt:
    """Why nothing is dispatched until somebody resumes."""

    reason: str
    group_id: str
    engine: str | None
    error: str
    since: float
    """Unix seconds."""


@dataclass(kw_only=True, slots=True)
class Changes:
    """Collected since the last `Scheduler.take_changes`."""

    groups: dict[int, Group] = field(default_factory=dict)
    """Latest standing of every group whose stored fields changed."""
    leases: dict[str, Lease] = field(default_factory=dict)
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    forgotten: set[str] = field(default_factory=set)
    """Names of checkpoints that were removed."""
    run: bool = False
    """The run's own row changed: version, pause, counters."""
    new_attempts: set[int] = field(default_factory=set)
    """Groups whose earlier attempts' payloads are of no use any more."""
    ended: set[int] = field(default_factory=set)
    """Groups that ended."""
    effects: list[Effect | Moved | Halt] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bumped:
    """What posting a version did."""

    version: int
    previous: int
    stale_groups: int
    aborted_rollouts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Both sides of the identity of design section 3."""

    submitted: int
    groups: Mapping[GroupState, int]

    @property
    def outstanding(self) -> int:
        return sum(n for state, n in self.groups.items() if not state.terminal)
