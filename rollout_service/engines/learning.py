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

log = structlog.get_logger(__name__)


class Learning:
    """Of one engine."""

    def __init__(self, engine: VllmEngine, settings: FleetSettings, *, refuse: Callable[[str], None]) -> None:
        self._engine = engine
        self._settings = settings
        self._refuse = refuse
        self._model = "" if settings.model_per_version else settings.model
        self._rest: asyncio.Task[bool] | None = None
        self._warned = False

    async def learn(self) -> None:
        """Raises ConfigError where it is no engine for this run, EngineFault where nothing can be said yet."""
        likely = self._settings.temperature == 1 or self._settings.allow_raw_logprobs
        if likely and await self._engine.is_back(self._model):
            if self._rest is None or self._rest.done():
                self._rest = asyncio.get_running_loop().create_task(self._learn_rest(), name="engine-learn-rest")
        else:
            self._check(await self._engine.learn(self._model))

    async def vouched(self) -> bool:
        """Whether what the engine answered may be used; waits while the rest of it is being read."""
        if self._rest is None:
            return True
        return await asyncio.shield(self._rest)

    async def close(self) -> None:
        if self._rest is not None and not self._rest.done():
            self._rest.cancel()
            await asyncio.wait({self._rest})

    async def _learn_rest(self) -> bool:
        try:
            self._check(await self._engine.learn(self._model))
        except EngineFault as fault:  # its probes tell whether it is down
            log.info("engine_not_learnt_again", engine=self._engine.url, error=str(fault))
            return False
        except ConfigError as wrong:
            self._refuse(str(wrong))
            return False
        except Exception:  # of ours; it costs what the engine answered meanwhile, and must not go unseen
            log.exception("engine_learn_failed", engine=self._engine.url)
            return False
        self._rest = None
        return True

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
