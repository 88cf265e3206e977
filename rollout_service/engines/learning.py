"""What has to be known of an engine before it is used: model, context, logprobs.

What always holds: nothing an engine answers is used before it is known that its logprobs are those this run needs. One
that comes back serving the same model gets work at once, and the rest is read beside it: answers wait for that, and are
bad ones where the engine turns out to be wrong, which is also told to `refuse`. A temperature other than 1 makes raw
logprobs wrong, and a mode is soon forgotten on a command line: then the engine is read first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from rollout_service.engines.faults import EngineFault
from rollout_service.engines.info import EngineInfo
from rollout_service.engines.settings import FleetSettings
from rollout_service.engines.vllm import VllmEngine
from rollout_service.errors import ConfigError

TRIES, PAUSE_S = 3, 0.5
"""Of the rest, before an engine that is in use already is taken out for it."""

log = structlog.get_logger(__name__)


class Learning:
    """Of one engine."""

    def __init__(self, engine: VllmEngine, settings: FleetSettings, *, refuse: Callable[[str], None]) -> None:
        self._engine = engine
        self._settings = settings
        self._refuse = refuse
        self._model = "" if settings.model_per_version else settings.model
        self._rest: asyncio.Task[None] | None = None
        """Reads the rest; still here when it has ended: then it ended badly."""
        self._warned = False

    async def learn(self) -> None:
        """Raises ConfigError where it is no engine for this run, EngineFault where nothing can be said yet."""
        await self.close()  # what is still being read may be of the server before this one
        likely = self._settings.temperature == 1 or self._settings.allow_raw_logprobs
        if likely and await self._engine.is_back(self._model):
            self._rest = asyncio.get_running_loop().create_task(self._learn_rest(), name="engine-learn-rest")
        else:
            self._check(await self._engine.learn(self._model))

    async def vouched(self) -> bool:
        """Whether what the engine answered may be used; waits while the rest of it is being read."""
        while (rest := self._rest) is not None:
            await asyncio.wait({rest})
            if rest is self._rest:
                return False
        return True

    async def close(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None and not rest.done():
            rest.cancel()
            await asyncio.wait({rest})

    async def _learn_rest(self) -> None:
        try:
            self._check(await self._told())
        except (EngineFault, ConfigError) as wrong:
            self._refuse(str(wrong))  # a later probe learns it anew
        except Exception as error:  # a fault of ours must not leave an engine in use that nobody vouches for
            log.exception("engine_learn_failed", engine=self._engine.url)
            self._refuse(f"{type(error).__name__}: {error}"[:300])
        else:
            self._rest = None

    async def _told(self) -> EngineInfo:
        """What it says of itself; one that has just come up may miss a beat."""
        for _ in range(TRIES - 1):
            try:
                return await self._engine.learn(self._model)
            except EngineFault as fault:
                log.info("engine_not_learnt_yet", engine=self._engine.url, error=str(fault))
                await asyncio.sleep(PAUSE_S)
        return await self._engine.learn(self._model)

    def _check(self, info: EngineInfo) -> None:
        url, mode, temperature = self._engine.url, info.logprobs_mode, self._settings.temperature
        if mode is None:
            if not self._warned:
                self._warned = True
                log.warning(
                    "engine_logprobs_mode_unreadable",
                    engine=url,
                    detail="at a temperature other than 1 it must run with --logprobs-mode processed_logprobs",
                )
        elif mode.endswith("_logits"):
            raise ConfigError(
                f"engine {url} gives logits, not logprobs: start it with --logprobs-mode processed_logprobs"
            )
        elif mode == "raw_logprobs" and temperature != 1 and not self._settings.allow_raw_logprobs:
            raise ConfigError(
                f"engine {url} gives logprobs from before the temperature, and sampling.temperature is "
                f"{temperature:g}: start it with --logprobs-mode processed_logprobs, or set sampling.allow_raw_logprobs"
            )
