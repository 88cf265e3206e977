"""A rollout that a program makes: any number of turns, tools and environments between them.

What always holds: `run` gives a FinishedRollout or a FailedRollout and raises nothing but the cancellation of its own
task; when it ends, for whatever reason, the program's token is set, its engine requests are aborted, and nothing it
does later counts. An exception of the program costs its own rollout.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from rollout_service.core.model import (
    FORK_THRESHOLD_TOKENS,
    FailedRollout,
    FailureReason,
    FinishedRollout,
    Prompt,
    RolloutJob,
    agreed,
)
from rollout_service.engines import Deadline, Gate, GenerationFailed
from rollout_service.errors import RolloutServiceError
from rollout_service.loading import clean
from rollout_service.rollouts.cancellation import CancelToken, RolloutCancelled
from rollout_service.rollouts.context import Context, Record, ThreadContext
from rollout_service.rollouts.faults import ProgramFault
from rollout_service.rollouts.sampling import SamplingDefaults
from rollout_service.rollouts.single_turn import Engines
from rollout_service.rollouts.threads import NoThreads, Threads

log = structlog.get_logger(__name__)

Row = Mapping[str, Any]
AsyncProgram = Callable[[Context, Row], Awaitable[Any]]
ThreadProgram = Callable[[ThreadContext, Row], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What makes rollouts."""

    call: AsyncProgram | ThreadProgram
    in_thread: bool
    """A plain function, which blocks."""


MAX_COMPLETION = 4_000_000
"""Characters: several contexts full of text, and little enough for a lease of many."""
SUPERSEDED = "the rollout is no longer wanted: its group became stale, was cancelled, or the service ends"
TIMED_OUT = "the rollout ran past its deadline"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramSettings:
    """Limits of a program's rollouts."""

    rollout_timeout_s: float = 1800.0
    """From its start to its end; time spent at a closed gate, or waiting for a thread, does not count."""
    fork_threshold: int = FORK_THRESHOLD_TOKENS
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)


