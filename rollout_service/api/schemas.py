"""Shapes of requests and answers. Requests are exact: no coercion, no unknown fields, every number bounded.

Answers with tokens in them are written by wire.py; their models here are what OpenAPI shows.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from rollout_service.core.model import GroupState
from rollout_service.prompts.rows import MAX_EPOCH, MAX_ID_CHARACTERS
from rollout_service.settings import SamplingOverrides
from rollout_service.settings.problems import NO_CONTROLS
from rollout_service.settings.tables import MAX_GROUP_SIZE, MAX_VERSION, Inflight, inflight

MAX_PROMPTS = 10_000
"""Prompts of one call: more would hold the store's writer for too long in one transaction."""
MAX_LEASE_GROUPS = 1024
MAX_PAGE = 1000


def in_a_path(name: str) -> str:
    """A name that stands in a path as one of its parts."""
    if "/" in name or name in (".", ".."):
        raise ValueError(f"expected a name without `/` that is not `.` or `..`, not {name!r}: it stands in a path")
    return name


PolicyVersion = Annotated[int, Field(ge=0, le=MAX_VERSION)]
LeaseSeconds = Annotated[int, Field(ge=1, le=86_400)]
Name = Annotated[str, Field(min_length=1, max_length=256, pattern=NO_CONTROLS)]
MarkName = Annotated[str, Field(min_length=1, max_length=256, pattern=NO_CONTROLS), AfterValidator(in_a_path)]
Path = Annotated[str, Field(min_length=1, max_length=4096, pattern=NO_CONTROLS)]
GroupId = Annotated[str, Field(min_length=1, max_length=32, examples=["g-42"])]


class Request(BaseModel):
    """A request body."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class WeightsBody(Request):
    """Weights of the model, for every engine."""

    path: Path = Field(description="Folder, as the engines see it; within weights.allowed_paths.")


class LoraBody(Request):
    """A LoRA adapter, for every engine."""

    name: Name = Field(examples=["trl-policy-v8"])
    path: Path = Field(description="Folder, as the engines see it; within weights.allowed_paths.")


class VersionBody(Request):
    """`POST /policy_version`."""

    version: PolicyVersion = Field(description="Number of weight updates every engine has by now.")
    reset: bool = Field(default=False, description="Allow a lower version: a trainer went back.")
    weights: WeightsBody | None = Field(default=None, description="Have every engine load these first.")
    lora: LoraBody | None = Field(default=None, description="Have every engine load this adapter first.")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.weights is not None and self.lora is not None:
            raise ValueError("weights and lora exclude each other: merge the adapter, or serve it")
        return self


class PromptRow(Request):
    """One prompt: exactly one of `messages`, `prompt` and `prompt_token_ids`."""

    prompt_id: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARACTERS)] | None = Field(
        default=None, description="Identity together with `epoch`; missing: a random one."
    )
    epoch: Annotated[int, Field(ge=0, le=MAX_EPOCH)] | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    prompt_token_ids: Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1)] | None = None
    columns: dict[str, Any] | None = Field(default=None, description="Further fields, for the rewards.")
    num_generations: Annotated[int, Field(ge=1, le=MAX_GROUP_SIZE)] | None = None
    sampling: SamplingOverrides | None = None


class PromptsBody(Request):
    """`POST /prompts`. All or nothing."""

    # Rows are checked one by one by prompts.rows, which knows the run's defaults; PromptRow is for readers.
    prompts: Annotated[
        list[Any],
        Field(max_length=MAX_PROMPTS),
        WithJsonSchema({"type": "array", "maxItems": MAX_PROMPTS, "items": {"$ref": "#/components/schemas/PromptRow"}}),
    ]
    final: bool | None = Field(default=None, description="true: no more prompts will come.")


class LeaseBody(Request):
    """`POST /leases`."""

    max_groups: int = Field(ge=1, le=MAX_LEASE_GROUPS)
    min_groups: int = Field(default=1, ge=1, le=MAX_LEASE_GROUPS, description="Wait until so many are ready.")
    wait_s: int = Field(default=30, ge=0, le=60)
    lease_s: LeaseSeconds = 600
    consumer: Name | None = Field(default=None, description="For people.")
    request_id: Name | None = Field(default=None, description="The same id again gets the same lease again.")


class LeasePart(Request):
    """`POST /leases/{lease_id}/ack` and `/release`."""

    group_ids: Annotated[list[GroupId], Field(min_length=1, max_length=MAX_LEASE_GROUPS)] | None = Field(
        default=None, description="Missing: all of the lease."
    )


class RenewBody(Request):
    """`POST /leases/{lease_id}/renew`."""

    lease_s: LeaseSeconds | None = Field(default=None, description="Missing: the lease's own.")


class EngineBody(Request):
    """`POST /engines`."""

    url: Annotated[str, Field(min_length=1, max_length=2048)] = Field(
        description="Base URL, without /v1, plainly written; within registration.allowed.",
        examples=["http://10.0.0.7:8000"],
    )
    max_inflight: Inflight | None = Field(
        default=None,
        description='Most requests at once; "auto": adapted to its queue and cache, 1024 at most; missing: 256, or '
        "what an engine that is there has.",
    )

    @field_validator("max_inflight", mode="before")
    @classmethod
    def _number_or_auto(cls, value: Any) -> Any:
        return None if value is None else inflight(value)


class CheckpointBody(Request):
    """`POST /checkpoints` and `POST /rewind`."""

    name: MarkName = Field(description="Without `/`: it stands in the path of its DELETE.", examples=["step-400"])


_DECIMAL = re.compile(r"-?[0-9]{1,40}")


def decimal(value: Any) -> Any:
    """Query parameters are text: plain digits are a number, below 0 too; everything else is refused."""
    return int(value) if isinstance(value, str) and _DECIMAL.fullmatch(value) else value


class GroupsQuery(BaseModel):
    """`GET /groups`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state: list[Annotated[str, Field(max_length=200)]] = Field(
        default=[], max_length=16, description="Repeated, or separated by commas; none: every state."
    )
    limit: Annotated[int, BeforeValidator(decimal), Field(strict=True, ge=1, le=MAX_PAGE)] = 100
    after: str | None = Field(default=None, max_length=32, description="Group id: the page begins behind it.")


