"""One line of the log for every group that ended: who it was, what became of it, and where its time went.

What always holds: a group that ended has exactly one line, written after its end is on disk; a line holds ids, numbers
and reasons, never a prompt, a completion or a reward function's words; what is remembered is bounded by the outstanding
groups. Times are of this process: a group that was open at a restart has only what came after it.
"""

from __future__ import annotations

from collections import defaultdict

import structlog

from rollout_service.core.changes import Moved
from rollout_service.core.group import Group
from rollout_service.core.model import FinishedRollout, GroupState
from rollout_service.observers.fanout import Quiet

log = structlog.get_logger(__name__)


class _Story:
    """What a group's line will tell."""

    __slots__ = ("reward_mean", "seconds", "staleness", "tokens")

    def __init__(self) -> None:
        self.seconds: dict[GroupState, float] = defaultdict(float)
        self.tokens = 0
        self.staleness: int | None = None
        self.reward_mean: float | None = None


class OutcomeLog(Quiet):
    """Observer that writes the lines."""

    def __init__(self) -> None:
        self._stories: dict[str, _Story] = defaultdict(_Story)

    def group_moved(self, moved: Moved) -> None:
        before, after = moved.before, moved.after
        if before.state.terminal:  # a rewind: its story begins anew
            return
        story = self._stories[after.group_id]
        if before.state is not after.state:
            story.seconds[before.state] += max(0.0, after.changed_at - before.changed_at)
        if after.state.terminal:
            self._write(after, before.version, self._stories.pop(after.group_id))

    def rollout_settled(self, outcome: object, seconds: float, *, group_id: str) -> None:
        if isinstance(outcome, FinishedRollout):
            self._stories[group_id].tokens += outcome.output_tokens

    def group_delivered(self, group: Group, *, staleness: int, tokens: int, reward_mean: float | None) -> None:
        story = self._stories[group.group_id]
        story.staleness, story.reward_mean = staleness, reward_mean

    def _write(self, group: Group, version: int | None, story: _Story) -> None:
        log.info(
            "group_ended",
            group_id=group.group_id,
            prompt_id=group.prompt_id,
            epoch=group.epoch,
            outcome=group.state.value,
            reason=group.reason and group.reason.value,
            attempt=group.attempt,
            policy_version=version,
            staleness=story.staleness,
            finished=len(group.finished),
            failed=len(group.failed),
            tokens=story.tokens,
            reward_mean=story.reward_mean,
            lease_id=group.acked_by,
            total_s=round(max(0.0, group.changed_at - group.submitted_at), 3),
            **{f"{state}_s": round(seconds, 3) for state, seconds in story.seconds.items()},
        )
