"""Wiring and lifespan, nothing else. Nothing is made at import time.

What always holds: parts start in the order scorer, engines, orchestrator and stop in reverse, but that a replica reads
the run's engines before it contacts any; a start that fails stops what had started; starting or stopping twice does it
once; a stop is bounded in time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import structlog
from fastapi import FastAPI

from rollout_service.api import Access, Context, EngineCalls, Viewers, build_api
from rollout_service.collector import Collector
from rollout_service.engines import CacheSalt, EngineSpec, Fleet, FleetSettings
from rollout_service.errors import ConfigError
from rollout_service.keys import KeyEntry, Keys, Role
from rollout_service.loading import load_first_in
from rollout_service.metrics import Metrics
from rollout_service.observers import History, Observers, OutcomeLog
from rollout_service.orchestrator import PolicyUpdates, RolloutRunner
from rollout_service.orchestrator.parts import Observer
from rollout_service.prompts import PromptFile, row_rules
from rollout_service.replicas import ReplicaOrchestrator
from rollout_service.rewards import RewardScorer, RewardSpec
from rollout_service.rollouts import (
    Engines,
    Program,
    ProgramRunner,
    ProgramSettings,
    SamplingDefaults,
    SingleTurn,
    SingleTurnSettings,
    Threads,
    ToolBox,
    load_tools,
    openenv_program,
    tool_program,
)
from rollout_service.run import make_orchestrator
from rollout_service.settings import Settings
from rollout_service.teachers import TeacherScorer, TeacherSpec
from rollout_service.tracing import open_tracing

STOP_ORCHESTRATOR_S = 6.0
"""Aborting at the engines and the last commit; a stop as a whole has 10 s."""
STOP_PART_S = 1.0

log = structlog.get_logger(__name__)


class Parts:
    """Everything a service is made of."""

    def __init__(self, settings: Settings, config_dir: Path | None = None) -> None:
        """Checks and opens what needs no event loop and no engine. Raises ConfigError."""
        self.settings = settings
        self.metrics = Metrics(
            rewards=[reward.name for reward in settings.rewards],
            teachers=[teacher.id for teacher in settings.teachers],
            samples_alone=settings.mode == "distillation",
        )
        self.tracing = tracing = open_tracing(settings.tracing.endpoint, settings.tracing.sample_ratio)
        self.source = open_prompts(settings)
        self.scorer = with_teachers(settings, make_scorer(settings, config_dir, self.metrics), self.metrics)
        self.fleet = Fleet(
            _engine_specs(settings),
            _fleet_settings(settings),
            events=self.metrics,
            on_change=self._engines_changed,
            version=lambda: self.orchestrator.version,
            cache_salt=CacheSalt(lambda: self.orchestrator.version, lambda: self.orchestrator.version_returns)
            if settings.dispatch.cache_salt
            else lambda: None,
            tracer=None if tracing is None else tracing.calls,
            kept_out=self._kept_out if settings.store.shared else None,
        )
        self.threads = Threads(settings.program.threads, grace_s=settings.program.grace_s)
        self.keys = load_keys(settings)
        self.history = History(time.time)
        self.viewers = Viewers()
        runner = make_runner(settings, config_dir, self.fleet, self.threads)
        self._collector = Collector()
        observers: list[Observer] = [self.metrics, self.history, OutcomeLog(), self._collector]
        if tracing is not None:
            runner = tracing.runner(runner)
            observers.append(tracing.observer)
        self.orchestrator = make_orchestrator(
            settings,
            runner=runner,
            scorer=self.scorer,
            fleet=self.fleet,
            observer=Observers(*observers),
            source=self.source,
        )
        self.replica = self.orchestrator if isinstance(self.orchestrator, ReplicaOrchestrator) else None
        self._shared = None if self.replica is None else self.replica.shared_engines
        self.engine_calls: EngineCalls = self._shared or self.fleet
        self.updates = PolicyUpdates(self.orchestrator, self.fleet, allowed_paths=settings.weights.allowed_paths)
        self.metrics.watch(self.orchestrator.status, self.fleet, self.threads.counts)
        self._background: list[asyncio.Task[None]] = []
        self._said_keys: str | None = None
        self._started = self._opened = self._orchestrating = False

    def _engines_changed(self) -> None:
        # Before the orchestrator has read its store there is nothing it could dispatch, and nothing it may.
        if self._orchestrating:
            self.orchestrator.engines_changed()

    def _kept_out(self, url: str) -> bool:
        return self._shared is not None and self._shared.keeps_out(url)

    async def start(self) -> None:
        """Raises ConfigError where the configuration does not fit what it names."""
        if self._started:
            return
        self._started = True
        try:
            await self.scorer.start()
            if self.replica is not None:  # an engine that was removed must not keep it from starting
                self._opened = True
                await self.replica.prepare()
            await self.fleet.start()
            self._opened = True
            await self.orchestrator.start()
        except BaseException:
            await self.stop()
            raise
        self._orchestrating = True
        self.orchestrator.engines_changed()
        self._background = [
            asyncio.create_task(self.metrics.measure_lag(), name="event-loop-lag"),
            asyncio.create_task(self._every_second(), name="every-second"),
            asyncio.create_task(self._collector.run(), name="collector"),
        ]

    async def _every_second(self) -> None:
        """What nobody tells us: whether engines get work, and whether the keys are others."""
        while True:
            try:
                engines = self.fleet.describe()
                self.history.tick({e["url"]: None if e["healthy"] else e["error"] or "not healthy" for e in engines})
                await self._read_keys()
            except Exception:  # what one second met must not keep keys from being revoked in the next
                log.exception("every_second_raised")
            await asyncio.sleep(1.0)

    async def _read_keys(self) -> None:
        try:
            if await asyncio.to_thread(self.keys.reload):
                count = len(self.keys.ring.entries)
                (log.info if count else log.warning)("keys_read_again", keys=count)
            self._said_keys = None
        except ConfigError as error:  # the old keys go on; said once, for it comes back every second
            if self._said_keys != str(error):
                log.error("keys_unreadable", error=str(error))
                self._said_keys = str(error)

    async def stop_work(self) -> None:
        """Dispatch ends, waiting callers are answered, in flight is aborted, state is committed."""
        self._orchestrating = False
        self.viewers.close()
        if self._opened:
            self._opened = False
            await asyncio.gather(
                _within(STOP_PART_S, "weight updates", self.updates.stop()),
                _within(STOP_PART_S, "engine changes", self.fleet.end_changes()),
            )
            await _within(STOP_ORCHESTRATOR_S, "orchestrator", self.orchestrator.stop())

    async def stop(self) -> None:
        """Everything, within 10 seconds."""
        if not self._started:
            return
        self._started = False
        await self.stop_work()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        endings = [
            _within(STOP_PART_S, "engines", self.fleet.stop()),
            _within(STOP_PART_S, "rewards", self.scorer.stop()),
        ]
        if self.tracing is not None:
            endings.append(_within(STOP_PART_S, "traces", self.tracing.stop()))
        await asyncio.gather(*endings)
        if self.source is not None:
            self.source.close()


def create_app(settings: Settings, parts: Parts) -> FastAPI:
    """The service over `parts`, which its lifespan starts and stops."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await parts.start()
        try:
            yield
        finally:
            await parts.stop()

    context = Context(
        settings=settings,
        orchestrator=parts.orchestrator,
        updates=parts.updates,
        fleet=parts.fleet,
        engine_calls=parts.engine_calls,
        metrics=parts.metrics,
        access=Access(parts.keys, allowed_hosts=settings.server.allowed_hosts, any_host=settings.server.insecure),
        history=parts.history,
        viewers=parts.viewers,
        threads=parts.threads.counts,
    )
    return build_api(context, lifespan)


