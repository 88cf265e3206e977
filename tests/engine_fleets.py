"""Fleets over scripted engines, for the tests of engines and rollouts."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rollout_service.core.model import FailureReason
from rollout_service.engines import Answer, Deadline, EngineSpec, Fleet, FleetSettings, GenerateRequest
from rollout_service.engines.settings import CallTracer
from tests.engine_script import ScriptedEngine

SAMPLING = {"temperature": 1.0, "max_tokens": 8}


class OpenGate:
    """Never closed; counts how often it was passed."""

    def __init__(self) -> None:
        self.passes = 0

    async def passed(self) -> float:
        self.passes += 1
        return 0.0


class ClosableGate:
    """Closed while `open` is not set; says it waited `says` seconds whenever it was closed."""

    def __init__(self, says: float = 0.0) -> None:
        self.open = asyncio.Event()
        self.says = says
        self.waiting = 0

    async def passed(self) -> float:
        if self.open.is_set():
            return 0.0
        self.waiting += 1
        await self.open.wait()
        self.waiting -= 1
        return self.says


class Counted:
    """EngineEvents that a test looks at."""

    def __init__(self) -> None:
        self.retries: Counter[FailureReason] = Counter()
        self.aborts = 0
        self.failed_aborts = 0
        self.done = 0
        self.changes: list[int] = []

    def retried(self, reason: FailureReason) -> None:
        self.retries[reason] += 1

    def abort_issued(self, count: int) -> None:
        self.aborts += count

    def abort_failed(self, count: int) -> None:
        self.failed_aborts += count

    def request_done(self, seconds: float) -> None:
        self.done += 1


@asynccontextmanager
async def fleet_of(
    *engines: ScriptedEngine | str,
    events: Counted | None = None,
    on_change: Callable[[], None] = lambda: None,
    max_inflight: int = 64,
    api_key: str = "",
    tracer: CallTracer | None = None,
    **settings: Any,
) -> AsyncIterator[Fleet]:
    """A started fleet that probes often; stopped at the end."""
    limits = {"probe_interval_s": 0.05, "engine_wait_s": 5.0, "request_timeout_s": 10.0} | settings
    specs = [
        EngineSpec(url=engine if isinstance(engine, str) else engine.url, max_inflight=max_inflight, api_key=api_key)
        for engine in engines
    ]
    fleet = Fleet(specs, FleetSettings(**limits), events=events, on_change=on_change, tracer=tracer)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.stop()
        assert all(member["in_flight"] == 0 for member in fleet.describe())


def ask(
    text: str | None = "abc", *, ids: list[int] | None = None, tag: str = "g.1.0", **sampling: Any
) -> GenerateRequest:
    """A request for a text prompt, or for one of ids."""
    token_ids = array("i", ids) if ids is not None else None
    return GenerateRequest(
        tag=tag, text=None if ids is not None else text, token_ids=token_ids, sampling=SAMPLING | sampling
    )


async def generate(
    fleet: Fleet, request: GenerateRequest | None = None, *, gate: Any = None, deadline_s: float = 30.0
) -> Answer:
    loop = asyncio.get_running_loop()
    return await fleet.generate(request or ask(), gate=gate or OpenGate(), deadline=Deadline(loop.time, deadline_s))


async def until(condition: Callable[[], Any], within_s: float = 10.0) -> None:
    """Wait until `condition()` is true, for what no event tells of."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)
