"""How one rollout is made: one turn, or a program's turns."""

from rollout_service.rollouts.cancellation import RolloutCancelled
from rollout_service.rollouts.context import Context, Reply, ThreadContext
from rollout_service.rollouts.faults import ProgramFault
from rollout_service.rollouts.openenv import openenv_program
from rollout_service.rollouts.program import Program, ProgramRunner, ProgramSettings
from rollout_service.rollouts.sampling import SAMPLING_KEYS, SamplingDefaults, effective_sampling
from rollout_service.rollouts.single_turn import Engines, SingleTurn, SingleTurnSettings
from rollout_service.rollouts.threads import NoThreads, ThreadCounts, Threads
from rollout_service.rollouts.tool_loop import tool_program
from rollout_service.rollouts.tools import ToolBox, load_tools

__all__ = [
    "SAMPLING_KEYS",
    "Context",
    "Engines",
    "NoThreads",
    "Program",
    "ProgramFault",
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
    "ToolBox",
    "effective_sampling",
    "load_tools",
    "openenv_program",
    "tool_program",
]