def load_keys(settings: Settings) -> Keys:
    """The API keys. Raises ConfigError, also where there is none and strangers can reach the address."""
    server = settings.server
    inline = [KeyEntry(name=key.name, role=Role(key.role), hash=key.hash) for key in server.keys]
    try:
        keys = Keys(inline, Path(server.keys_file) if server.keys_file else None)
    except ConfigError as error:
        raise ConfigError(f"server.keys_file: {error}") from None
    if keys.required and not keys.ring:
        raise ConfigError(f"server.keys_file: {server.keys_file} has no key; nobody could call anything")
    return keys


def open_prompts(settings: Settings) -> PromptFile | None:
    """The dataset, every row checked. Raises ConfigError."""
    if not settings.prompts.path:
        return None
    return PromptFile.open(
        settings.prompts.path,
        epochs=settings.prompts.epochs,
        shuffle_seed=settings.prompts.shuffle_seed,
        **row_rules(settings),
    )


def load_program(settings: Settings, config_dir: Path | None, threads: Threads) -> Program | None:
    """What makes a rollout of many turns; None: one turn does. Raises ConfigError."""
    program = settings.program
    if program.target:
        loaded = load_first_in(_path(config_dir), "program.target", program.target)
        return Program(call=loaded.call, in_thread=not loaded.is_async)
    if program.tools:
        tools = ToolBox(load_tools(program.tools, _path(config_dir)), threads=threads, timeout_s=program.tool_timeout_s)
        return Program(call=tool_program(tools, max_turns=program.max_turns), in_thread=False)
    if program.openenv:
        mapping = {
            name: load_first_in(_path(config_dir), f"program.openenv_{name}", target).call
            for name, target in (("action", program.openenv_action), ("observation", program.openenv_observation))
            if target
        }
        episodes = openenv_program(
            program.openenv,
            max_turns=program.max_turns,
            step_timeout_s=program.tool_timeout_s,
            reward=program.openenv_reward,
            seed_by=program.openenv_seed_by,
            **mapping,
        )
        return Program(call=episodes, in_thread=False)
    return None


