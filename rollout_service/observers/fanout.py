"""Several observers as one, and one that ignores everything for others to begin with.

What always holds: each observer hears everything, in the order it happened, the first one first.
"""

from __future__ import annotations

from rollout_service.core.changes import Bumped, Halt, Moved
from rollout_service.core.group import Group, Lease
from rollout_service.core.model import FailedRollout, FinishedRollout
from rollout_service.orchestrator.parts import Observer


class Quiet:
    """An Observer that does nothing."""

    def group_moved(self, moved: Moved) -> None:
        pass

    def rollout_settled(self, outcome: FinishedRollout | FailedRollout, seconds: float, *, group_id: str) -> None:
        pass

    def rollouts_aborted(self, count: int) -> None:
        pass

    def tokens_wasted(self, tokens: int, reason: str) -> None:
        pass

    def group_delivered(self, group: Group, *, staleness: int, tokens: int, reward_mean: float | None) -> None:
        pass

    def lease_ended(self, lease: Lease, seconds: float) -> None:
        pass

    def version_posted(self, bumped: Bumped) -> None:
        pass

    def halted(self, halt: Halt) -> None:
        pass

    def committed(self, seconds: float) -> None:
        pass

    def commit_failed(self, error: str) -> None:
        pass


class Observers:
    """Passes on what it is told."""

    def __init__(self, *observers: Observer) -> None:
        self._all = observers

    def group_moved(self, moved: Moved) -> None:
        for one in self._all:
            one.group_moved(moved)

    def rollout_settled(self, outcome: FinishedRollout | FailedRollout, seconds: float, *, group_id: str) -> None:
        for one in self._all:
            one.rollout_settled(outcome, seconds, group_id=group_id)

    def rollouts_aborted(self, count: int) -> None:
        for one in self._all:
            one.rollouts_aborted(count)

    def tokens_wasted(self, tokens: int, reason: str) -> None:
        for one in self._all:
            one.tokens_wasted(tokens, reason)

    def group_delivered(self, group: Group, *, staleness: int, tokens: int, reward_mean: float | None) -> None:
        for one in self._all:
            one.group_delivered(group, staleness=staleness, tokens=tokens, reward_mean=reward_mean)

    def lease_ended(self, lease: Lease, seconds: float) -> None:
        for one in self._all:
            one.lease_ended(lease, seconds)

    def version_posted(self, bumped: Bumped) -> None:
        for one in self._all:
            one.version_posted(bumped)

    def halted(self, halt: Halt) -> None:
        for one in self._all:
            one.halted(halt)

    def committed(self, seconds: float) -> None:
        for one in self._all:
            one.committed(seconds)

    def commit_failed(self, error: str) -> None:
        for one in self._all:
            one.commit_failed(error)
