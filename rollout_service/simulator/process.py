"""The simulator as a process of its own.

Always holds: one line on standard output tells the address once it listens; SIGTERM and SIGINT answer who is in
flight and end it with 0; a user's mistake is one line on standard error.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import signal
import sys

from .settings import SimulatorSettings
from .simulator import Simulator

COLLECT_AFTER = 50_000
"""Allocations between two rounds of the collector. Calls untie their own cycles, so it finds next to nothing."""
EXIT_OK = 0
EXIT_CRASHED = 1
EXIT_USAGE = 2


def serve(settings: SimulatorSettings) -> int:
    """Serves until a signal or a scripted crash; returns the process's exit code."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.run(_serve(settings))
    import uvloop  # only where the platform has it

    return uvloop.run(_serve(settings))


async def _serve(settings: SimulatorSettings) -> int:
    simulator = Simulator(settings)
    try:
        await simulator.start()
    except OSError as problem:
        sys.stderr.write(f"simulate-engine: cannot listen on {settings.host}:{settings.port}: {problem}\n")
        return EXIT_USAGE
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    # What exists now lives for ever: with thousands in flight the collector must not walk it again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 20)
    sys.stdout.write(f"simulated engine: {simulator.url} serves {settings.model}\n")
    sys.stdout.flush()
    ends = {loop.create_task(stopped.wait()), loop.create_task(simulator.wait_gone())}
    _, pending = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await simulator.stop()
    return EXIT_OK if stopped.is_set() else EXIT_CRASHED
