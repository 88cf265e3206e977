"""What replicas that share one run know of it, as values.

A replica holds only the groups it has claimed; everything else is the store's. So a transaction decides with a part of
the run in a scheduler of its own, and `Whole` is what that must know of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout_service.core.changes import Halt
from rollout_service.core.group import Group
from rollout_service.core.model import GroupState
from rollout_service.core.records import RunState
from rollout_service.core.streaks import Streak


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRun:
    """The run's row, as every replica sees it."""

    run: RunState = field(default_factory=RunState)
    """`ended` and `ends` are kept by the store's own counters; writing the row leaves them alone."""
    revision: int = 0
    """Rises with every change that decisions of replicas rest on: version, reset, pause, halt, claims taken back. What
    was decided at another revision than a transaction sees is not committed by it."""
    taken: int = 0
    """How often claims were taken from a replica by somebody else (reset, rewind, cancel, expiry of its heartbeat)."""
    returns: int = 0
    """How often the policy version was lowered: the same number then stands for other weights."""
    halt: Halt | None = None
    streak: Streak = field(default_factory=Streak)
    pace_relaxed: int | None = None
    """Policy version at which groups acked already count against the pace no longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """Counters over the whole run, kept by the transitions."""

    counts: Mapping[GroupState, int]
    """Every state."""
    held_bytes: int = 0
    """Payload bytes of groups in scoring and ready."""
    prompt_bytes: int = 0
    """Of outstanding groups, by `prompt_size`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claimed:
    """A group and who works on it."""

    group: Group
    owner: str | None
    """Id of the replica; set only in generating and scoring. None there: whoever had it is gone."""
    claim: int
    """Fencing token beside the attempt: rises with every claim. Only the owner under this number can settle it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """What a replica says of itself."""

    replica_id: str
    """New for every start, and whenever it comes back after it lost its claims."""
    name: str
    """For people; the host's name and the port, unless configured."""
    service: str
    """Version of the service."""
    rules: str
    """What must be equal for all replicas of a run, as JSON in one form."""
    prompts: str = ""
    """Fingerprint of its prompts file; must be equal for all that have one."""
    slots: int = 0
    in_flight: int = 0
    engines: int = 0
    healthy_engines: int = 0
    enforced: int = 0
    """Revision whose consequences this replica has committed and carried out."""
    stale_groups: int = 0
    """Of its groups, those outdated by the last version."""
    aborted_rollouts: int = 0
    """Of its rollouts in flight, those aborted by the last version, reset or rewind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenReplica:
    """A replica as the store has it."""

    replica: Replica
    started_at: float
    """Unix seconds."""
    seen_at: float
    """Unix seconds of its last heartbeat."""
    expires_at: float
    """Its claims are taken over from then on."""
    claims: int = 0
    """Groups it has claimed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineWish:
    """What an operator asked for at one engine, of any replica: every replica follows it."""

    engine_id: str
    """The same at all replicas."""
    url: str
    wanted: bool
    """It belongs to every fleet; False: to none, wherever else it is named."""
    max_inflight: int | str | None = None
    """Of each replica: a number, "auto", or None for what else is configured."""
    drain_s: float = 0.0
    """Of one that is not wanted: how long what runs there may go on."""
    number: int = 0
    """Given by the store: every wish of the run has another, and a later one a greater."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """One consistent look at the whole run."""

    run: SharedRun
    whole: Whole
    oldest: Group | None
    """The outstanding group with the lowest number; rows as `Snapshot` has them."""
    leases: int
    """Live ones."""
    replicas: tuple[SeenReplica, ...]
    """By start."""
    now: float
    """Unix seconds, by the store's clock."""
