"""One engine of the fleet: whether it may be given work.

What always holds: an engine gets work only after it was learnt (model, context, logprobs) and while its last probe
succeeded; a failed probe takes it out at once, `STRIKES` transport errors or 5xx in a row do so too, and only a probe
that succeeds brings it back. An engine that is wrong for the run (another model) stays out, with `error` saying why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from rollout_service.engines.faults import EngineFault
from rollout_service.engines.settings import FleetSettings
from rollout_service.engines.vllm import EngineInfo, EngineSpec, VllmEngine
from rollout_service.errors import ConfigError

STRIKES = 3
"""Transport errors or 5xx in a row that take an engine out (design 3.2.5)."""
RECHECK_S = 0.5
"""The first probe after request errors took an engine out: its `/health` may well be fine."""

log = structlog.get_logger(__name__)


class Member:
    """An engine, its load and its health. `changed` is called whenever `healthy` or what was learnt changes."""

    def __init__(
        self, engine: VllmEngine, spec: EngineSpec, settings: FleetSettings, *, changed: Callable[[], None]
    ) -> None:
        self.engine = engine
        self.max_inflight = spec.max_inflight
        self.in_flight = 0
        self.healthy = False
        self.suspect = False
        """Taken out by request errors and without a success since: gets one request at a time while others can."""
        self.detokenizes = True
        self.error: str | None = "not contacted yet"
        self._settings = settings
        self._changed = changed
        self._strikes = 0
        self._failed_probe = True
        self._nudge = asyncio.Event()
        self._verifying: asyncio.Task[bool] | None = None
        self._warned_unreadable = False

    @property
    def free(self) -> bool:
        """Whether it may be given one more request."""
        return self.healthy and self.in_flight < self.max_inflight

    def holds(self, tokens: int) -> bool:
        """Whether a sequence of `tokens` fits its context, as far as is known."""
        info = self.engine.info
        return info is None or info.max_model_len is None or tokens <= info.max_model_len

    def describe(self) -> dict[str, Any]:
        info = self.engine.info
        return {
            "id": self.engine.id,
            "url": self.engine.url,
            "healthy": self.healthy,
            "in_flight": self.in_flight,
            "max_inflight": self.max_inflight,
            "model": info.model if info else None,
            "max_model_len": info.max_model_len if info else None,
            "logprobs_mode": info.logprobs_mode if info else None,
            "abort": info.abort.value if info else None,
            "error": self.error,
        }

    # -- what requests tell

    def succeeded(self) -> None:
        self._strikes = 0
        self.suspect = False

    def struck(self, why: str) -> None:
        """A request met a transport error or a 5xx."""
        self._strikes += 1
        if self.healthy and self._strikes >= (1 if self.suspect else STRIKES):
            self.suspect = True
            self._take_out(f"{self._strikes} failed requests in a row, the last: {why}")
            self._nudge.set()

    async def verify(self) -> bool:
        """Whether a probe made now succeeds; callers at the same time share one. A failed one takes the engine out."""
        if self._failed_probe:
            return False
        if self._verifying is None or self._verifying.done():
            self._verifying = asyncio.get_running_loop().create_task(self._probe(), name="engine-verify")
        return await asyncio.shield(self._verifying)

    # -- probing

    async def contact(self) -> None:
        """The first contact. Raises ConfigError when what answers is not an engine for this run."""
        try:
            await self._learn()
        except EngineFault as fault:
            self._take_out(str(fault))

    async def watch(self) -> None:
        """Probe for ever."""
        interval = self._settings.probe_interval_s
        delay = interval
        while True:
            try:
                async with asyncio.timeout(delay):
                    await self._nudge.wait()
            except TimeoutError:
                delay = interval
                await self._check()
            else:
                self._nudge.clear()
                delay = min(RECHECK_S, interval)

    async def close(self) -> None:
        if self._verifying is not None and not self._verifying.done():
            self._verifying.cancel()
            await asyncio.wait({self._verifying})
        await self.engine.close()

    async def _check(self) -> None:
        try:
            if not await self._probe() or self.healthy:
                return
            # It may be another server than before: another model, other limits.
            await self._learn()
        except EngineFault as fault:
            self._take_out(str(fault))
        except ConfigError as wrong:
            self._take_out(str(wrong))
        except Exception as error:
            # The watch must outlive whatever one check met; the engine is out until a check ends well.
            log.exception("engine_check_failed", engine=self.engine.url)
            self._take_out(f"{type(error).__name__}: {error}"[:300])

    async def _probe(self) -> bool:
        interval = self._settings.probe_interval_s
        why = await self.engine.probe(min(5.0, max(1.0, interval)))
        self._failed_probe = why is not None
        if why is not None:
            self.suspect = False  # it was down, which says nothing against it once it is up
            self._take_out(why)
        return why is None

    async def _learn(self) -> None:
        info = await self.engine.learn(self._settings.model)
        self._check_logprobs(info)
        self._failed_probe = False
        self._strikes = 0
        self.detokenizes = True
        self.error = None
        self.healthy = True
        log.info("engine_healthy", engine=self.engine.url, model=info.model, max_model_len=info.max_model_len)
        self._changed()

    def _check_logprobs(self, info: EngineInfo) -> None:
        url, mode, temperature = self.engine.url, info.logprobs_mode, self._settings.temperature
        if mode is None:
            if not self._warned_unreadable:
                self._warned_unreadable = True
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

    def _take_out(self, why: str) -> None:
        was, before = self.healthy, self.error
        self.healthy = False
        self.error = why
        if was or why != before:
            log.warning("engine_unhealthy", engine=self.engine.url, error=why)
        if was:
            self._changed()
