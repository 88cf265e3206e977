"""The service's answers as values.

Members this client does not know are ignored, and those a service may not send yet have defaults, so that client and
service of neighbouring releases understand each other. Wrong types in known members are refused while decoding.
Within a sample `input_ids`, `completion_mask` and `old_log_probs` have equal lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec


class LeaseStatus(StrEnum):
    """What a lease call found."""

    OK = "ok"
    """There are groups."""
    EMPTY = "empty"
    """Nothing was ready within `wait_s`; ask again."""
    EXHAUSTED = "exhausted"
    """No more prompts will come and nothing is outstanding."""


class Sample(msgspec.Struct, kw_only=True):
    """One training row made of a rollout. T = length of prompt and completion together.

    The three arrays are numpy arrays (int32, uint8, float32) that share one buffer with the rest of their lease, or
    lists where the lease came as JSON.
    """

    rollout_id: str = ""
    index: int
    """Row of the rollout in its group, 0-based."""
    policy_version: int
    prompt: Any = None
    """Messages, text, or None where the engine cannot give the text of ids."""
    completion: Any = None
    input_ids: Sequence[int]
    """(T,) token ids, prompt and completion."""
    completion_mask: Sequence[int]
    """(T,) 1 on tokens to train, 0 on context."""
    old_log_probs: Sequence[float]
    """(T,) the engine's logprob of `input_ids[t]` given what stands before it where the mask is 1, else 0.0."""
    reward: float | None = None
    """Weighted sum over reward functions; None: unscored."""
    rewards: dict[str, float | None] = {}
    advantage: float = 0.0
    """0.0 where unscored."""
    scored: bool = True
    finish_reason: str = "stop"
    truncated: bool = False
    metrics: dict[str, Any] = {}
    weight_versions: list[Any] | None = None
    """Spans of weight versions; None where the engine reports none."""
    turn_versions: list[int] | None = None
    """Policy version current at each turn; None where there was one turn, at `policy_version`."""
    teacher_id: str | None = None
    """Distillation: the teacher that scored the sample."""
    teacher_topk_ids: Sequence[Sequence[int]] | None = None
    """Distillation: (tokens to train, top_k + 1), int32 where binary; -1 fills up."""
    teacher_topk_logprobs: Sequence[Sequence[float | None]] | None = None
    """Distillation: the same shape, float32 where binary; -inf where the id is -1 (None where it came as JSON)."""


class Group(msgspec.Struct, kw_only=True):
    """The scored rollouts of one prompt."""

    group_id: str
    prompt_id: str
    epoch: int = 0
    """Pass over the prompts file; the prompt's identity together with `prompt_id`."""
    attempt: int = 1
    num_generations: int | None = None
    """Rollouts asked for; more than there are samples where some failed."""
    policy_version: int
    """Version current when the group's first rollout was dispatched."""
    staleness: int
    """Version of the lease minus `policy_version`."""
    zero_variance: bool = False
    reward_mean: float | None = None
    reward_std: float | None = None
    columns: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    logprobs_mode: str | None = None
    samples: list[Sample]


class Lease(msgspec.Struct, kw_only=True):
    """Scored groups handed out for a limited time; `groups` is empty unless `status` is `ok`."""

    status: LeaseStatus
    lease_id: str | None = None
    """None where there is nothing to ack."""
    expires_at: str | float | None = None
    policy_version: int
    """Current at the service when the lease was made."""
    outstanding: int = 0
    """Groups submitted and not yet ended."""
    groups: list[Group] = []

    @property
    def samples(self) -> list[Sample]:
        """Every sample, group after group."""
        return [sample for group in self.groups for sample in group.samples]


class Renewal(msgspec.Struct, kw_only=True):
    """A lease was extended."""

    lease_id: str = ""
    expires_at: str | float | None = None


class SubmittedGroup(msgspec.Struct, kw_only=True):
    """Where a submitted prompt went."""

    group_id: str
    prompt_id: str


class Version(msgspec.Struct, kw_only=True):
    """The policy version and the bound on staleness."""

    version: int
    max_staleness: int


class BumpResult(msgspec.Struct, kw_only=True):
    """What a posted version did. A post that was repeated because its answer was lost reports no effect."""

    version: int
    previous: int
    stale_groups: int = 0
    aborted_rollouts: int = 0
    behind_engines: list[str] = []
    """After loading weights: ids of engines that were out before the call and lack them."""


class Slots(msgspec.Struct, kw_only=True):
    """Rollouts the service may have in flight."""

    total: int
    used: int
    free: int


class Halt(msgspec.Struct, kw_only=True):
    """Why the service halted."""

    reason: str = ""
    group_id: str | None = None
    engine: str | None = None
    error: str | None = None
    since: str | float | None = None


class Status(msgspec.Struct, kw_only=True):
    """The service at one moment. `submitted` = sum of `groups` over every state."""

    policy_version: int
    submitted: int
    groups: dict[str, int]
    """Every state -> number of groups."""
    outstanding: int
    slots: Slots
    paused: bool = False
    blocked: str | None = None
    """Why no new group is opened now."""
    final: bool = False
    """No more prompts will come."""
    halted: Halt | None = None
    oldest_outstanding: dict[str, Any] | None = None
    engines: list[dict[str, Any]] = []


class GroupInfo(msgspec.Struct, kw_only=True):
    """A group as the service sees it, at any point of its life."""

    group_id: str
    state: str
    policy_version: int | None = None
    """None while pending."""
    facts: dict[str, Any] = {}
    """The whole answer: attempts, rollouts, last error, ages."""


class GroupPage(msgspec.Struct, kw_only=True):
    """Some groups, and where to go on."""

    groups: list[GroupInfo]
    next_after: str | None = None
    """Pass as `after` for the next page; None: this was the last."""
