"""A simulated vLLM server, for tests, benchmarks and dry runs without a GPU.

In a test: `async with Simulator(SimulatorSettings(latency=0.05)) as sim:` and `sim.url`. As a process:
`rollout-service simulate-engine`, which is `serve(settings)`. It imports nothing of the rest of the package.
"""

from .faults import Action, FaultPlan, Rule
from .journal import Outcome
from .process import serve
from .settings import Lengths, LogprobsMode, SimulatorSettings
from .simulator import Simulator

__all__ = [
    "Action",
    "FaultPlan",
    "Lengths",
    "LogprobsMode",
    "Outcome",
    "Rule",
    "Simulator",
    "SimulatorSettings",
    "serve",
]
