"""How one rollout is made."""

from rollout_service.rollouts.sampling import SAMPLING_KEYS, SamplingDefaults, effective_sampling
from rollout_service.rollouts.single_turn import SingleTurn, SingleTurnSettings

__all__ = ["SAMPLING_KEYS", "SamplingDefaults", "SingleTurn", "SingleTurnSettings", "effective_sampling"]
