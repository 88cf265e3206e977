"""Parts that make a whole service in memory: a runner and a scorer that do what a test says, engines, a clock.

They satisfy the Protocols of rollout_service.orchestrator.parts; nothing is mocked, and they
record what they were asked.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_service.core.changes import Bumped, Halt, Moved
from rollout_service.core.group import Group, GroupPolicy, Lease
from rollout_service.core.model import (
    FailedRollout,
    FailureReason,
    FinishedRollout,
    FinishReason,
    Prompt,
    RolloutJob,
    ScoreJob,
    Scores,
    Turn,
)
from rollout_service.core.scheduler import Policy
from rollout_service.core.scoring import ScoringRules
from rollout_service.orchestrator import Orchestrator, Rules, Submission
from rollout_service.orchestrator.parts import Gate


def finished(index: int, *, ids: Sequence[int] = (1, 2, 3), text: str = "abc") -> FinishedRollout:
    """A survivor of one turn."""
    turn = Turn(
        prompt_ids=array("i", (7, 8)),
        output_ids=array("i", ids),
        logprobs=array("f", (-0.5,) * len(ids)),
        finish_reason=FinishReason.STOP,
        text=text,
        engine="http://engine",
    )
    return FinishedRollout(index=index, prompt="p", completion=text, turns=(turn,))


def failed(
    index: int, *, reason: FailureReason = FailureReason.REJECTED, error: str = "unlucky prompt 4711"
) -> FailedRollout:
    return FailedRollout(index=index, reason=reason, error=error, engine="http://engine", attempts=1)


def prompt(key: str, n: int = 4, *, epoch: int = 0, **columns: Any) -> Prompt:
    return Prompt(prompt_id=key, epoch=epoch, text=f"p:{key};", num_generations=n, columns=columns)


def submission(key: str, n: int = 4, *, epoch: int = 0, **columns: Any) -> Submission:
    row = prompt(key, n, epoch=epoch, **columns)
    return Submission(prompt=row, digest=repr(row.columns).encode())


@dataclass
class Runner:
    """Holds every rollout until the test answers it, unless `answer` says what to do at once."""

    answer: Callable[[RolloutJob], FinishedRollout | FailedRollout | None] = lambda job: None
    jobs: list[RolloutJob] = field(default_factory=list)
    held: dict[tuple[str, int, int], asyncio.Future[Any]] = field(default_factory=dict)
    cancelled: list[RolloutJob] = field(default_factory=list)

    async def run(self, job: RolloutJob, gate: Gate) -> FinishedRollout | FailedRollout:
        await gate.passed()
        self.jobs.append(job)
        outcome = self.answer(job)
        if outcome is not None:
            await asyncio.sleep(0)
            return outcome
        key = (job.group_id, job.attempt, job.index)
        self.held[key] = future = asyncio.get_running_loop().create_future()
        try:
            result: FinishedRollout | FailedRollout = await future
            return result
        except asyncio.CancelledError:
            self.cancelled.append(job)
            raise
        finally:
            del self.held[key]

    def release(self, match: str | None = None) -> int:
        """Finish what is held (of the group `match`); how many."""
        keys = [key for key, future in self.held.items() if match in (None, key[0]) and not future.done()]
        for key in keys:
            self.held[key].set_result(finished(key[2]))
        return len(keys)


@dataclass
class Scorer:
    """Scores row i with i, unless `answer` says otherwise (raising what it raises)."""

    answer: Callable[[ScoreJob], Scores] = lambda job: Scores(
        rewards={"accuracy": [float(r.index) for r in job.rollouts]}
    )
    jobs: list[ScoreJob] = field(default_factory=list)
    hold: asyncio.Event | None = None

    async def score(self, job: ScoreJob) -> Scores:
        self.jobs.append(job)
        if self.hold is not None:
            await self.hold.wait()
        return self.answer(job)


@dataclass
class Engines:
    capacity: int = 10_000
    aborted: list[str] = field(default_factory=list)

    async def abort(self, rollouts: Collection[str]) -> None:
        self.aborted.extend(rollouts)

    def healthy_capacity(self) -> int:
        return self.capacity

    def unhealthy(self) -> dict[str, str]:
        return {} if self.capacity else {"http://engine": "refused"}


@dataclass
class Clock:
    """Wall-clock time a test moves by hand."""

    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Recorder:
    """An Observer that keeps what it was told."""

    moves: list[Moved] = field(default_factory=list)
    settled: list[FinishedRollout | FailedRollout] = field(default_factory=list)
    aborted: int = 0
    wasted: list[tuple[int, str]] = field(default_factory=list)
    delivered: list[dict[str, Any]] = field(default_factory=list)
    leases_ended: list[Lease] = field(default_factory=list)
    halts: list[Halt] = field(default_factory=list)
    versions: list[Bumped] = field(default_factory=list)
    commits: int = 0
    failures: list[str] = field(default_factory=list)

    def group_moved(self, moved: Moved) -> None:
        self.moves.append(moved)

    def rollout_settled(self, outcome: FinishedRollout | FailedRollout, seconds: float, *, group_id: str) -> None:
        self.settled.append(outcome)

    def rollouts_aborted(self, count: int) -> None:
        self.aborted += count

    def tokens_wasted(self, tokens: int, reason: str) -> None:
        self.wasted.append((tokens, reason))

    def group_delivered(self, group: Group, *, staleness: int, tokens: int, reward_mean: float | None) -> None:
        self.delivered.append({"staleness": staleness, "tokens": tokens, "reward_mean": reward_mean})

    def lease_ended(self, lease: Lease, seconds: float) -> None:
        self.leases_ended.append(lease)

    def version_posted(self, bumped: Bumped) -> None:
        self.versions.append(bumped)

    def halted(self, halt: Halt) -> None:
        self.halts.append(halt)

    def committed(self, seconds: float) -> None:
        self.commits += 1

    def commit_failed(self, error: str) -> None:
        self.failures.append(error)


@dataclass
class Harness:
    """An orchestrator on fakes and the given store."""

    store: Any
    policy: Policy = field(default_factory=lambda: Policy(group=GroupPolicy(), slots=16))
    scoring: ScoringRules = field(default_factory=lambda: ScoringRules(weights={"accuracy": 1.0}))
    engine_wait_s: float = 300.0
    runner: Runner = field(default_factory=Runner)
    scorer: Scorer = field(default_factory=Scorer)
    engines: Engines = field(default_factory=Engines)
    observer: Recorder = field(default_factory=Recorder)
    clock: Clock = field(default_factory=Clock)
    steady: Clock | None = None
    """Else `clock`."""
    source: Any = None
    digest: Any = None

    def __post_init__(self) -> None:
        ids = iter(range(1, 10**9))
        self.door = Orchestrator(
            Rules(policy=self.policy, scoring=self.scoring, engine_wait_s=self.engine_wait_s),
            store=self.store,
            runner=self.runner,
            scorer=self.scorer,
            engines=self.engines,
            observer=self.observer,
            source=self.source,
            digest=self.digest,
            clock=self.clock,
            steady=self.steady or self.clock,
            new_id=lambda: f"lease-{next(ids)}-{id(self)}",
        )

    async def __aenter__(self) -> Orchestrator:
        await self.door.start()
        return self.door

    async def __aexit__(self, *_: object) -> None:
        await self.door.stop()


async def passes(count: int = 50) -> None:
    """Let everything run that can: what has not happened by then waits for something."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], Any], what: str = "condition", within_s: float = 5.0) -> Any:
    """The first true value of `condition()`, looked at every pass of the loop."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not (value := condition()):
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not within {within_s} s: {what}")
        await asyncio.sleep(0.001)
    return value
