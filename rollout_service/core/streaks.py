"""Groups that went wrong in a row, and when that halts dispatch (design 3.2.3).

What always holds: a group that becomes ready ends every row of failures; what an operator or the trainer asked for
(staleness, cancellation, `zero_variance`) counts neither way; a streak is a value, so that replicas can keep one in
their store.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollout_service.core.changes import Halt
from rollout_service.core.group import Group
from rollout_service.core.lifecycle import EventKind
from rollout_service.core.model import DropReason, GroupState

UNPRODUCTIVE = frozenset(
    {DropReason.TOO_FEW_SURVIVORS, DropReason.UNSCORABLE, DropReason.PROMPT_TOO_LONG, DropReason.REWARD_CANCELLED}
)
"""Drops that count towards a halt: neither the trainer nor an operator asked for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Streak:
    """How many groups in a row went wrong until now."""

    failed: int = 0
    """Groups all of whose rollouts failed."""
    unproductive: int = 0
    """Those, and dropped ones."""

    def __bool__(self) -> bool:
        return bool(self.failed or self.unproductive)


@dataclass(frozen=True, kw_only=True, slots=True)
class HaltRules:
    """How many in a row halt; 0 = never."""

    failed: int = 1
    unproductive: int = 32


def counts(group: Group, kind: EventKind) -> bool:
    """Whether `group`, which `kind` brought to its state, begins, continues or ends a streak."""
    if group.state is GroupState.READY:
        return kind is EventKind.SCORED  # one that came back from a lease proves nothing of the engines
    return group.state is GroupState.FAILED or group.reason in UNPRODUCTIVE


def after(streak: Streak, group: Group) -> Streak:
    """The streak with a group that `counts`."""
    if group.state is GroupState.READY:
        return Streak()
    return Streak(failed=streak.failed + (group.state is GroupState.FAILED), unproductive=streak.unproductive + 1)


def halt_of(streak: Streak, group: Group, rules: HaltRules, *, now: float) -> Halt | None:
    """The halt that `streak`, whose last one is `group`, means; None where it means none."""
    if 0 < rules.failed <= streak.failed:
        reason = f"{streak.failed} group(s) in a row failed whole"
    elif 0 < rules.unproductive <= streak.unproductive:
        reason = f"{streak.unproductive} groups in a row were dropped or failed"
    else:
        return None
    error = group.error or f"dropped: {group.reason}"
    return Halt(reason=reason, group_id=group.group_id, engine=group.engine, error=error, since=now)
