"""From what reward functions said to what is delivered: rows, advantages, and whether the group may go out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rollout_service.core.advantages import AdvantageMethod, advantages
from rollout_service.core.model import DropReason, FinishedRollout, Scores
from rollout_service.core.records import GroupScore, RowScore


class ZeroVariance(StrEnum):
    """What becomes of a group whose rewards are all equal."""

    KEEP = "keep"
    """Delivered with advantages 0.0 and `zero_variance`."""
    DROP = "drop"
    """The whole group is dropped, never rows of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringRules:
    """From `[groups]` and `[[rewards]]`."""

    weights: Mapping[str, float]
    """Reward name -> weight."""
    method: AdvantageMethod = AdvantageMethod.GRPO
    zero_variance: ZeroVariance = ZeroVariance.KEEP
    min_group_size: int = 2
    distillation: bool = False
    """A rollout counts as scored where its teacher scored it; rewards are for people."""


OWN_REWARD = "rollout"
"""The name under which a rollout's own reward stands beside those of the reward functions; its weight is 1."""


def with_own_rewards(scores: Scores, rollouts: Sequence[FinishedRollout]) -> Scores:
    """`scores` with the rewards the rollouts brought along; row i of both is the same survivor."""
    own = [rollout.reward for rollout in rollouts]
    if all(reward is None for reward in own):
        return scores
    return replace(scores, rewards={**scores.rewards, OWN_REWARD: own})


def judge(scores: Scores, indexes: Sequence[int], rules: ScoringRules) -> tuple[GroupScore, DropReason | None]:
    """What scoring adds to the survivors, and why the group may not be delivered, if so (design 3.2.8 and 3.4).

    Row i of `scores` is the survivor with row number `indexes[i]`.
    """
    weights = {OWN_REWARD: 1.0, **rules.weights}
    result = advantages(scores.rewards, weights, rows=len(indexes), method=rules.method)
    taught = [scores.teacher[i] if i < len(scores.teacher) else None for i in range(len(indexes))]
    rows = {
        index: RowScore(
            reward=result.rewards[i],
            rewards={name: values[i] for name, values in scores.rewards.items()},
            advantage=result.advantages[i],
            teacher=taught[i] or (),
        )
        for i, index in enumerate(indexes)
    }
    score = GroupScore(
        rows=rows,
        mean=result.mean,
        std=result.std,
        zero_variance=result.zero_variance and not rules.distillation,
        errors=scores.errors,
    )
    scored = sum(bool(teacher) for teacher in taught) if rules.distillation else result.scored
    if scored < rules.min_group_size:
        return score, DropReason.UNSCORABLE
    if score.zero_variance and rules.zero_variance is ZeroVariance.DROP:
        return score, DropReason.ZERO_VARIANCE
    return score, None
