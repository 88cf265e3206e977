"""What the store keeps, as values: the run, groups with their payloads, leases, and the batch that changes them.

A `Batch` is all or nothing: after its commit everything in it is on disk, after a failure nothing is. Batches are
committed in the order they were made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollout_service.core.group import Checkpoint, Group, Lease
from rollout_service.core.model import FailedRollout, FinishedRollout, GroupState, Prompt, TeacherTokens


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """The one row that describes the run."""

    policy_version: int = 0
    paused: bool = False
    final: bool = False
    """No more prompts will come."""
    last_seq: int = 0
    """Submission number of the newest group; also the count of groups submitted."""
    read_position: int = 0
    """Rows of the prompts file submitted so far, over all epochs."""
    prompts_fingerprint: str = ""
    """Of the prompts file that `read_position` is about."""
    ended: Mapping[GroupState, int] = field(default_factory=dict)
    """Groups by terminal state, kept by the transitions."""
    ends: int = 0
    """Ends so far, those undone by a rewind included; the newest `Group.end_number`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewGroup:
    """A group that is submitted: its standing, its prompt, and the digest of its content."""

    group: Group
    prompt: Prompt
    digest: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RowScore:
    """What scoring adds to one survivor."""

    reward: float | None
    rewards: Mapping[str, float | None]
    advantage: float
    teacher: Sequence[TeacherTokens] = ()
    """Distillation: one item for each sample of the rollout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupScore:
    """What scoring adds to one attempt of a group; rows by index."""

    rows: Mapping[int, RowScore]
    mean: float | None
    std: float | None
    zero_variance: bool
    errors: Mapping[str, str] = field(default_factory=dict)
    """Reward name -> why it scored nobody."""


@dataclass(kw_only=True, slots=True)
class Batch:
    """Changes to commit together; later values of the same thing replace earlier ones."""

    run: RunState | None = None
    new_groups: dict[int, NewGroup] = field(default_factory=dict)
    """By seq."""
    groups: dict[int, Group] = field(default_factory=dict)
    """Latest standing by seq (may repeat a new group's seq: then it is the one that counts)."""
    rollouts: dict[tuple[int, int, int], FinishedRollout | FailedRollout] = field(default_factory=dict)
    """Settled rollouts by (seq, attempt, index)."""
    scores: dict[tuple[int, int], GroupScore] = field(default_factory=dict)
    """By (seq, attempt)."""
    leases: dict[str, Lease] = field(default_factory=dict)
    """Latest standing by lease id."""
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    """New ones, by name."""
    forget_checkpoints: set[str] = field(default_factory=set)
    """Names that are removed; prompts that only they kept go too."""
    forget_attempts: set[int] = field(default_factory=set)
    """Seqs whose rollouts and scores of attempts before the group's current one are removed."""
    forget_payloads: set[int] = field(default_factory=set)
    """Seqs that ended: finished rollouts, scores and (while there is no checkpoint) the prompt are removed; failed
    rollouts stay for people to read."""

    def __bool__(self) -> bool:
        return bool(
            self.run
            or self.new_groups
            or self.groups
            or self.rollouts
            or self.scores
            or self.leases
            or self.checkpoints
            or self.forget_checkpoints
            or self.forget_attempts
            or self.forget_payloads
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPrompt:
    """A known identity: the group it became and the digest of its content."""

    seq: int
    digest: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPayload:
    """Everything the store has of one group's current attempt; rollouts by index."""

    group: Group
    prompt: Prompt | None
    """None once the payload was removed."""
    rollouts: Mapping[int, FinishedRollout | FailedRollout]
    score: GroupScore | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What a start needs: the run, every outstanding group, every live lease.

    A loaded group's rows are told from its settled rollouts of the current attempt: those are in `finished` and
    `failed`, the others in `waiting`; `running` is empty; `payload_bytes` is that of its finished rollouts.
    """

    run: RunState
    groups: tuple[Group, ...]
    """By seq, ascending."""
    leases: tuple[Lease, ...]
    checkpoints: tuple[Checkpoint, ...] = ()
    """By number, ascending."""
