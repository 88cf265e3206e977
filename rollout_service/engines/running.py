"""The requests that run at one engine, and how it is left.

What always holds: nothing is sent to an engine that is leaving; one that is left is empty when no request of ours runs
there, and only then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rollout_service.core.model import Turn
from rollout_service.engines.faults import BadAnswer, EngineRemoved, RequestTimeout
from rollout_service.engines.requests import GenerateRequest
from rollout_service.engines.vllm import VllmEngine


class Running:
    """At one engine."""

    def __init__(self, engine: VllmEngine, *, vouched: Callable[[], Awaitable[bool]]) -> None:
        """`vouched`: whether what the engine has answered may be used; it may wait to know."""
        self._engine = engine
        self._vouched = vouched
        self._requests: set[asyncio.Task[Any]] = set()
        self._recalled: set[asyncio.Task[Any]] = set()
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
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - for mypy: a coroutine runs in a task
        self._requests.add(task)
        try:
            ends_at = asyncio.get_running_loop().time() + timeout_s
            turn = await self._engine.generate(request, request_id, timeout_s=timeout_s, fresh=fresh)
            try:
                async with asyncio.timeout_at(ends_at):
                    if not await self._vouched():
                        raise BadAnswer(f"{self._engine.url} came back and is not what it was before")
            except TimeoutError:
                raise RequestTimeout(f"{self._engine.url} did not tell in time what it is") from None
            return turn
        except asyncio.CancelledError:
            if task not in self._recalled or task.uncancel():
                raise  # somebody else ends it too
            raise EngineRemoved(f"{self._engine.url} was removed") from None
        finally:
            self._recalled.discard(task)
            self._requests.discard(task)
            if self.leaving and not self._requests:
                self._empty.set()

    def leave(self) -> None:
        """No request from this moment on. Does not come back."""
        self._leaving.set()
        if not self._requests:
            self._empty.set()

    def recall(self) -> None:
        """End what runs: it is aborted at the engine, and its callers get EngineRemoved."""
        for task in self._requests - self._recalled:
            self._recalled.add(task)
            task.cancel()

    async def left(self) -> None:
        """Wait until the engine is leaving."""
        await self._leaving.wait()

    async def emptied(self) -> None:
        """Wait until it is leaving and nothing runs there."""
        await self._empty.wait()
