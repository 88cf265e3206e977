"""Rewards to advantages, against numbers worked out by hand and against a plain reference."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.core.advantages import AdvantageMethod, Advantages, advantages
from rollout_service.core.model import DropReason, Scores
from rollout_service.core.scoring import ScoringRules, ZeroVariance, judge

M = AdvantageMethod


def of(*values: float | None, method: AdvantageMethod = M.GRPO) -> Advantages:
    return advantages({"a": values}, {"a": 1.0}, rows=len(values), method=method)


def test_grpo_divides_by_the_population_standard_deviation():
    result = of(0.25, 0.5, 0.75)
    assert result.mean == 0.5
    assert result.std == pytest.approx(0.2041241452)
    assert result.advantages == pytest.approx((-1.2247448, 0.0, 1.2247448), abs=1e-6)


@pytest.mark.parametrize(
    ("method", "expected"),
    [(M.MEAN, (-1.0, 0.0, 1.0)), (M.RLOO, (-1.5, 0.0, 1.5)), (M.NONE, (1.0, 2.0, 3.0))],
)
def test_the_other_methods(method: AdvantageMethod, expected: tuple[float, ...]):
    assert of(1.0, 2.0, 3.0, method=method).advantages == expected


def test_unscored_rows_have_no_reward_no_advantage_and_do_not_enter_the_baseline():
    result = of(1.0, None, 3.0)
    assert result.rewards == (1.0, None, 3.0)
    assert (result.mean, result.std, result.scored) == (2.0, 1.0, 2)
    assert result.advantages == pytest.approx((-1.0, 0.0, 1.0), abs=1e-6)


def test_a_row_is_scored_by_the_functions_that_scored_it():
    result = advantages({"a": [1.0, None, None], "b": [10.0, 10.0, None]}, {"a": 1.0, "b": 0.5}, rows=3, method=M.MEAN)
    assert result.rewards == (6.0, 5.0, None)


def test_equal_rewards_give_exactly_zero_and_say_so():
    result = of(0.1 + 0.2, 0.3, 0.3)
    assert result.advantages == (0.0, 0.0, 0.0)
    assert result.zero_variance


def test_without_a_baseline_equal_rewards_stay_what_they_are():
    result = of(1.0, method=M.NONE)
    assert result.advantages == (1.0,)
    assert result.zero_variance


def test_nobody_scored_means_no_mean():
    result = of(None, None)
    assert (result.mean, result.std, result.zero_variance, result.advantages) == (None, None, False, (0.0, 0.0))


@given(
    values=st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8),
    method=st.sampled_from(M),
)
def test_whatever_finite_rewards_come_everything_stays_finite(values: list[float | None], method: AdvantageMethod):
    result = of(*values, method=method)
    assert all(math.isfinite(value) for value in result.advantages)
    assert all(a == 0.0 for a, r in zip(result.advantages, result.rewards, strict=True) if r is None)


@given(values=st.lists(st.floats(-1000, 1000), min_size=2, max_size=16))
def test_grpo_is_the_textbook_formula(values: list[float]):
    std = statistics.pstdev(values)
    result = of(*values)
    if std > 2e-6:
        expected = [(value - statistics.fmean(values)) / (std + 1e-8) for value in values]
        assert result.advantages == pytest.approx(expected, rel=1e-6, abs=1e-6)


RULES = ScoringRules(weights={"a": 1.0})


@pytest.mark.parametrize(
    ("values", "rules", "drop"),
    [
        ([1.0, 2.0, 3.0], RULES, None),
        ([1.0, None, None], RULES, DropReason.UNSCORABLE),
        ([None, None, None], RULES, DropReason.UNSCORABLE),
        ([1.0, 1.0, 1.0], RULES, None),
        ([1.0, 1.0, 1.0], ScoringRules(weights={"a": 1.0}, zero_variance=ZeroVariance.DROP), DropReason.ZERO_VARIANCE),
        ([1.0, None, None], ScoringRules(weights={"a": 1.0}, min_group_size=1), None),
    ],
)
def test_what_is_not_delivered_and_why(values: list[float | None], rules: ScoringRules, drop: DropReason | None):
    score, why = judge(Scores(rewards={"a": values}), [4, 5, 7], rules)
    assert why is drop
    assert [score.rows[index].reward for index in (4, 5, 7)] == values


def test_no_function_at_all_scored_it_is_unscorable():
    _, why = judge(Scores(rewards={}, errors={"scoring": "boom"}), [0, 1], RULES)
    assert why is DropReason.UNSCORABLE
