"""The demo's reward is the one of examples/cpu_grpo: the share of lowercase letters."""

from examples.cpu_grpo.rewards import lowercase_share

__all__ = ["lowercase_share"]
