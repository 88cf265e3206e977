"""The tasks that make rollouts and score groups, by (seq, attempt[, row]).

What always holds: a stopped task reports nothing; a task reports exactly once otherwise, whatever its part does: an
exception becomes a failed rollout or an unscored group, and is logged with its traceback. At most `STARTS` rollouts
begin in one pass of the event loop, in the order they were given, and none before what was stopped just now has ended
or `HOLD_S` has passed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping

import structlog

from rollout_service.core.group import Group
from rollout_service.core.model import (
    FailedRollout,
    FailureReason,
    FinishedRollout,
    Prompt,
    RolloutJob,
    ScoreJob,
    Scores,
    rollout_id,
)
from rollout_service.orchestrator.parts import Gate, RolloutRunner, Scorer

log = structlog.get_logger(__name__)

RolloutKey = tuple[int, int, int]
"""(seq, attempt, index)."""
Outcome = FinishedRollout | FailedRollout
STARTS = 8
"""Each sends a request at once. A thousand in one pass, after a mass cancel or for a trainer's first step, would hold
up every call and probe meanwhile; and where more completions come in than a core can take, beginning no more than this
in a pass is what keeps the passes short: the rest waits its turn here, and not in front of the trainer's calls."""

AHEAD_S = 0.05
"""How long the engines have to answer an abort call before tasks are cancelled. The call itself takes a vLLM server
some milliseconds; the answers of what it aborts follow, and what has not come by then loses its connection."""
HOLD_S = 0.25
"""How long new rollouts wait for stopped ones at most: those of a program may take their time. The others end at once,
and a thousand new requests in front of that would have stale tokens decoded meanwhile."""


