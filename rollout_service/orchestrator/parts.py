"""The parts an orchestrator is made of, as it needs them and no wider; with fakes of them it runs in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from rollout_service.core.changes import Bumped, Halt, Moved
from rollout_service.core.group import Group, Lease
from rollout_service.core.model import FailedRollout, FinishedRollout, RolloutJob, ScoreJob, Scores


class Gate(Protocol):
    """Closed while the run is paused or halted."""

    async def passed(self) -> float:
        """Return once new engine requests may be made; how many seconds that took."""


class RolloutRunner(Protocol):
    """Makes one rollout."""

    async def run(self, job: RolloutJob, gate: Gate) -> FinishedRollout | FailedRollout:
        """Raises nothing but CancelledError; cancelling the task aborts at the engine."""


class Scorer(Protocol):
    """Asks the reward functions."""

    async def score(self, job: ScoreJob) -> Scores:
        """Raises nothing but CancelledError."""


class Engines(Protocol):
    """What dispatch needs to know of the engines."""

    def healthy_capacity(self) -> int:
        """Rollouts that healthy engines take at once; 0 where none is healthy."""

    async def abort(self, rollouts: Collection[str]) -> None:
        """Abort what runs for `rollouts` (see `rollout_id`), whose tasks are cancelled next. Returns soon after."""

    def unhealthy(self) -> Mapping[str, str]:
        """URL -> what is wrong, of every engine that is not healthy and every source of engines that cannot be read."""


class Clock(Protocol):
    """Seconds: Unix time, or where it says so by a clock that nobody sets."""

    def __call__(self) -> float: ...


class Observer(Protocol):
    """Told what became durable, in the order it happened; must neither raise nor wait."""

    def group_moved(self, moved: Moved) -> None:
        """A group changed its state or began another attempt."""

    def rollout_settled(self, outcome: FinishedRollout | FailedRollout, seconds: float, *, group_id: str) -> None:
        """A rollout of a current attempt survived or failed, `seconds` after its dispatch."""

    def rollouts_aborted(self, count: int) -> None:
        """This many rollouts in flight were stopped."""

    def tokens_wasted(self, tokens: int, reason: str) -> None:
        """Generated tokens that will not be delivered: `stale`, `reset`, `late`, or the group's drop reason."""

    def group_delivered(self, group: Group, *, staleness: int, tokens: int, reward_mean: float | None) -> None:
        """`group` went out in a new lease."""

    def lease_ended(self, lease: Lease, seconds: float) -> None:
        """A lease ended `seconds` after it was made."""

    def version_posted(self, bumped: Bumped) -> None:
        """The policy version is another one."""

    def halted(self, halt: Halt) -> None:
        """Dispatch halted."""

    def committed(self, seconds: float) -> None:
        """One commit took this long."""

    def commit_failed(self, error: str) -> None:
        """The store could not commit; everything since the last commit is undone."""
