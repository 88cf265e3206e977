"""One group: each legal event leads where the table says, each other one is refused and changes nothing."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from rollout_service.core import lifecycle
from rollout_service.core.group import Group, GroupPolicy, OnStale, group_id, group_seq
from rollout_service.core.lifecycle import TRANSITIONS, Event, EventKind, IllegalEvent, apply
from rollout_service.core.model import DropReason, FailureReason, GroupState

S = GroupState
POLICY = GroupPolicy(max_staleness=1, min_group_size=2)


def group(state: GroupState = S.PENDING, **more: object) -> Group:
    standing: dict[GroupState, dict[str, object]] = {
        S.PENDING: {},
        S.GENERATING: {"version": 3, "waiting": (), "running": frozenset({0, 1, 2})},
        S.SCORING: {"version": 3, "waiting": (), "finished": frozenset({0, 1, 2})},
        S.READY: {"version": 3, "waiting": (), "finished": frozenset({0, 1, 2})},
        S.LEASED: {"version": 3, "waiting": (), "finished": frozenset({0, 1, 2}), "lease_id": "l"},
        S.ACKED: {"version": 3, "waiting": (), "finished": frozenset({0, 1, 2}), "acked_by": "l"},
        S.STALE: {"version": 3, "waiting": ()},
        S.DROPPED: {"version": 3, "waiting": (), "reason": DropReason.CANCELLED},
        S.FAILED: {"version": 3, "waiting": (), "failed": frozenset({0, 1, 2})},
    }
    base = Group(
        seq=7,
        prompt_id="p",
        epoch=0,
        num_generations=3,
        waiting=(0, 1, 2),
        submitted_at=1.0,
        changed_at=1.0,
        state=state,
    )
    return replace(base, **{**standing[state], **more})  # type: ignore[arg-type]  # fields by name


EVENTS: dict[EventKind, Event] = {
    EventKind.DISPATCHED: lifecycle.Dispatched(rows=(0, 1), version=3),
    EventKind.FINISHED: lifecycle.Finished(attempt=1, index=0, payload_bytes=10),
    EventKind.ROLLOUT_FAILED: lifecycle.RolloutFailed(attempt=1, index=0, reason=FailureReason.REJECTED, error="no"),
    EventKind.SCORED: lifecycle.Scored(attempt=1),
    EventKind.LEASED: lifecycle.Leased(lease_id="l"),
    EventKind.RETURNED: lifecycle.Returned(lease_id="l"),
    EventKind.ACKED: lifecycle.Acked(lease_id="l", attempt=1),
    EventKind.OUTDATED: lifecycle.Outdated(version=5),
    EventKind.CANCELLED: lifecycle.Cancelled(),
    EventKind.RESET: lifecycle.Reset(),
    EventKind.REWOUND: lifecycle.Rewound(),
    EventKind.RECOVERED: lifecycle.Recovered(),
}


def test_the_table_knows_every_state_and_every_event_and_every_event_has_a_kind():
    assert {state for state, _ in TRANSITIONS} | set().union(*TRANSITIONS.values()) == set(S)
    assert {kind for _, kind in TRANSITIONS} == set(EventKind) == set(lifecycle.KIND_OF.values()) == set(EVENTS)


@pytest.mark.parametrize("state", S)
@pytest.mark.parametrize("kind", EventKind)
def test_an_event_leads_where_the_table_says_or_is_refused_with_nothing_changed(state: GroupState, kind: EventKind):
    before = group(state)
    if kind is EventKind.DISPATCHED and state is S.GENERATING:
        before = group(state, waiting=(0, 1), running=frozenset({2}))
    copy = replace(before)
    allowed = TRANSITIONS.get((state, kind))
    if allowed is None:
        with pytest.raises(IllegalEvent) as refused:
            apply(before, EVENTS[kind], policy=POLICY, now=2.0)
        assert refused.value.group is before
        assert refused.value.kind is kind
    else:
        after, _ = apply(before, EVENTS[kind], policy=POLICY, now=2.0)
        assert after.state in allowed
        assert after.changed_at == (1.0 if after.state is state else 2.0)
    assert before == copy


def test_a_group_ends_only_once_for_no_terminal_state_has_a_way_out_but_a_rewind():
    assert {kind for state, kind in TRANSITIONS if state.terminal} == {EventKind.REWOUND}


@pytest.mark.parametrize(
    "event",
    [
        lifecycle.Finished(attempt=2, index=0, payload_bytes=1),
        lifecycle.Finished(attempt=1, index=3, payload_bytes=1),
        lifecycle.RolloutFailed(attempt=2, index=0, reason=FailureReason.TIMEOUT, error=""),
        lifecycle.Dispatched(rows=(1,), version=3),
        lifecycle.Dispatched(rows=(), version=3),
        lifecycle.Outdated(version=4),
    ],
)
def test_events_of_another_attempt_or_row_and_bumps_within_the_bound_are_refused(event: Event):
    before = group(S.GENERATING, waiting=(2,), running=frozenset({0, 1}))
    with pytest.raises(IllegalEvent):
        apply(before, event, policy=POLICY, now=2.0)


def settled(*, ok: int, failed: int, policy: GroupPolicy = POLICY) -> Group:
    """A group of ok + failed rows in which everything was settled, the failures first."""
    n = ok + failed
    now = group(S.GENERATING, num_generations=n, running=frozenset(range(n)))
    for row in range(n):
        event: Event = lifecycle.Finished(attempt=1, index=row, payload_bytes=5)
        if row < failed:
            event = lifecycle.RolloutFailed(
                attempt=1, index=row, reason=FailureReason.REJECTED, error=f"e{row}", engine="http://e"
            )
        now, _ = apply(now, event, policy=policy, now=2.0)
    return now


@pytest.mark.parametrize(
    ("ok", "failed", "state"),
    [(4, 0, S.SCORING), (3, 1, S.SCORING), (2, 2, S.SCORING), (1, 3, S.DROPPED), (0, 4, S.FAILED)],
)
def test_survivors_decide_what_becomes_of_a_group(ok: int, failed: int, state: GroupState):
    after = settled(ok=ok, failed=failed)
    assert after.state is state
    assert after.reason == (DropReason.TOO_FEW_SURVIVORS if state is S.DROPPED else None)
    assert after.finished == frozenset(range(failed, failed + ok))
    assert after.payload_bytes == 5 * ok
    assert after.error == (f"e{failed - 1}" if failed else None)


def test_a_single_survivor_is_a_group_where_the_minimum_is_one():
    assert settled(ok=1, failed=3, policy=GroupPolicy(min_group_size=1)).state is S.SCORING


def test_a_prompt_that_does_not_fit_ends_the_whole_group_and_stops_the_other_rows():
    event = lifecycle.RolloutFailed(
        attempt=1, index=0, reason=FailureReason.PROMPT_TOO_LONG, error="4,096 is the limit"
    )
    after, effects = apply(group(S.GENERATING), event, policy=POLICY, now=2.0)
    assert (after.state, after.reason, after.error) == (S.DROPPED, DropReason.PROMPT_TOO_LONG, "4,096 is the limit")
    (stop,) = effects
    assert isinstance(stop, lifecycle.StopRollouts)
    assert stop.rows == {1, 2}


OUTDATED = lifecycle.Outdated(version=5)


def test_a_partly_dispatched_group_keeps_the_rows_it_never_dispatched_under_a_new_attempt():
    before = group(
        S.GENERATING,
        num_generations=6,
        waiting=(3, 4, 5),
        running=frozenset({1, 2}),
        finished=frozenset({0}),
        payload_bytes=9,
    )
    after, effects = apply(before, OUTDATED, policy=POLICY, now=2.0)
    assert (after.state, after.attempt, after.tries, after.version) == (S.PENDING, 2, 1, None)
    assert (after.waiting, after.rows, after.payload_bytes) == ((3, 4, 5), (3, 4, 5), 0)
    assert effects == (lifecycle.StopRollouts(group=before, rows=frozenset({1, 2})),)


@pytest.mark.parametrize("waiting", [(), (5,)])
def test_with_fewer_rows_left_than_a_group_needs_it_ends_stale(waiting: tuple[int, ...]):
    before = group(S.GENERATING, num_generations=6, waiting=waiting, running=frozenset({0, 1}))
    after, _ = apply(before, OUTDATED, policy=POLICY, now=2.0)
    assert after.state is S.STALE
    assert not after.waiting
    assert not after.running


def test_requeue_generates_the_whole_prompt_again_until_its_attempts_are_used_up():
    policy = GroupPolicy(max_staleness=1, on_stale=OnStale.REQUEUE, max_group_attempts=2)
    before = group(S.GENERATING, waiting=(2,), running=frozenset({0, 1}))
    after, _ = apply(before, OUTDATED, policy=policy, now=2.0)
    assert (after.state, after.attempt, after.tries, after.waiting) == (S.PENDING, 2, 2, (0, 1, 2))
    again, _ = apply(after, lifecycle.Dispatched(rows=(0, 1, 2), version=5), policy=policy, now=3.0)
    ended, _ = apply(again, lifecycle.Outdated(version=7), policy=policy, now=4.0)
    assert ended.state is S.STALE


@pytest.mark.parametrize("state", [S.GENERATING, S.SCORING, S.READY, S.LEASED])
def test_a_reset_takes_every_opened_group_back_whole_and_uses_no_attempt(state: GroupState):
    after, _ = apply(group(state), lifecycle.Reset(), policy=POLICY, now=2.0)
    assert (after.state, after.attempt, after.tries, after.waiting) == (S.PENDING, 2, 1, (0, 1, 2))
    assert (after.version, after.lease_id) == (None, None)


def test_later_rows_keep_the_version_of_the_first_dispatch():
    opened, _ = apply(group(), lifecycle.Dispatched(rows=(0,), version=3), policy=POLICY, now=2.0)
    further, effects = apply(opened, lifecycle.Dispatched(rows=(1, 2), version=4), policy=POLICY, now=2.0)
    assert further.version == 3
    (start,) = effects
    assert isinstance(start, lifecycle.StartRollouts)
    assert (start.rows, start.first) == ((1, 2), False)


def test_after_a_restart_unfinished_rows_are_not_dispatched_and_finished_ones_are_kept():
    some = group(S.GENERATING, running=frozenset({0, 2}), finished=frozenset({1}))
    after, _ = apply(some, lifecycle.Recovered(), policy=POLICY, now=2.0)
    assert (after.state, after.version, after.waiting, after.finished) == (S.GENERATING, 3, (0, 2), {1})
    none, _ = apply(group(S.GENERATING), lifecycle.Recovered(), policy=POLICY, now=2.0)
    assert (none.state, none.version, none.waiting) == (S.PENDING, None, (0, 1, 2))


@pytest.mark.parametrize(
    ("ok", "failed", "state"),
    [(3, 0, S.SCORING), (2, 1, S.SCORING), (1, 2, S.DROPPED), (0, 3, S.FAILED)],
)
def test_a_group_found_with_every_row_settled_goes_where_its_last_row_would_have_sent_it(
    ok: int, failed: int, state: GroupState
):
    before = group(
        S.GENERATING, running=frozenset(), finished=frozenset(range(ok)), failed=frozenset(range(ok, ok + failed))
    )
    after, effects = apply(before, lifecycle.Recovered(), policy=POLICY, now=2.0)
    assert (after.state, after.version, after.attempt, after.changed_at) == (state, 3, 1, 2.0)
    assert after.reason == (DropReason.TOO_FEW_SURVIVORS if state is S.DROPPED else None)
    assert [type(effect) for effect in effects] == ([lifecycle.StartScoring] if state is S.SCORING else [])


def test_an_ack_after_expiry_counts_while_the_group_is_ready_in_the_same_attempt():
    after, _ = apply(group(S.READY), lifecycle.Acked(lease_id="old", attempt=1), policy=POLICY, now=2.0)
    assert (after.state, after.acked_by) == (S.ACKED, "old")
    with pytest.raises(IllegalEvent):
        apply(group(S.READY, attempt=2), lifecycle.Acked(lease_id="old", attempt=1), policy=POLICY, now=2.0)
    with pytest.raises(IllegalEvent):
        apply(group(S.LEASED), lifecycle.Acked(lease_id="other", attempt=1), policy=POLICY, now=2.0)


@pytest.mark.parametrize(
    "text", ["", "g-", "g-0", "g-01", "g-x", "g--1", "g-1 ", "7", "G-7", "g-\u0667", "g-" + "9" * 30]
)
def test_only_the_canonical_form_is_a_group_id(text: str):
    assert group_seq(text) is None


def test_group_ids_go_round():
    assert group_seq(group_id(42)) == 42


def test_values_cannot_be_changed_in_place():
    for field in fields(Group):
        with pytest.raises(AttributeError):
            setattr(group(), field.name, None)