class Work:
    """Owns every task that works for a group."""

    def __init__(
        self,
        runner: RolloutRunner,
        scorer: Scorer,
        gate: Gate,
        *,
        abort: Callable[[Collection[str]], Awaitable[None]],
        settled: Callable[[RolloutKey, Outcome, float], None],
        scored: Callable[[Group, ScoreJob, Scores], None],
    ) -> None:
        """`abort` has the engines abort what runs for rollouts, named by `rollout_id`."""
        self._runner, self._scorer, self._gate, self._abort = runner, scorer, gate, abort
        self._settled, self._scored = settled, scored
        self._rollouts: dict[RolloutKey, tuple[asyncio.Task[None], float]] = {}
        self._due: dict[RolloutKey, RolloutJob] = {}
        """To be started, the oldest first."""
        self._startable = STARTS
        """In this pass of the loop."""
        self._aborting: dict[str, asyncio.Task[None]] = {}
        """Stopped in this pass."""
        self._stopping: set[asyncio.Task[None]] = set()
        """What new rollouts wait for."""
        self._hold: asyncio.TimerHandle | None = None
        self._scorings: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def in_flight(self, seq: int, attempt: int, rows: Collection[int]) -> Mapping[int, float]:
        """Seconds since dispatch of those of `rows` that are in flight."""
        now = asyncio.get_running_loop().time()
        found = {row: self._rollouts.get((seq, attempt, row)) for row in rows}
        return {row: now - entry[1] for row, entry in found.items() if entry is not None}

    def start_rollouts(self, group: Group, rows: Collection[int], prompt: Prompt) -> None:
        for row in sorted(rows):
            key = (group.seq, group.attempt, row)
            if key in self._rollouts:
                continue
            self._due[key] = RolloutJob(
                group_id=group.group_id,
                attempt=group.attempt,
                index=row,
                policy_version=group.version or 0,
                prompt=prompt,
            )
        self._start_some()

    def _start_some(self) -> None:
        loop = asyncio.get_running_loop()
        while self._due and self._startable and not self._stopping:
            if self._startable == STARTS:
                loop.call_soon(self._next_pass)
            self._startable -= 1
            key = next(iter(self._due))
            self._rollouts[key] = (loop.create_task(self._roll(key, self._due.pop(key))), loop.time())

    def _next_pass(self) -> None:
        self._startable = STARTS
        self._start_some()

    def stop_rollouts(self, group: Group, rows: Collection[int]) -> int:
        """How many of `rows` had really been started."""
        stopped = 0
        for row in rows:
            key = (group.seq, group.attempt, row)
            self._due.pop(key, None)
            entry = self._rollouts.pop(key, None)
            if entry is not None:
                self._stopping.add(entry[0])
                entry[0].add_done_callback(self._stopped)
                self._ending.add(entry[0])  # nobody else refers to it any more
                entry[0].add_done_callback(self._ending.discard)
                if not self._aborting:
                    asyncio.get_running_loop().call_soon(self._abort_together)
                self._aborting[rollout_id(group.group_id, group.attempt, row)] = entry[0]
                stopped += 1
        if stopped and self._hold is None:
            self._hold = asyncio.get_running_loop().call_later(HOLD_S, self._go_on)
        return stopped

    def _abort_together(self) -> None:
        aborting, self._aborting = self._aborting, {}
        ending = asyncio.get_running_loop().create_task(self._end_at_engines(aborting), name="abort")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _end_at_engines(self, aborting: Mapping[str, asyncio.Task[None]]) -> None:
        """Abort at the engines first: that is one short call, and the tasks a thousand ends."""
        try:
            async with asyncio.timeout(AHEAD_S):
                await self._abort(aborting.keys())
        except TimeoutError:
            pass  # cancelling closes their connections, which aborts as well
        except Exception:  # a fault of ours; the tasks are cancelled all the same
            log.exception("abort_raised")
        finally:
            for task in aborting.values():
                task.cancel()

    def _stopped(self, task: asyncio.Task[None]) -> None:
        self._stopping.discard(task)
        if not self._stopping and self._hold is not None:
            self._go_on()

    def _go_on(self) -> None:
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None
        self._stopping.clear()
        self._start_some()

    def start_scoring(self, group: Group, job: Callable[[], Awaitable[ScoreJob | None]]) -> None:
        """`job` fetches what to score, inside the task; None: the group is scored no more, and nothing is reported."""
        key = (group.seq, group.attempt)
        self._scorings[key] = asyncio.get_running_loop().create_task(self._score(group, job))

    def stop_scoring(self, group: Group) -> None:
        task = self._scorings.pop((group.seq, group.attempt), None)
        if task is not None:
            self._end(task)

    async def stop_all(self, *, within_s: float) -> None:
        """Cancel everything and wait, `within_s` at most, until it has ended."""
        self._due.clear()
        for task in [*(task for task, _ in self._rollouts.values()), *self._scorings.values()]:
            self._end(task)
        for task in self._aborting.values():
            task.cancel()
        self._rollouts.clear()
        self._scorings.clear()
        if self._ending:
            await asyncio.wait(self._ending, timeout=within_s)

    def _end(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        self._ending.add(task)  # kept until it has ended: a task nobody refers to may be collected half-way
        task.add_done_callback(self._ending.discard)

    async def _roll(self, key: RolloutKey, job: RolloutJob) -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        outcome: Outcome
        try:
            outcome = await self._runner.run(job, self._gate)
        except asyncio.CancelledError:
            if not self._is_mine(key):
                raise
            outcome = _internal(job, "the rollout was cancelled by something other than this service")
        except Exception as error:
            log.exception("rollout_raised", group_id=job.group_id, attempt=job.attempt, index=job.index)
            outcome = _internal(job, repr(error))
        if self._is_mine(key):
            del self._rollouts[key]
            self._settled(key, outcome, clock() - started)

    def _is_mine(self, key: RolloutKey) -> bool:
        """Whether the running task is the one that works for `key`: after a reload another may have taken its place."""
        entry = self._rollouts.get(key)
        return entry is not None and entry[0] is asyncio.current_task()

    async def _score(self, group: Group, fetch: Callable[[], Awaitable[ScoreJob | None]]) -> None:
        key = (group.seq, group.attempt)
        job: ScoreJob | None = None
        try:
            job = await fetch()
            scores = Scores(rewards={}) if job is None else await self._scorer.score(job)
        except asyncio.CancelledError:
            if self._scorings.get(key) is not asyncio.current_task():
                raise
            scores = Scores(rewards={}, cancelled="scoring was cancelled by something other than this service")
        except Exception as error:
            log.exception("scoring_raised", group_id=group.group_id)
            scores = Scores(rewards={}, errors={"scoring": repr(error)})
            job = job or ScoreJob(group_id=group.group_id, attempt=group.attempt, prompt=_NO_PROMPT, rollouts=())
        if self._scorings.get(key) is not asyncio.current_task():
            return
        del self._scorings[key]
        if job is not None:
            self._scored(group, job, scores)


_NO_PROMPT = Prompt(prompt_id="", num_generations=1)
"""Of a group whose survivors could not be read: nobody scores it."""


def _internal(job: RolloutJob, error: str) -> FailedRollout:
    return FailedRollout(index=job.index, reason=FailureReason.INTERNAL, error=error)
