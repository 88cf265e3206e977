"""One engine of the fleet: whether it may be given work.

What always holds: an engine gets work only after it was learnt and while its last probe succeeded; a failed probe takes
it out at once, its requests do so as `trust` says, and only a probe that succeeds brings it back. An engine that is
wrong for the run (another model), or behind it (older weights), stays out, with `error` saying why. While an engine
loads weights it gets no new work. One that is leaving the fleet gets no work any more, is probed only, and is waited
for by nobody who loads weights.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import structlog

from rollout_service.core.model import Turn, WeightUpdate
from rollout_service.engines.engine_load import EngineLoad
from rollout_service.engines.faults import EngineFault, StatusFault
from rollout_service.engines.learning import Learning
from rollout_service.engines.requests import GenerateRequest
from rollout_service.engines.running import Running
from rollout_service.engines.settings import FleetSettings
from rollout_service.engines.trust import Trust
from rollout_service.engines.vllm import EngineSpec, VllmEngine
from rollout_service.engines.weights import FleetReports, LoadFailed, WeightStanding, load, weight_version
from rollout_service.errors import ConfigError

LOOK_S = 1.0
"""Between two looks at the load of an engine whose limit follows it; others are looked at as often as probed."""
RECHECK_S = 0.5
"""The first probe after request errors took an engine out: its `/health` may well be fine."""
CLOSE_S = 5.0
"""How long closing waits for an update of the weights that was broken off: it tells the engine to resume."""
CATCH_UP_REST_S = 30.0
"""Between two tries to give an engine that came back the run's weights: a load that fails may kill it."""

log = structlog.get_logger(__name__)


