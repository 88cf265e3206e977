"""The door of this room: a group's survivors in, what every reward said of them out.

`score` raises nothing but its caller's cancellation (or that of `stop`). The rewards of a group run at the same time. A
reward that fails scored nobody in this group, and only in this group: it is named, counted and logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import httpx
import structlog

from rollout_service.core.model import ScoreJob, Scores
from rollout_service.errors import ConfigError
from rollout_service.loading import LoadedFunction, load_first_in
from rollout_service.rewards.fields import FIELDS, GroupFields
from rollout_service.rewards.kinds import AsyncFunction, Reward, SyncFunction, Webhook
from rollout_service.rewards.outcome import Outcome, outcome_of_error
from rollout_service.rewards.pool import WorkerPool
from rollout_service.rewards.spec import RewardSpec
from rollout_service.rewards.wire import Setup

START_TIMEOUT_S = 300.0
"""For a worker's imports: a cold disk and a large library take a minute, a hung network mount for ever."""


def webhook_client() -> httpx.AsyncClient:
    """A client for webhooks. Each reward has its own deadline, and a redirect would send texts somewhere else."""
    # Idle connections are let go well before the 5 s after which common servers close them under a request.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
    return httpx.AsyncClient(timeout=None, follow_redirects=False, limits=limits, trust_env=False)  # noqa: S113 - `Webhook` bounds each call


class RewardScorer:
    """Scores groups with the rewards of `specs`; implements the orchestrator's Scorer.

    `processes` workers run sync functions, one more is warm; `path` goes in front of sys.path for the functions'
    modules; `on_error` is called with the reward's name for every group it failed on.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        *,
        processes: int,
        path: Sequence[str] = (),
        on_error: Callable[[str], None] = lambda name: None,
        client_factory: Callable[[], httpx.AsyncClient] = webhook_client,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        names = [spec.name for spec in specs]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f'reward "{name}" is there twice; names must differ')
        if processes < 1:
            raise ConfigError("reward_workers.processes must be at least 1")
        self._specs = tuple(specs)
        self._processes = processes
        self._path = list(path)
        self._on_error = on_error
        self._client_factory = client_factory
        self._start_timeout_s = start_timeout_s
        self._rewards: list[tuple[str, Reward]] = []
        self._pool: WorkerPool | None = None
        self._client: httpx.AsyncClient | None = None
        self._hidden_columns: set[str] = set()
        self._stopped = False

    async def start(self) -> None:
        """Imports every function, in the workers and, where async, here. Raises ConfigError: one line, nothing runs."""
        rewards: dict[str, Reward] = {}
        for spec in self._specs:
            if spec.url:
                rewards[spec.name] = Webhook(self._client_for(spec.name, spec.url), spec.url, spec.timeout_s)
        try:
            rewards |= await self._start_functions()
        except BaseException:
            await self.stop()
            raise
        self._rewards = [(spec.name, rewards[spec.name]) for spec in self._specs]

    async def stop(self) -> None:
        """Kills the workers and closes connections. Scoring under way is cancelled: it must not settle a group."""
        self._stopped = True
        for _, reward in self._rewards:
            if isinstance(reward, AsyncFunction):
                reward.stop()
        if self._pool is not None:
            await self._pool.stop()
            self._pool = None
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def score(self, job: ScoreJob) -> Scores:
        """Values of every reward for the job's rollouts, in their order."""
        n = len(job.rollouts)
        if n == 0:
            return Scores(rewards={name: [] for name, _ in self._rewards})
        self._warn_of_hidden_columns(job)
        group = GroupFields(job)
        if len(self._rewards) == 1:
            outcomes = [await self._evaluate(self._rewards[0][1], group)]
        else:
            outcomes = await asyncio.gather(*(self._evaluate(reward, group) for _, reward in self._rewards))
        if self._stopped:  # what failed now failed because of the shutdown
            raise asyncio.CancelledError
        values: dict[str, Sequence[float | None]] = {}
        errors: dict[str, str] = {}
        cancelled: str | None = None
        for (name, _), outcome in zip(self._rewards, outcomes, strict=True):
            values[name] = outcome.values if outcome.values is not None else [None] * n
            if outcome.error is not None:
                errors[name] = outcome.error
                self._on_error(name)
                self._log("reward_failed", name, job, outcome.error, outcome.traceback)
            elif outcome.cancelled is not None:
                cancelled = cancelled or f"{name}: {outcome.cancelled}"
                self._log("reward_cancelled", name, job, outcome.cancelled, outcome.traceback)
        return Scores(rewards=values, errors=errors, cancelled=cancelled)

    async def _evaluate(self, reward: Reward, group: GroupFields) -> Outcome:
        try:
            return await reward.evaluate(group)
        except Exception as error:
            return outcome_of_error(error)

    async def _start_functions(self) -> dict[str, Reward]:
        specs = [(spec, spec.function) for spec in self._specs if spec.function]
        if not specs:
            return {}
        setup = Setup(path=self._path, functions=[(spec.name, function) for spec, function in specs])
        pool = WorkerPool(processes=self._processes, setup=setup, start_timeout_s=self._start_timeout_s)
        self._pool = pool
        is_async = (await pool.start()).is_async
        rewards: dict[str, Reward] = {}
        for number, (spec, function) in enumerate(specs):
            if is_async[number]:
                rewards[spec.name] = AsyncFunction(self._load_here(spec.name, function), spec.timeout_s)
            else:
                rewards[spec.name] = SyncFunction(pool, number, spec.timeout_s)
        if all(is_async):
            await pool.stop()
        return rewards

    def _load_here(self, name: str, function: str) -> LoadedFunction:
        return load_first_in(self._path, f'reward "{name}"', function)  # as the workers have it

    def _client_for(self, name: str, url: str) -> httpx.AsyncClient:
        try:
            usable = httpx.URL(url).scheme in ("http", "https") and bool(httpx.URL(url).host)
        except httpx.InvalidURL:
            usable = False
        if not usable:
            raise ConfigError(f'reward "{name}": url is not an http or https address')
        if self._client is None:
            self._client = self._client_factory()
        return self._client

    def _warn_of_hidden_columns(self, job: ScoreJob) -> None:
        for name in FIELDS.intersection(job.prompt.columns) - self._hidden_columns:
            self._hidden_columns.add(name)
            structlog.get_logger(__name__).warning(
                "reward_column_left_out", column=name, group_id=job.group_id, reason="rewards get a field of this name"
            )

    def _log(self, event: str, reward: str, job: ScoreJob, error: str, traceback: str | None) -> None:
        log = structlog.get_logger(__name__)
        log.warning(event, reward=reward, group_id=job.group_id, attempt=job.attempt, error=error, traceback=traceback)
