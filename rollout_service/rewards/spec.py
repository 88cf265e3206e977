"""What one reward is, as configuration says it."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_service.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSpec:
    """One reward. Exactly one of `function` and `url` is set (`ConfigError` otherwise)."""

    name: str
    """Key of its values in `Scores.rewards`; unique."""
    function: str | None = None
    """`package.module:function`."""
    url: str | None = None
    """http(s) address of a webhook."""
    weight: float = 1.0
    """Its share in the weighted sum. Scoring does not read it."""
    timeout_s: float = 30.0
    """Seconds for one group, from the moment a worker starts on it."""

    def __post_init__(self) -> None:
        if bool(self.function) == bool(self.url):
            raise ConfigError(f'reward "{self.name}": give either function or url')
