"""New weights for every engine of a fleet, in one call.

What always holds: one update at a time; engines load side by side, each paused no longer than its own load takes; an
engine that does not follow is out of the fleet before the call ends, so no request meets its old weights; engines that
were out already, and those that leave the fleet meanwhile, are neither waited for nor make the call fail. Weights that
every engine of the fleet has loaded are given to those that were out or were added meanwhile (which get no work before
they have them), and again to one that comes back without them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from rollout_service.core.model import WeightUpdate
from rollout_service.engines.faults import EngineFault
from rollout_service.engines.health import Member
from rollout_service.engines.weights import unload_adapter
from rollout_service.errors import EnginesBehind, Unavailable

log = structlog.get_logger(__name__)


class WeightUpdates:
    """Updates the members it is shown."""

    def __init__(self, members: Callable[[], Sequence[Member]], *, adapters_kept: int) -> None:
        self._members = members
        self._adapters_kept = adapters_kept
        self.current: WeightUpdate | None = None
        """What every engine of the fleet has loaded; None while that is changing."""
        self._adapters: list[str] = []
        """Names loaded here, oldest first."""

    async def apply(self, update: WeightUpdate, *, again: bool = False) -> list[str]:
        """Load `update` everywhere; the ids of engines that were out and still are.

        `again`: engines that report its version already have it. Raises EnginesBehind where an engine of the fleet did
        not follow, Unavailable where none is there.
        """
        members = self._staying()
        # Engines that are out already are not waited for: they get the weights at one of their next checks.
        fleet = [member for member in members if member.healthy] or [m for m in members if m.reachable]
        if not fleet:
            raise Unavailable("no engine answers that could load the weights")
        todo = [member for member in fleet if not (again and member.weights.reported == str(update.version))]
        if todo:
            await self._load(update, members, fleet, todo)
        await self._forget_adapters(update)
        return [member.engine.id for member in self._staying() if member.weights.why_behind is not None]

    def _staying(self) -> list[Member]:
        return [member for member in self._members() if not member.leaving]

    async def _load(
        self, update: WeightUpdate, members: Sequence[Member], fleet: Sequence[Member], todo: Sequence[Member]
    ) -> None:
        before = self.current
        self._is(None)  # nobody is given older weights while others load these
        outcomes = await asyncio.gather(*(member.take_weights(update) for member in todo))
        fleet = [member for member in fleet if not member.leaving]
        failed = {
            member: error
            for member, error in zip(todo, outcomes, strict=True)
            if error is not None and not member.leaving
        }
        if not fleet:
            self._is(before)
            raise Unavailable("every engine that was to load the weights was removed meanwhile")
        for member, error in failed.items():
            log.error("engine_did_not_follow", engine=member.engine.url, version=update.version, error=str(error))
        if failed and len(failed) == len(fleet) and not any(error.touched for error in failed.values()):
            # The update itself is wrong (a mistyped path), and no engine was changed: the run goes on as it was.
            self._is(before)
            await asyncio.gather(*(member.restore() for member in failed))
            raise _behind(update, {member: str(error) for member, error in failed.items()}, goes_on=True)
        for member in self._staying():
            if member not in members:
                member.missed(update, "it was added while the others loaded them")
            elif member not in fleet:
                member.missed(update, f"it was out of the fleet ({member.error})")
        if failed:
            raise _behind(update, {member: str(error) for member, error in failed.items()}, goes_on=False)
        self._is(update)
        for member in self._staying():
            member.may_catch_up()

    def _is(self, current: WeightUpdate | None) -> None:
        self.current = current
        for member in self._members():
            member.current = current

    async def _forget_adapters(self, update: WeightUpdate) -> None:
        """Unload adapters no request can name any more. What fails here costs the engine memory, not the run."""
        if update.lora_name is None:
            return
        self._adapters = [name for name in self._adapters if name != update.lora_name] + [update.lora_name]
        old, self._adapters = self._adapters[: -self._adapters_kept], self._adapters[-self._adapters_kept :]
        for member in self._members():
            for name in old if member.usable else ():
                try:
                    await unload_adapter(member.engine, name)
                except EngineFault as fault:
                    log.info("adapter_not_unloaded", engine=member.engine.url, adapter=name, error=str(fault))


def _behind(update: WeightUpdate, failed: dict[Member, str], *, goes_on: bool) -> EnginesBehind:
    told = "; ".join(f"{member.engine.id} ({member.engine.url}): {error}" for member, error in failed.items())
    then = (
        "No engine was changed, and the run goes on with the weights it has"
        if goes_on
        else "No work goes there until they are; the same call again goes on without them"
    )
    return EnginesBehind(
        f"the weights of version {update.version} were not loaded by {told}. {then}. The policy version was not posted",
        engines=[
            {"id": member.engine.id, "url": member.engine.url, "error": error} for member, error in failed.items()
        ],
    )