class ProgramRunner:
    """Makes rollouts by a program; implements the orchestrator's RolloutRunner.

    The program is given the context and the row: `prompt_id`, the prompt as `messages`, `prompt` or
    `prompt_token_ids`, and every column. It returns the completion that rewards see (messages or a text), or None for
    what its turns made.
    """

    def __init__(
        self,
        program: Program,
        *,
        engines: Engines,
        threads: Threads,
        settings: ProgramSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._program: Callable[[Any, Row], Any] = program.call
        self._in_thread = program.in_thread
        self._engines, self._threads, self._settings, self._clock = engines, threads, settings, clock
        self._left_behind: set[asyncio.Task[Any]] = set()
        """Programs that were told to end: a task nobody refers to may be collected half-way."""

    async def run(self, job: RolloutJob, gate: Gate) -> FinishedRollout | FailedRollout:
        """One rollout. Cancelling the task sets the program's token and aborts at the engine."""
        record, token = Record(), CancelToken()
        started = self._clock()
        try:
            completion = await self._made(job, gate, record, token)
            rollout = self._finished(job, record, completion, self._clock() - started)
            if job.prompt.token_ids is not None:
                return replace(rollout, prompt=await self._engines.prompt_text(job.prompt.token_ids))
            return rollout
        except ProgramFault as fault:
            return _failed(job, record, fault.reason, str(fault))
        except GenerationFailed as failed:
            reason = failed.reason
            if reason is FailureReason.PROMPT_TOO_LONG and record.answered:
                # It grew too long on the way: no reason to drop the other rollouts of the prompt.
                reason = FailureReason.REJECTED
            record.attempts += failed.attempts
            record.wasted_tokens += failed.wasted_tokens
            return _failed(job, record, reason, str(failed), failed.engine)
        except Exception as error:
            # A fault of ours ends this rollout only (design 3.2.9); it is counted as `internal`, and whoever mends it
            # needs the traceback.
            log.exception("rollout_internal_error", group_id=job.group_id, attempt=job.attempt, index=job.index)
            return _failed(job, record, FailureReason.INTERNAL, f"{type(error).__name__}: {error}")

    async def _made(self, job: RolloutJob, gate: Gate, record: Record, token: CancelToken) -> Any:
        """What the program returned. Raises ProgramFault, GenerationFailed."""
        timer = _Timer(gate, self._clock, self._settings.rollout_timeout_s)
        context = Context(
            job,
            engines=self._engines,
            gate=timer,
            remaining=timer.remaining,
            clock=self._clock,
            sampling=self._settings.sampling,
            token=token,
            record=record,
        )
        work = asyncio.get_running_loop().create_task(self._called(job, context, token, timer), name="program")
        try:
            while not work.done():
                left = timer.remaining()
                if left <= 0:
                    token.set(TIMED_OUT)
                    raise ProgramFault(TIMED_OUT, FailureReason.DEADLINE)
                await asyncio.wait({work}, timeout=left)
            if work.cancelled():
                raise ProgramFault("the program cancelled itself")
            return work.result()
        finally:
            token.set(SUPERSEDED)
            context.close()
            if not work.done():
                work.cancel()
                # Not waited for: a program may catch its cancellation, and the slot is wanted.
                self._left_behind.add(work)
                work.add_done_callback(self._has_ended)

    async def _called(self, job: RolloutJob, context: Context, token: CancelToken, timer: _Timer) -> Any:
        row = row_of(job.prompt)
        try:
            if not self._in_thread:
                timer.start()
                return await self._program(context, row)
            blocking = ThreadContext(context, token, asyncio.get_running_loop())
            name = f"rollout-{job.group_id}.{job.attempt}.{job.index}"
            return await self._threads.run(lambda: self._program(blocking, row), name=name, started=timer.start)
        except (GenerationFailed, ProgramFault):
            raise
        except NoThreads as error:
            raise ProgramFault(str(error), FailureReason.INTERNAL) from error
        except asyncio.CancelledError:
            raise
        except RolloutCancelled as over:
            raise ProgramFault(str(over)) from None
        except BaseExceptionGroup as group:
            if (known := _known(group)) is not None:
                raise known from group
            log.warning("program_raised", group_id=job.group_id, attempt=job.attempt, index=job.index, exc_info=group)
            raise ProgramFault(clean(f"the program raised {type(group).__name__}: {group}")) from group
        except RolloutServiceError as error:  # a sampling field that does not exist, for one
            raise ProgramFault(f"the program: {error}") from error
        except BaseException as error:  # SystemExit too: in a task it would end the service
            log.warning("program_raised", group_id=job.group_id, attempt=job.attempt, index=job.index, exc_info=error)
            raise ProgramFault(clean(f"the program raised {type(error).__name__}: {error}")) from error

    def _has_ended(self, work: asyncio.Task[Any]) -> None:
        self._left_behind.discard(work)
        if not work.cancelled():
            work.exception()  # looked at, so that asyncio does not complain that nobody did

    def _finished(self, job: RolloutJob, record: Record, completion: Any, seconds: float) -> FinishedRollout:
        turns = record.answered
        if not turns:
            raise ProgramFault("the program ended without a generation")
        prompt = job.prompt
        metrics = {
            "completion_tokens": float(sum(len(turn.output_ids) for turn in turns)),
            "prompt_tokens": float(len(turns[0].prompt_ids)),
            "turns": float(len(turns)),
            "duration_s": seconds,
            "attempts": float(record.attempts),
            "wasted_tokens": float(record.wasted_tokens),
        }
        return FinishedRollout(
            index=job.index,
            prompt=prompt.messages if prompt.messages is not None else prompt.text,
            completion=_completion(prompt, record, completion),
            turns=turns,
            metrics=metrics | {name: value for name, value in record.metrics.items() if math.isfinite(value)},
            logprobs_mode=record.logprobs_mode,
            sampling=agreed(record.samplings),
            reward=record.reward,
            fork_threshold=self._settings.fork_threshold,
        )


class _Timer:
    """The gate, and a deadline that stands still while somebody waits at it."""

    def __init__(self, gate: Gate, clock: Callable[[], float], seconds: float) -> None:
        self._gate, self._clock, self._seconds = gate, clock, seconds
        self._deadline: Deadline | None = None
        self._waiting = 0
        self._since = 0.0

    def start(self) -> None:
        self._deadline = Deadline(self._clock, self._seconds)

    def remaining(self) -> float:
        """Seconds left; all of them before the start and while the gate is closed."""
        if self._deadline is None:
            return self._seconds
        standing = self._clock() - self._since if self._waiting else 0.0
        return self._deadline.remaining() + standing

    async def passed(self) -> float:
        if not self._waiting:
            self._since = self._clock()
        self._waiting += 1
        try:
            return await self._gate.passed()
        finally:
            self._waiting -= 1
            if not self._waiting and self._deadline is not None:
                self._deadline.extend(self._clock() - self._since)


def row_of(prompt: Prompt) -> dict[str, Any]:
    """The dataset row a program is given; columns never hide the prompt's own fields."""
    row: dict[str, Any] = {**prompt.columns, "prompt_id": prompt.prompt_id, "epoch": prompt.epoch}
    if prompt.messages is not None:
        row["messages"] = [dict(message) for message in prompt.messages]
    elif prompt.text is not None:
        row["prompt"] = prompt.text
    elif prompt.token_ids is not None:
        row["prompt_token_ids"] = prompt.token_ids.tolist()
    return row


def _known(group: BaseExceptionGroup[BaseException]) -> GenerationFailed | ProgramFault | None:
    """What a TaskGroup of `ctx` calls failed of, where it was nothing else than engines and the rollout's end."""
    leaves: list[BaseException] = []
    todo: list[BaseException] = [group]
    while todo:
        error = todo.pop()
        if isinstance(error, BaseExceptionGroup):
            todo.extend(error.exceptions)
        else:
            leaves.append(error)
    if not all(isinstance(leaf, GenerationFailed | RolloutCancelled) for leaf in leaves):
        return None
    failed = next((leaf for leaf in leaves if isinstance(leaf, GenerationFailed)), None)
    return failed if failed is not None else ProgramFault(str(leaves[0]))


def _completion(prompt: Prompt, record: Record, returned: Any) -> Sequence[Mapping[str, Any]] | str:
    """What rewards see: what the program returned, else what its turns made of the prompt."""
    if isinstance(returned, str):
        text: str = _plain(returned)
        return [{"role": "assistant", "content": text}] if prompt.messages is not None else text
    if returned is not None:
        if not isinstance(returned, Sequence) or not all(isinstance(message, Mapping) for message in returned):
            raise ProgramFault(f"the program returned {type(returned).__name__}, no text, list of messages or None")
        messages: list[dict[str, Any]] = _plain([dict(message) for message in returned])
        return messages
    turns = record.answered
    if prompt.messages is None:
        return "".join(turn.text for turn in turns)
    last = dict(turns[-1].message or {"role": "assistant", "content": turns[-1].text})
    history = record.last_messages or ()
    asked = [dict(message) for message in prompt.messages]
    made = [*history[len(asked) :], last] if list(history[: len(asked)]) == asked else [last]
    plain: list[dict[str, Any]] = _plain(made)
    return plain


def _plain(value: Any) -> Any:
    """`value` as the JSON of the store and of leases: what is none there costs this rollout, not the run."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ProgramFault(clean(f"the completion is not JSON: {error}")) from error
    if len(text) > MAX_COMPLETION:
        raise ProgramFault(f"the completion has {len(text)} characters, more than {MAX_COMPLETION}")
    return json.loads(clean(text, MAX_COMPLETION))


def _failed(
    job: RolloutJob, record: Record, reason: FailureReason, error: str, engine: str | None = None
) -> FailedRollout:
    made = sum(len(turn.output_ids) for turn in record.answered)
    return FailedRollout(
        index=job.index,
        reason=reason,
        error=error[:2_000],
        engine=engine,
        attempts=record.attempts,
        wasted_tokens=record.wasted_tokens + made,
    )
