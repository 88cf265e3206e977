"""Groups for people: where one stands, and every rollout of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_service.api.schemas import GroupDetail, GroupRow, RolloutRow
from rollout_service.api.wire import timestamp
from rollout_service.core.group import Group
from rollout_service.core.model import FailedRollout, FinishedRollout, GroupState, Prompt
from rollout_service.core.records import GroupPayload
from rollout_service.orchestrator.views import GroupView


def group_row(group: Group, *, version: int, now: float) -> GroupRow:
    return GroupRow(**_standing(group, version=version, now=now))


def group_detail(view: GroupView, sampling: Mapping[str, Any]) -> GroupDetail:
    """`sampling` is the configured one, under the prompt's own."""
    payload = view.payload
    group, prompt, score = payload.group, payload.prompt, payload.score
    by_state = _rows(group, view.in_flight)
    state_of = {index: state for state, indexes in by_state.items() for index in indexes}
    rollouts = [_rollout(index, state, view) for index, state in sorted(state_of.items())]
    standing = _standing(group, version=view.policy_version, now=view.now)
    if group.error is None or group.state is GroupState.GENERATING:
        # The store has a group's last error once its state changes, a rollout's at once.
        failures = [found for found in payload.rollouts.values() if isinstance(found, FailedRollout)]
        standing |= {"error": failures[-1].error, "engine": failures[-1].engine} if failures else {}
    return GroupDetail(
        **standing,
        rows=by_state,
        rollouts=rollouts,
        reward_errors=dict(score.errors) if score else {},
        columns=None if prompt is None else dict(prompt.columns),
        prompt=None if prompt is None else _shown(prompt),
        sampling=None if prompt is None else {**sampling, **prompt.sampling},
    )


def _rows(group: Group, in_flight: Mapping[int, float]) -> dict[str, list[int]]:
    """Row numbers by state. The store does not know which rows are in flight; the orchestrator does."""
    running = {*group.running, *in_flight} - group.finished - group.failed
    return {
        "waiting": sorted(set(group.waiting) - running),
        "running": sorted(running),
        "finished": sorted(group.finished),
        "failed": sorted(group.failed),
    }


def _standing(group: Group, *, version: int, now: float) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "prompt_id": group.prompt_id,
        "epoch": group.epoch,
        "state": group.state,
        "reason": group.reason,
        "attempt": group.attempt,
        "tries": group.tries,
        "num_generations": group.num_generations,
        "policy_version": group.version,
        # An ended group ages no more.
        "staleness": None if group.state.terminal else group.staleness(version),
        "error": group.error,
        "engine": group.engine,
        "lease_id": group.lease_id,
        "acked_by": group.acked_by,
        "submitted_at": timestamp(group.submitted_at),
        "age_s": _seconds(now - group.submitted_at),
        "state_age_s": _seconds(now - group.changed_at),
    }


def _seconds(value: float) -> float:
    return round(max(0.0, value), 3)


def _shown(prompt: Prompt) -> Any:
    if prompt.messages is not None:
        return prompt.messages
    return prompt.text if prompt.token_ids is None else prompt.token_ids.tolist()


def _rollout(index: int, state: str, view: GroupView) -> RolloutRow:
    found = view.payload.rollouts.get(index)
    if isinstance(found, FinishedRollout):
        return _finished(found, view.payload)
    if isinstance(found, FailedRollout):
        return RolloutRow(
            index=index,
            state="failed",
            error=found.error,
            reason=found.reason,
            engine=found.engine,
            attempts=found.attempts,
        )
    running = view.in_flight.get(index)
    return RolloutRow(index=index, state=state, in_flight_s=None if running is None else _seconds(running))


def _finished(rollout: FinishedRollout, payload: GroupPayload) -> RolloutRow:
    score = payload.score.rows.get(rollout.index) if payload.score else None
    attempts = rollout.metrics.get("attempts")
    return RolloutRow(
        index=rollout.index,
        state="finished",
        finish_reason=rollout.finish_reason,
        tokens=rollout.output_tokens,
        text=rollout.turns[-1].text,
        engine=rollout.turns[-1].engine,
        attempts=None if attempts is None else int(attempts),
        reward=score.reward if score else None,
        rewards=dict(score.rewards) if score else None,
        advantage=score.advantage if score else None,
    )
