"""Scoring a group: whatever a reward does (loops, dies, lies), `RewardScorer.score` answers with `Scores`.

Nothing a reward function can do stops the service, reaches another group, or turns into a number nobody gave.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_service.rewards.scorer import RewardScorer
    from rollout_service.rewards.spec import RewardSpec

__all__ = ["RewardScorer", "RewardSpec"]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: a worker process imports this package too and needs neither HTTP client nor event loop,
    # which are three quarters of its start.
    if name == "RewardScorer":
        from rollout_service.rewards.scorer import RewardScorer

        return RewardScorer
    if name == "RewardSpec":
        from rollout_service.rewards.spec import RewardSpec

        return RewardSpec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
