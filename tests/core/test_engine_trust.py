"""What requests say for or against an engine, as a pure value."""

from __future__ import annotations

from rollout_service.engines.trust import DOUBTS, LONGEST_TRIAL_S, STRIKES, TRIAL_S, Trust


def test_strikes_in_a_row_take_an_engine_out_and_a_success_between_them_does_not_let_them() -> None:
    trust = Trust()
    assert [trust.struck() for _ in range(STRIKES)] == [False] * (STRIKES - 1) + [True]
    other = Trust()
    for _ in range(5):
        assert not other.struck()
        other.succeeded()


def test_an_engine_that_came_back_is_taken_out_by_one_strike_until_something_succeeds() -> None:
    trust = Trust()
    while not trust.struck():
        pass
    trust.back()
    assert trust.doubtful
    assert trust.struck()
    trust.back()
    trust.succeeded()
    assert not trust.doubtful
    assert not trust.struck()


def test_a_failed_probe_explains_what_failed() -> None:
    trust = Trust()
    for _ in range(STRIKES):
        trust.failed(0.0)
        trust.struck()
    assert trust.doubtful
    trust.down()
    trust.back()
    assert not trust.doubtful
    assert not trust.struck()


def test_failures_of_any_kind_in_a_row_raise_doubt_and_trials_come_further_and_further_apart() -> None:
    trust = Trust()
    for number in range(DOUBTS):
        assert not trust.doubtful
        assert trust.may_try(0.0), number
        trust.failed(0.0)
    assert trust.doubtful
    now, pauses = 0.0, []
    for _ in range(8):
        until = next(now + tenth / 10 for tenth in range(200) if trust.may_try(now + tenth / 10))
        pauses.append(round(until - now, 1))
        now = until
        trust.failed(now)
    assert pauses[0] == TRIAL_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_TRIAL_S
    trust.succeeded()
    assert not trust.doubtful
