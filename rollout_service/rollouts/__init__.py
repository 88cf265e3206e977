"""How one rollout is made: one turn, or a program's turns."""

from rollout_service.rollouts.cancellation import RolloutCancelled
from rollout_service.rollouts.context import Context, Reply, ThreadContext
from rollout_service.rollouts.program import ProgramRunner, ProgramSettings
from rollout_service.rollouts.sampling import SAMPLING_KEYS, SamplingDefaults, effective_sampling
from rollout_service.rollouts.single_turn import Engines, SingleTurn, SingleTurnSettings
from rollout_service.rollouts.threads import ThreadCounts, Threads

__all__ = [
    "SAMPLING_KEYS",
    "Context",
    "Engines",
    "ProgramRunner",
    "ProgramSettings",
    "Reply",
    "RolloutCancelled",
    "SamplingDefaults",
    "SingleTurn",
    "SingleTurnSettings",
    "ThreadContext",
    "ThreadCounts",
    "Threads",
    "effective_sampling",
]
