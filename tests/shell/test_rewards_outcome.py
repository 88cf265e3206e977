"""Values and errors of user code, judged: nothing that is no number becomes one, nothing is broadcast."""

import decimal
import itertools
import math

import numpy as np
import pytest

from rollout_service.loading import MAX_MESSAGE
from rollout_service.rewards.outcome import MAX_TRACEBACK, outcome_of_error, outcome_of_values


@pytest.mark.parametrize(
    ("values", "rewards"),
    [
        ([0.5, 1], [0.5, 1.0]),
        ((True, False), [1.0, 0.0]),
        ([None, math.nan], [None, None]),
        ([math.inf, -math.inf], [None, None]),
        (np.array([0.25, np.nan], dtype=np.float32), [0.25, None]),
        ([np.float32(0.5), np.int64(3)], [0.5, 3.0]),
        ([decimal.Decimal("0.5"), np.bool_(True)], [0.5, 1.0]),
        ((x for x in (1.0, 2.0)), [1.0, 2.0]),
    ],
)
def test_numbers_are_taken_and_what_is_not_finite_is_not_scored(values: object, rewards: list[float | None]) -> None:
    outcome = outcome_of_values(values, 2)
    assert (outcome.values, outcome.error) == (rewards, None)
    assert all(value is None or type(value) is float for value in outcome.values or ())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "returned 1 rewards for 2 completions"),
        ([1.0] * 5, "returned 5 rewards for 2 completions"),
        (np.ones(3), "returned 3 rewards for 2 completions"),
        (itertools.repeat(1.0), "returned 3 or more rewards for 2 completions"),
        (None, "returned None instead of a list of 2 rewards"),
        (1.0, "returned a value of type float instead of a list of 2 rewards"),
        (np.float64(1.0), "returned a value of type float instead of a list of 2 rewards"),
        ("12", "returned a value of type str instead of a list of 2 rewards"),
        ({1: 1.0, 2: 2.0}, "returned a value of type dict instead of a list of 2 rewards"),
        (["1.0", 1.0], "returned a value of type str for row 0 instead of a number or None"),
        ([1.0, [1.0]], "returned a value of type list for row 1 instead of a number or None"),
        (np.ones((2, 1)), "returned a value of type list for row 0 instead of a number or None"),
        ([1.0, 10**400], "returned a value of type int for row 1 that is no number: int too large"),
        ([1.0, np.ones(3)], "returned a value of type ndarray for row 1 that is no number"),
    ],
)
def test_what_is_not_one_number_a_survivor_scores_nobody(values: object, message: str) -> None:
    outcome = outcome_of_values(values, 2)
    assert outcome.values is None
    assert outcome.error is not None
    assert outcome.error.startswith(message)


def test_torch_tensors_are_taken() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    assert outcome_of_values(torch.tensor([0.5, float("nan")], requires_grad=True), 2).values == [0.5, None]
    assert outcome_of_values([torch.tensor(1.0), torch.tensor(True)], 2).values == [1.0, 1.0]


def test_an_endless_message_is_cut_and_made_valid_unicode() -> None:
    outcome = outcome_of_error(ValueError("\ud800" + "x" * 100_000))
    assert outcome.error is not None
    assert outcome.traceback is not None
    assert outcome.error.startswith("ValueError: ?xxx")
    assert (len(outcome.error), len(outcome.traceback)) == (MAX_MESSAGE, MAX_TRACEBACK)


def test_an_exception_that_cannot_be_printed_is_still_told() -> None:
    class SpitefulError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    outcome = outcome_of_error(SpitefulError())
    assert outcome.error is not None
    assert "SpitefulError" in outcome.error
