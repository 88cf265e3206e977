"""A policy version, with the weights it stands for where the caller wants them loaded too.

What always holds: a version is posted only after every engine of the fleet has its weights; paths outside the
allow-list reach no engine; one update runs at a time, in the order of the calls, and an update that was begun is ended
even if its caller hangs up (engines would stay paused otherwise).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Protocol

from rollout_service.core.changes import Bumped
from rollout_service.core.model import WeightUpdate
from rollout_service.errors import PathNotAllowed, ShuttingDown


class Versions(Protocol):
    """Keeps the policy version."""

    @property
    def version(self) -> int: ...

    async def post_version(self, version: int, *, reset: bool = False) -> Bumped: ...


class WeightLoader(Protocol):
    """Loads weights into every engine."""

    async def update_weights(self, update: WeightUpdate, *, again: bool = False) -> list[str]:
        """The ids of engines left behind that were out before. Raises EnginesBehind, Unavailable."""


class PolicyUpdates:
    """Posts versions, one update after the other."""

    def __init__(self, versions: Versions, loader: WeightLoader, *, allowed_paths: Sequence[str] = ()) -> None:
        self._versions = versions
        self._loader = loader
        self._allowed = tuple(allowed_paths)
        self._closing = False
        self._one = asyncio.Lock()
        self._running: set[asyncio.Task[tuple[Bumped, list[str]]]] = set()

    async def post(self, update: WeightUpdate, *, reset: bool = False) -> tuple[Bumped, list[str]]:
        """Load, then post; also the ids of engines that stay behind.

        Raises PathNotAllowed, Conflict for a version that is too low, EnginesBehind, Unavailable.
        """
        await asyncio.to_thread(check_path, update.path, self._allowed)
        if self._closing:  # engines would be paused with nobody left to resume them
            raise ShuttingDown("the service is ending; ask again after its restart")
        task = asyncio.create_task(self._do(update, reset), name=f"weights-{update.version}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _do(self, update: WeightUpdate, reset: bool) -> tuple[Bumped, list[str]]:
        async with self._one:
            current = self._versions.version
            if update.version < current and not reset:
                return await self._versions.post_version(update.version), []  # which refuses it, and says why
            behind = await self._loader.update_weights(update, again=update.version == current)
            return await self._versions.post_version(update.version, reset=reset), behind

    async def stop(self) -> None:
        """Break off what runs, and begin nothing more; engines that load are told to resume."""
        self._closing = True
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)


def check_path(path: str, allowed: Sequence[str]) -> None:
    """Raise PathNotAllowed unless `path` lies below one of `allowed`; follows symbolic links where they can be seen."""
    if not allowed:
        raise PathNotAllowed("no weights are loaded over HTTP: weights.allowed_paths names no folder")
    asked = PurePosixPath(path)
    if not asked.is_absolute() or ".." in asked.parts:
        raise PathNotAllowed(f"expected an absolute path without `..`, not {path!r}")
    real = PurePosixPath(os.path.realpath(asked))
    if not any(asked.is_relative_to(root) and real.is_relative_to(os.path.realpath(root)) for root in allowed):
        raise PathNotAllowed(f"{path} lies in none of weights.allowed_paths ({', '.join(allowed)})", path=path)
