"""The retry policy, pure."""

from __future__ import annotations

import pytest

from rollout_service.core.model import FailureReason
from rollout_service.engines.faults import AbortedAnswer, BadAnswer, RequestTimeout, StatusFault, TransportFault
from rollout_service.engines.retry import Deadline, RetryPolicy

POLICY = RetryPolicy(max_attempts=3)


def test_pauses_double_from_a_tenth_of_a_second_up_to_five() -> None:
    pauses = [POLICY.pause_s(attempts, jitter=0.0, retry_after_s=None) for attempts in range(1, 9)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    assert POLICY.pause_s(10_000, jitter=0.0, retry_after_s=None) == 5.0


def test_jitter_takes_off_up_to_a_half() -> None:
    assert POLICY.pause_s(1, jitter=0.999, retry_after_s=None) == pytest.approx(0.05, rel=0.01)


def test_retry_after_is_honoured_up_to_thirty_seconds() -> None:
    assert POLICY.pause_s(1, jitter=0.0, retry_after_s=7.0) == 7.0
    assert POLICY.pause_s(1, jitter=0.0, retry_after_s=1e6) == 30.0
    assert POLICY.pause_s(7, jitter=0.0, retry_after_s=0.5) == 5.0


@pytest.mark.parametrize(
    "fault", [TransportFault("x"), RequestTimeout("x"), BadAnswer("x"), AbortedAnswer("x"), StatusFault(503, "x")]
)
def test_transient_faults_are_given_up_at_max_attempts(fault: TransportFault) -> None:
    assert [POLICY.gives_up(attempts, fault) for attempts in (1, 2, 3)] == [False, False, True]


@pytest.mark.parametrize(
    ("status", "param", "reason"),
    [
        (400, None, FailureReason.REJECTED),
        (400, "input_tokens", FailureReason.PROMPT_TOO_LONG),
        (400, "input_text", FailureReason.PROMPT_TOO_LONG),
        (404, "input_tokens", FailureReason.REJECTED),
        (307, None, FailureReason.REJECTED),
    ],
)
def test_permanent_faults_are_given_up_at_once(status: int, param: str | None, reason: FailureReason) -> None:
    fault = StatusFault(status, "x", param=param)
    assert POLICY.gives_up(1, fault)
    assert fault.failure_reason == reason


def test_a_deadline_moves_on_by_what_it_is_extended() -> None:
    now = [10.0]
    deadline = Deadline(lambda: now[0], 5.0)
    now[0] = 14.0
    assert deadline.remaining() == pytest.approx(1.0)
    deadline.extend(2.0)
    assert deadline.remaining() == pytest.approx(3.0)
