"""Shapes of the live view and of a group's tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from rollout_service.api.schemas import Answer, StatusAnswer, decimal
from rollout_service.core.model import GroupState
from rollout_service.observers import RecentKind
from rollout_service.settings.tables import MAX_GROUP_SIZE

RowNumber = Annotated[int, Field(strict=True, ge=0, lt=MAX_GROUP_SIZE)]


class EventsQuery(BaseModel):
    """`GET /events`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    limit: Annotated[Annotated[int, Field(strict=True, ge=1, le=1_000_000)] | None, BeforeValidator(decimal)] = Field(
        default=None, description="End after so many lines; missing: never."
    )


class SamplesQuery(BaseModel):
    """`GET /groups/{group_id}/samples`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    index: Annotated[RowNumber | None, BeforeValidator(decimal)] = Field(
        default=None, description="Row of the group; missing: every finished one."
    )


class RatesAnswer(Answer):
    """Per second."""

    window_s: float
    rollouts_per_s: float = Field(description="Rollouts that survived.")
    tokens_per_s: float = Field(description="Tokens generated, as far as engines answered.")
    groups_per_s: float = Field(description="Groups delivered.")


class TotalsAnswer(Answer):
    """Since this process began."""

    rollouts_finished: int
    rollouts_failed: dict[str, int] = Field(description="By reason.")
    groups_delivered: int
    groups_acked: int
    groups_stale: int = Field(description="Groups that lost work to a version, once an attempt.")
    groups_failed: int
    groups_dropped: dict[str, int] = Field(description="By reason.")
    tokens_generated: int
    tokens_delivered: int
    tokens_wasted: dict[str, int] = Field(description="By reason.")
    aborts: int
    halts: int


class FlowAnswer(Answer):
    """Groups that went from one state to another."""

    from_state: GroupState = Field(serialization_alias="from")
    to_state: GroupState = Field(serialization_alias="to")
    count: int


class StalenessAnswer(Answer):
    staleness: int
    groups: int


class RewardAnswer(Answer):
    policy_version: int = Field(description="Of the groups.")
    groups: int
    mean: float


class RecentAnswer(Answer):
    at: str
    kind: RecentKind
    group_id: str | None
    engine: str | None
    text: str


class LiveViewAnswer(Answer):
    """What the run is doing, complete each time."""

    at: str
    version: str = Field(description="Of the service.")
    mode: Literal["grpo", "distillation"]
    status: StatusAnswer
    rates: RatesAnswer | None = Field(description="null before there is something to compare with.")
    totals: TotalsAnswer
    flow: list[FlowAnswer] = Field(description="Since this process began.")
    staleness: list[StalenessAnswer] = Field(description="Of delivered groups, since this process began.")
    rewards: list[RewardAnswer] = Field(description="By policy version, the newest 240.")
    recent: list[RecentAnswer] = Field(description="Newest first, 50 at most.")


class TokensAnswer(Answer):
    """One sample of a group, token by token: four lists of one length."""

    index: int
    policy_version: int
    reward: float | None
    rewards: dict[str, float | None]
    advantage: float | None = Field(description="null before the group was scored.")
    scored: bool
    finish_reason: Literal["stop", "length", "tool_calls"]
    input_ids: list[int]
    completion_mask: list[int]
    old_log_probs: list[float]
    tokens: list[str | None] = Field(description="Text of each id; null where no engine can tell.")


class GroupTokensAnswer(Answer):
    group_id: str
    attempt: int
    samples: list[TokensAnswer]
