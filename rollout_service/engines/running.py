"""The requests that run at one engine, and how it is left.

What always holds: nothing is sent to an engine that is leaving; one that is left is empty when no request of ours runs
there, and only then.
"""

from __future__ import annotations

import asyncio

from rollout_service.core.model import Turn
from rollout_service.engines.faults import EngineRemoved
from rollout_service.engines.requests import GenerateRequest
from rollout_service.engines.vllm import VllmEngine


class Running:
    """At one engine."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._requests: set[asyncio.Timeout] = set()
        """Of each request: what ends it early."""
        self._leaving = asyncio.Event()
        self._empty = asyncio.Event()

    @property
    def leaving(self) -> bool:
        """Whether the engine is being removed."""
        return self._leaving.is_set()

    async def generate(self, request: GenerateRequest, request_id: str, *, timeout_s: float, fresh: bool) -> Turn:
        """As the engine's own; EngineRemoved where it is leaving, or leaves meanwhile and is out of patience."""
        if self.leaving:
            raise EngineRemoved(f"{self._engine.url} is being removed")
        try:
            async with asyncio.timeout(None) as running:
                self._requests.add(running)
                try:
                    return await self._engine.generate(request, request_id, timeout_s=timeout_s, fresh=fresh)
                finally:
                    self._requests.discard(running)
                    if not self._requests and self.leaving:
                        self._empty.set()
        except TimeoutError:
            if not running.expired():
                raise
            raise EngineRemoved(f"{self._engine.url} was removed") from None

    def leave(self) -> None:
        """No request from this moment on. Does not come back."""
        self._leaving.set()
        if not self._requests:
            self._empty.set()

    def recall(self) -> None:
        """End what runs: it is aborted at the engine, and its callers get EngineRemoved."""
        now = asyncio.get_running_loop().time()
        for running in self._requests:
            running.reschedule(now)

    async def left(self) -> None:
        """Wait until the engine is leaving."""
        await self._leaving.wait()

    async def emptied(self) -> None:
        """Wait until it is leaving and nothing runs there."""
        await self._empty.wait()