class RemoveEngineQuery(BaseModel):
    """`DELETE /engines/{engine_id}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    drain_s: Annotated[int, BeforeValidator(decimal), Field(strict=True, ge=0, le=3600)] = Field(
        default=30, description="How long what runs there may go on; then it is aborted, and goes to another engine."
    )


class Answer(BaseModel):
    """What a route answers."""

    model_config = ConfigDict(frozen=True)


class VersionAnswer(Answer):
    version: int
    max_staleness: int


class BumpAnswer(Answer):
    version: int
    previous: int
    stale_groups: int = Field(description="Groups that lost work to this version.")
    aborted_rollouts: int = Field(description="Rollouts in flight that were stopped.")
    behind_engines: list[str] | SkipJsonSchema[None] = Field(
        default=None, description="Only after loading weights: ids of engines that were out before and lack them."
    )


class SubmittedGroup(Answer):
    group_id: str
    prompt_id: str


class PromptsAnswer(Answer):
    groups: list[SubmittedGroup] = Field(description="In the order of the prompts.")


class SampleAnswer(Answer):
    """One training row of T tokens."""

    rollout_id: str
    index: int
    policy_version: int
    prompt: Any = Field(description="Messages, text, or null where the engine cannot tell the text of ids.")
    completion: Any
    input_ids: list[int]
    completion_mask: list[int] = Field(description="1 on tokens to train, 0 on context.")
    old_log_probs: list[float] = Field(description="The engine's logprob where the mask is 1, 0.0 elsewhere.")
    reward: float | None = Field(description="null: unscored.")
    rewards: dict[str, float | None]
    advantage: float
    scored: bool
    finish_reason: Literal["stop", "length", "tool_calls"]
    truncated: bool
    metrics: dict[str, float]
    weight_versions: list[dict[str, Any]] | None = Field(default=None, description="Where the engine reports spans.")
    turn_versions: list[int] | None = Field(
        default=None, description="The policy version current at each turn, where there were several."
    )
    teacher_id: str | None = Field(default=None, description="Distillation: who scored it.")
    teacher_topk_ids: list[list[int]] | None = Field(
        default=None, description="Distillation: a row for each token to train, top_k + 1 wide; -1 fills up."
    )
    teacher_topk_logprobs: list[list[float | None]] | None = Field(
        default=None, description="Distillation: theirs; null where the id is -1."
    )


class GroupAnswer(Answer):
    """A scored group."""

    group_id: str
    prompt_id: str
    epoch: int
    attempt: int
    num_generations: int
    policy_version: int
    staleness: int
    zero_variance: bool
    reward_mean: float | None
    reward_std: float | None
    columns: dict[str, Any]
    sampling: dict[str, Any]
    logprobs_mode: str | None
    samples: list[SampleAnswer]


class LeaseAnswer(Answer):
    lease_id: str | None = Field(description="null where there are no groups.")
    expires_at: str | None = Field(description="RFC 3339, UTC.")
    status: Literal["ok", "empty", "exhausted"]
    policy_version: int = Field(description="The version the lease was made at.")
    outstanding: int
    groups: list[GroupAnswer]


class AckAnswer(Answer):
    lease_id: str
    acked: list[str]


class ReleaseAnswer(Answer):
    lease_id: str
    released: list[str]


class CheckpointAnswer(Answer):
    name: str
    policy_version: int
    ended_groups: int = Field(description="Ends of groups in the run by then, those undone by a rewind included.")
    created_at: str = Field(description="RFC 3339, UTC.")


class CheckpointsAnswer(Answer):
    checkpoints: list[CheckpointAnswer] = Field(description="Oldest first.")


class RewindAnswer(Answer):
    name: str
    version: int
    previous: int
    aborted_rollouts: int = Field(description="Rollouts in flight that were stopped.")
    reopened_groups: int = Field(description="Groups that had ended since and are pending again.")


class RenewAnswer(Answer):
    lease_id: str
    expires_at: str


class GroupRow(Answer):
    """A group in a list."""

    group_id: str
    prompt_id: str
    epoch: int
    state: GroupState
    reason: str | None
    attempt: int
    tries: int
    num_generations: int
    policy_version: int | None
    staleness: int | None
    error: str | None
    engine: str | None
    lease_id: str | None
    acked_by: str | None
    submitted_at: str
    age_s: float
    state_age_s: float


class GroupPage(Answer):
    groups: list[GroupRow]
    next: str | None = Field(description="`after` of the next page; null: this was the last.")


class RolloutRow(Answer):
    """One row of a group, wherever it stands."""

    index: int
    state: Literal["waiting", "running", "finished", "failed"]
    in_flight_s: float | None = None
    finish_reason: str | None = None
    tokens: int | None = None
    text: str | None = None
    error: str | None = None
    reason: str | None = None
    engine: str | None = None
    attempts: int | None = None
    reward: float | None = None
    rewards: dict[str, float | None] | None = None
    advantage: float | None = None


class GroupDetail(GroupRow):
    """A group with everything that is known of it."""

    rows: dict[str, list[int]] = Field(description="Row numbers of this attempt by state.")
    rollouts: list[RolloutRow]
    reward_errors: dict[str, str]
    columns: dict[str, Any] | None
    prompt: Any = Field(description="Messages, text or token ids; null once the group ended and it was removed.")
    sampling: dict[str, Any] | None


class SlotsAnswer(Answer):
    total: int
    used: int
    free: int


class HaltAnswer(Answer):
    reason: str
    group_id: str
    engine: str | None
    error: str
    since: str


class OldestAnswer(Answer):
    group_id: str
    state: GroupState
    age_s: float


class StoreAnswer(Answer):
    ok: bool
    error: str | None


class LeasesAnswer(Answer):
    live: int
    waiting_calls: int


class ThreadsAnswer(Answer):
    total: int = Field(description="Places for threads of programs and tools.")
    busy: int
    waiting: int = Field(description="Rollouts and tool calls that wait for a place.")
    stuck: int = Field(description="Threads that were told to end more than program.grace_s ago, and go on.")


class ReplicaAnswer(Answer):
    id: str
    name: str
    service: str = Field(description="Version of the service.")
    alive: bool = Field(description="Its heartbeat is in time; else its claims are taken over.")
    seen_s: float = Field(description="Since its last heartbeat.")
    claims: int = Field(description="Groups it works for.")
    slots: SlotsAnswer
    engines: int
    healthy_engines: int


class StatusAnswer(Answer):
    policy_version: int
    max_staleness: int
    submitted: int
    groups: dict[GroupState, int]
    outstanding: int
    slots: SlotsAnswer
    paused: bool
    halted: HaltAnswer | None
    blocked: str | None = Field(description="Why no new group is opened now.")
    final: bool
    read_position: int = Field(description="Rows of the prompts file submitted so far, over all epochs.")
    oldest_outstanding: OldestAnswer | None
    leases: LeasesAnswer
    store: StoreAnswer
    threads: ThreadsAnswer | None = None
    engines: list[dict[str, Any]]
    replica: str | None = Field(default=None, description="Id of the replica that answers.")
    replicas: list[ReplicaAnswer] = Field(default=[], description="Those that share the run; empty where one has it.")


class EnginesAnswer(Answer):
    engines: list[dict[str, Any]]


class ControlAnswer(Answer):
    paused: bool
    halted: HaltAnswer | None


class LiveAnswer(Answer):
    status: Literal["alive"] = "alive"


class ReadyAnswer(Answer):
    status: Literal["ready"] = "ready"