class Member:
    """An engine, its load and its health. `changed` is called whenever `healthy` or what was learnt changes."""

    def __init__(
        self,
        engine: VllmEngine,
        spec: EngineSpec,
        settings: FleetSettings,
        *,
        changed: Callable[[], None],
        version: Callable[[], int] = lambda: 0,
        reports: FleetReports | None = None,
        clock: Callable[[], float] = time.monotonic,
        alone: Callable[[], bool] = lambda: False,
    ) -> None:
        """`version` gives the current policy version; `reports` is shared by the fleet; `alone`: it has no others."""
        self.engine = engine
        self.load = EngineLoad(spec.max_inflight, spec.ceiling, clock=clock)
        self.healthy = False
        self.detokenizes = True
        self.error: str | None = "not contacted yet"
        self.weights = WeightStanding(reports)
        self.current: WeightUpdate | None = None
        """The last weights that were loaded into the fleet: what it is given when it comes back without them."""
        self._settings = settings
        self._clock = clock
        self._changed = changed
        self._version = version
        self._trust = Trust()
        self._learning = Learning(engine, settings, refuse=self._take_out)
        self._running = Running(engine, vouched=self._learning.vouched)
        self._broken_off: set[asyncio.Task[LoadFailed | None]] = set()
        self._alone = alone
        self._loading = 0
        self._one_load = asyncio.Lock()
        self._catch_up_from = -math.inf
        self._failed_probe = True
        self._nudge = asyncio.Event()
        self._verifying: asyncio.Task[bool] | None = None
        self._trial: asyncio.TimerHandle | None = None
        self._warned_unversioned = False

    @property
    def open(self) -> bool:
        """Whether it may be given one more request."""
        return self.usable and not self._loading and self.load.in_flight < self.load.limit

    @property
    def doubtful(self) -> bool:
        """Whether it gets one request at a time while others can."""
        return self._trust.doubtful

    @property
    def on_trial(self) -> bool:
        """Whether it may be given the one request that finds out whether it works again."""
        return self.doubtful and not self.load.in_flight and self._trust.may_try(self._clock())

    @property
    def in_flight(self) -> int:
        return self.load.in_flight

    @property
    def given(self) -> int:
        return self.load.given

    @property
    def limit(self) -> int:
        return self.load.limit

    @property
    def foreign(self) -> int:
        return self.load.foreign

    @property
    def pressed(self) -> bool:
        return self.load.pressed

    @property
    def leaving(self) -> bool:
        """Whether it is being removed from the fleet."""
        return self._running.leaving

    @property
    def usable(self) -> bool:
        """Whether it is healthy, and here to stay."""
        return self.healthy and not self.leaving

    @property
    def reachable(self) -> bool:
        """Whether it answers, even if it gets no work because it is behind."""
        return self.healthy or (self.weights.why_behind is not None and not self._failed_probe)

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
            "doubtful": self.doubtful,
            "in_flight": self.in_flight,
            **self.load.describe(),
            "model": info.model if info else None,
            "max_model_len": info.max_model_len if info else None,
            "logprobs_mode": info.logprobs_mode if info else None,
            "abort": info.abort.value if info else None,
            "priorities": info.priorities if info else False,
            "weight_version": self.weights.reported,
            "behind": self.weights.why_behind is not None,
            "leaving": self.leaving,
            "error": self.error,
        }

    # -- requests

    async def generate(
        self, request: GenerateRequest, request_id: str, *, timeout_s: float, fresh: bool = False
    ) -> Turn:
        """As the engine's own; EngineRemoved where it is leaving, or leaves meanwhile and is out of patience."""
        return await self._running.generate(request, request_id, timeout_s=timeout_s, fresh=fresh)

    def resize(self, spec: EngineSpec) -> None:
        """Take as many requests at once as `spec` says from now on; those beyond it that run already go on."""
        if self.load.set_limit(spec.max_inflight, spec.ceiling):
            self._changed()

    def leave(self) -> None:
        """No work from this moment on. Does not come back."""
        self._running.leave()
        self._changed()

    def recall(self) -> None:
        """End what runs there: it is aborted at the engine, and its callers get EngineRemoved."""
        self._running.recall()

    async def emptied(self) -> None:
        """Wait until it is leaving and no request runs there."""
        await self._running.emptied()

    # -- what requests tell

    def succeeded(self) -> None:
        if not self._trust.failures:
            return
        doubted = self.doubtful
        self._trust.succeeded()
        if doubted:
            self._changed()  # it takes all it can again

    def failed(self, fault: EngineFault) -> None:
        """A request failed there for `fault`."""
        doubted = self.doubtful
        self._trust.failed(self._clock())
        lowered = isinstance(fault, StatusFault) and fault.status in (429, 503) and self.load.refused()
        doubts = self.doubtful and not doubted
        if doubts:
            log.warning("engine_doubtful", engine=self.engine.url, failures=self._trust.failures, last=str(fault))
        if self.doubtful:
            self._try_later()
        if lowered or doubts:
            self._changed()

    def _try_later(self) -> None:
        """Whoever waits for an engine is told when this one may be tried again."""
        if self._trial is not None:
            self._trial.cancel()
        pause = self._trust.rests_until - self._clock()
        self._trial = asyncio.get_running_loop().call_later(max(0.001, pause), self._changed)

    def struck(self, why: str) -> None:
        """A request met a transport error or a 5xx."""
        if self.healthy and self._trust.struck():
            self._take_out(f"{self._trust.strikes} failed requests in a row, the last: {why}")
            self._nudge.set()

    async def verify(self) -> bool:
        """Whether a probe made now succeeds; callers at the same time share one. A failed one takes the engine out."""
        if self._failed_probe:
            return False
        if self._verifying is None or self._verifying.done():
            self._verifying = asyncio.get_running_loop().create_task(self._probe(), name="engine-verify")
        return await asyncio.shield(self._verifying)

    # -- weights

    async def take_weights(self, update: WeightUpdate) -> LoadFailed | None:
        """Load `update`; None, or why it was not loaded: then the engine is out until it has what the run has.

        Returns at once when the engine leaves the fleet.
        """
        loop = asyncio.get_running_loop()
        load = loop.create_task(self._load(update), name="engine-load")
        leaves = loop.create_task(self._running.left(), name="engine-leaves")
        try:
            await asyncio.wait({load, leaves}, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            load.cancel()
            await asyncio.wait({load})  # which tells the engine to resume
            raise
        finally:
            leaves.cancel()
        if not load.done():
            load.cancel()
            self._broken_off.add(load)
            load.add_done_callback(self._broken_off.discard)
            return LoadFailed("it is being removed", touched=True)
        error = load.result()
        if error is None and not self.healthy:
            await self._check()
        return error

    async def restore(self) -> None:
        """Nobody loaded the update this engine missed, and it is untouched: give it work again."""
        self.weights.untouched()
        await self._check()

    async def _load(self, update: WeightUpdate) -> LoadFailed | None:
        self._loading += 1
        try:
            async with self._one_load:
                await load(self.engine, update, timeout_s=self._settings.weights_timeout_s)
        except LoadFailed as failed:
            self.missed(update, str(failed))
            return failed
        except BaseException:
            self.missed(update, "the update was broken off")
            raise
        finally:
            self._loading -= 1
            self._changed()  # its slots are free again
        self.weights.loaded(update.version)
        log.info("engine_weights_loaded", engine=self.engine.url, version=update.version)
        return None

    def missed(self, update: WeightUpdate, why: str) -> None:
        """It does not have the weights of `update`: no work until it reports others than it does now."""
        self.weights.missed(update.version, why)
        self._take_out(f"behind: {self.weights.why_behind}")

    def may_catch_up(self) -> None:
        """There are new weights to give it: try at its next check."""
        self._catch_up_from = -math.inf

    async def _look_at_weights(self) -> None:
        current = self._version()  # before asking: a version posted meanwhile must not make the answer look old
        was_known = self.weights.reports
        try:
            reported = await weight_version(self.engine)
        except EngineFault as fault:
            if not self.healthy and self.weights.reports:
                raise  # back from somewhere, perhaps with its first weights: no work before it has said
            # It is healthy and hides its weights for now; the next look tells.
            log.info("engine_weight_version_unknown", engine=self.engine.url, error=str(fault))
            return
        self.weights.saw(reported, current)
        if current > 0 and not was_known and not self.weights.reports and not self._warned_unversioned:
            self._warned_unversioned = True
            log.warning(
                "engine_reports_no_weight_version",
                engine=self.engine.url,
                reported=reported,
                policy_version=current,
                detail="should it restart with its first weights, nobody would notice; POST /update_weight_version "
                "with the policy version after each update of its weights",
            )

    async def _catch_up(self) -> None:
        """Load what the run has into an engine that came back without it."""
        update, now = self.current, asyncio.get_running_loop().time()
        if update is None or update.version != self._version() or self._loading or now < self._catch_up_from:
            return
        self._catch_up_from = now + CATCH_UP_REST_S
        await self._load(update)

    # -- probing

    async def contact(self) -> None:
        """The first contact. Raises ConfigError when what answers is not an engine for this run."""
        try:
            await self._learn()
        except EngineFault as fault:
            self._take_out(str(fault))

    async def watch(self) -> None:
        """Probe, and look at the load, for ever."""
        await asyncio.gather(self._watch_health(), self._watch_load())

    async def _watch_load(self) -> None:
        # Apart from the probes: a page that takes long must not keep a dead engine in.
        while True:
            await asyncio.sleep(LOOK_S if self.load.auto else max(LOOK_S, self._settings.probe_interval_s))
            if not self.usable or self._loading or not self.load.readable or (self._alone() and not self.load.auto):
                continue  # one that loads weights is paused, and its report is old
            try:
                if await self.load.look(self.engine):
                    self._changed()
            except Exception:  # what one look met must not end the watch
                log.exception("engine_load_look_failed", engine=self.engine.url)

    async def _watch_health(self) -> None:
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
        await self._learning.close()
        if self._trial is not None:
            self._trial.cancel()
        if self._broken_off:
            await asyncio.wait(self._broken_off, timeout=CLOSE_S)
        await self.engine.close()

    async def _check(self) -> None:
        try:
            if not await self._probe() or self.leaving:
                return
            if not self.healthy:
                # It may be another server than before: another model, other limits.
                await self._learn()
            elif not self._loading:
                await self._look_at_weights()
                if self.weights.why_behind is not None:
                    self._take_out(f"behind: {self.weights.why_behind}")
                    self._nudge.set()
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
            self._trust.down()
            self._take_out(why)
        return why is None

    async def _learn(self) -> None:
        await self._learning.learn()
        self._failed_probe = False
        self._trust.back()
        self.detokenizes = True
        self.load.restarted()
        await self._look_at_weights()
        if self.weights.why_behind is not None:
            await self._catch_up()
        if self.weights.why_behind is not None:
            self._take_out(f"behind: {self.weights.why_behind}")
            return
        self.error = None
        self.healthy = True
        info = self.engine.info
        log.info("engine_healthy", engine=self.engine.url, **({} if info is None else {"model": info.model}))
        self._changed()

    def _take_out(self, why: str) -> None:
        was, before = self.healthy, self.error
        self.healthy = False
        self.error = why
        if was or why != before:
            log.warning("engine_unhealthy", engine=self.engine.url, error=why)
        if was:
            self._changed()
