"""What has to be known of an engine before it is used: model, context, logprobs.

What always holds: an engine whose logprobs are not those this run needs is refused before it gets work, and one that
comes back serving the same as before is not held up by what cannot be wrong: then the rest is read beside its work, and
what is wrong after all is told to `refuse`.
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
        self._rest: asyncio.Task[None] | None = None
        self._warned = False

    async def learn(self) -> None:
        """Raises ConfigError where it is no engine for this run, EngineFault where nothing can be said yet."""
        # Whichever mode the server has now, at these settings its logprobs are right, or were allowed to be wrong.
        any_logprobs = self._settings.temperature == 1 or self._settings.allow_raw_logprobs
        if any_logprobs and await self._engine.is_back(self._model):
            if self._rest is None or self._rest.done():
                self._rest = asyncio.get_running_loop().create_task(self._learn_rest(), name="engine-learn-rest")
        else:
            self._check(await self._engine.learn(self._model))

    async def close(self) -> None:
        if self._rest is not None and not self._rest.done():
            self._rest.cancel()
            await asyncio.wait({self._rest})

    async def _learn_rest(self) -> None:
        try:
            self._check(await self._engine.learn(self._model))
        except EngineFault as fault:  # its probes tell whether it is down
            log.info("engine_not_learnt_again", engine=self._engine.url, error=str(fault))
        except ConfigError as wrong:
            self._refuse(str(wrong))
        except Exception:  # nobody waits for this task; what it met must not go unseen
            log.exception("engine_learn_failed", engine=self._engine.url)

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