def make_scorer(settings: Settings, config_dir: Path | None, metrics: Metrics) -> RewardScorer:
    """The rewards; their modules are looked for in `config_dir` first. Raises ConfigError."""
    return RewardScorer(
        [
            RewardSpec(
                name=reward.name,
                function=reward.function or None,
                url=reward.url or None,
                weight=reward.weight,
                timeout_s=reward.timeout_s,
            )
            for reward in settings.rewards
        ],
        processes=settings.reward_workers.processes,
        path=_path(config_dir),
        on_error=metrics.reward_error,
    )


def with_teachers(settings: Settings, rewards: RewardScorer, metrics: Metrics) -> RewardScorer | TeacherScorer:
    """The rewards alone, or in distillation beside the teachers."""
    if settings.mode != "distillation":
        return rewards
    specs = [
        TeacherSpec(
            id=teacher.id,
            url=teacher.url,
            model=teacher.model,
            top_k=teacher.top_k,
            max_inflight=teacher.max_inflight,
            timeout_s=teacher.timeout_s,
            max_attempts=teacher.max_attempts,
            api_key=os.environ.get(teacher.api_key_env, ""),
        )
        for teacher in settings.teachers
    ]
    return TeacherScorer(specs, rewards=rewards, on_error=metrics.teacher_error, wait_s=settings.dispatch.engine_wait_s)


def _path(config_dir: Path | None) -> list[str]:
    """Where modules of the user's are looked for first."""
    return [] if config_dir is None else [str(config_dir)]


def _engine_specs(settings: Settings) -> list[EngineSpec]:
    return [
        EngineSpec(
            url=engine.url,
            max_inflight=engine.max_inflight,
            ceiling=engine.max_inflight_ceiling,
            api_key=os.environ.get(engine.api_key_env, ""),
        )
        for engine in settings.engines
    ]


def _fleet_settings(settings: Settings) -> FleetSettings:
    dispatch, sampling = settings.dispatch, settings.sampling
    return FleetSettings(
        model=settings.model,
        max_attempts=dispatch.max_attempts,
        request_timeout_s=dispatch.request_timeout_s,
        engine_wait_s=dispatch.engine_wait_s,
        probe_interval_s=dispatch.probe_interval_s,
        temperature=sampling.temperature,
        allow_raw_logprobs=sampling.allow_raw_logprobs,
        weights_timeout_s=settings.weights.timeout_s,
        adapters_kept=settings.groups.max_staleness + 2,
        addable=settings.registration.patterns,
        max_engines=max(settings.registration.max_engines, len(settings.engines)),
        discovery_interval_s=settings.discovery.interval_s,
        discovery_drain_s=settings.discovery.drain_s,
        ids_by_address=settings.store.shared,
        added_api_key=os.environ.get(settings.registration.api_key_env, ""),
    )


def make_runner(settings: Settings, config_dir: Path | None, engines: Engines, threads: Threads) -> RolloutRunner:
    """How rollouts are made; the program's module is looked for in `config_dir` first. Raises ConfigError."""
    sampling = settings.sampling
    defaults = SamplingDefaults(**sampling.request_fields(), seed_per_attempt=sampling.seed_per_attempt or None)
    program = load_program(settings, config_dir, threads)
    if program is None:
        limits = SingleTurnSettings(rollout_timeout_s=settings.dispatch.rollout_timeout_s, sampling=defaults)
        return SingleTurn(engines, limits)
    return ProgramRunner(
        program,
        engines=engines,
        threads=threads,
        settings=ProgramSettings(
            rollout_timeout_s=settings.dispatch.rollout_timeout_s,
            fork_threshold=settings.program.fork_threshold_tokens,
            sampling=defaults,
        ),
    )


async def _within(seconds: float, what: str, ending: Awaitable[None]) -> None:
    """Wait for `ending`; a part that hangs or fails must not keep the others from ending."""
    try:
        async with asyncio.timeout(seconds):
            await ending
    except TimeoutError:
        log.error("stop_timed_out", part=what, after_s=seconds)
    except Exception:
        log.exception("stop_failed", part=what)
