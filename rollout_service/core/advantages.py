"""Rewards to advantages, exactly as design 3.4 has them.

What always holds: every value returned is finite; a rollout no function scored has reward None and advantage 0.0 and
does not enter the baseline; a group without variance gets exactly 0.0 (except with `none`, where the advantage is the
reward itself).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

EPSILON = 1e-8
"""Added to the standard deviation, as TRL's async GRPO does."""
ZERO_STD = 1e-6
"""A standard deviation up to this is rounding, not signal."""


class AdvantageMethod(StrEnum):
    """How a group's rewards become advantages."""

    GRPO = "grpo"
    """(r - mean) / (population std + 1e-8); GRPO, arXiv:2402.03300, in the variant of TRL's async trainer."""
    MEAN = "mean"
    """r - mean; Dr. GRPO, arXiv:2503.20783."""
    RLOO = "rloo"
    """r - mean of the other rollouts; arXiv:2402.14740."""
    NONE = "none"
    """r itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """Row i is survivor i."""

    rewards: tuple[float | None, ...]
    """Weighted sum over the functions that scored the row; None: unscored."""
    advantages: tuple[float, ...]
    mean: float | None
    """Over the scored rows; None where there is none."""
    std: float | None
    """Population standard deviation over the scored rows."""
    zero_variance: bool

    @property
    def scored(self) -> int:
        return sum(reward is not None for reward in self.rewards)


def advantages(
    rewards: Mapping[str, Sequence[float | None]],
    weights: Mapping[str, float],
    *,
    rows: int,
    method: AdvantageMethod,
) -> Advantages:
    """Combine `rewards` (function name -> one finite value or None a row) of a group with `rows` survivors."""
    combined = tuple(_weighted(rewards, weights, row) for row in range(rows))
    scored = [reward for reward in combined if reward is not None]
    if not scored:
        return Advantages(rewards=combined, advantages=(0.0,) * rows, mean=None, std=None, zero_variance=False)
    mean, std = _mean_std(scored)
    zero = std <= ZERO_STD
    values = tuple(0.0 if r is None else _one(r, scored, mean, std, zero, method) for r in combined)
    return Advantages(rewards=combined, advantages=values, mean=mean, std=std, zero_variance=zero)


def _weighted(rewards: Mapping[str, Sequence[float | None]], weights: Mapping[str, float], row: int) -> float | None:
    terms = [weights[name] * value for name, values in rewards.items() if (value := values[row]) is not None]
    total = sum(terms)  # not fsum: it raises where a sum of huge terms overflows
    return total if terms and math.isfinite(total) else None


def _mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation; scaled first, so that huge rewards do not overflow on the way."""
    scale = max(map(abs, values))
    scale = scale if scale > 1e100 else 1.0
    scaled = [value / scale for value in values]
    mean = math.fsum(scaled) / len(scaled)
    variance = math.fsum((value - mean) ** 2 for value in scaled) / len(scaled)
    return mean * scale, math.sqrt(variance) * scale


def _one(reward: float, scored: Sequence[float], mean: float, std: float, zero: bool, method: AdvantageMethod) -> float:
    if method is AdvantageMethod.NONE:
        return reward
    if zero:
        return 0.0
    if method is AdvantageMethod.GRPO:
        value = reward / (std + EPSILON) - mean / (std + EPSILON) if std > 1e100 else (reward - mean) / (std + EPSILON)
    elif method is AdvantageMethod.MEAN:
        value = reward - mean
    else:  # r - (n * mean - r) / (n - 1), written so that only differences are scaled
        value = (reward - mean) * (len(scored) / (len(scored) - 1))
    return max(-1.7976931348623157e308, min(1.7976931348623157e308, value))
