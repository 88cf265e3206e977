"""What a program is given: generation through the engines of the run, and places to leave what it found out.

What always holds: every generation a program makes is recorded with the tokens the engine sampled, in the order the
calls began; a call made after the rollout is over raises RolloutCancelled and reaches no engine.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rollout_service.core.group import group_seq
from rollout_service.core.model import FinishReason, RolloutJob, Turn
from rollout_service.engines import Answer, Deadline, Gate, GenerateRequest
from rollout_service.loading import clean
from rollout_service.rollouts.cancellation import CancelToken, RolloutCancelled
from rollout_service.rollouts.sampling import SamplingDefaults, effective_sampling
from rollout_service.rollouts.single_turn import Engines

T = TypeVar("T")

MAX_NAME = 128
MAX_METRICS = 256
"""Enough for people; a program that names them by its data would fill the store."""

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One generation, as the program sees it."""

    text: str
    """The engine's own text of the completion."""
    message: dict[str, Any]
    """`{"role": "assistant", "content": …}`, with `tool_calls` where the policy made some: append it to the history."""
    ids: list[int]
    """(T,) the sampled token ids."""
    logprobs: list[float]
    """(T,) theirs."""
    prompt_ids: list[int]
    """(P,) the ids the engine read."""
    finish_reason: FinishReason

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return self.message.get("tool_calls") or []

    @property
    def truncated(self) -> bool:
        """Cut by max_tokens or the context."""
        return self.finish_reason is FinishReason.LENGTH


@dataclass(kw_only=True, slots=True)
class Record:
    """What one rollout has made so far."""

    samplings: list[Mapping[str, Any]] = field(default_factory=list)
    """What was asked for, of every generation that was answered."""
    turns: list[Turn | None] = field(default_factory=list)
    """By the order in which the calls began; None: not answered yet, or failed."""
    last_messages: Messages | None = None
    """The history of the chat call that was answered last, without its answer."""
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    attempts: int = 0
    wasted_tokens: int = 0
    logprobs_mode: str | None = None

    @property
    def answered(self) -> tuple[Turn, ...]:
        return tuple(turn for turn in self.turns if turn is not None)


class Context:
    """For `async def` programs."""

    def __init__(
        self,
        job: RolloutJob,
        *,
        engines: Engines,
        gate: Gate,
        remaining: Callable[[], float],
        clock: Callable[[], float],
        sampling: SamplingDefaults,
        token: CancelToken,
        record: Record,
    ) -> None:
        """`remaining`: seconds the rollout has left."""
        self._job, self._engines, self._gate = job, engines, gate
        self._remaining, self._clock = remaining, clock
        self._sampling, self._token, self._record = sampling, token, record
        self._open: set[asyncio.Task[Answer]] = set()

    @property
    def group_id(self) -> str:
        return self._job.group_id

    @property
    def attempt(self) -> int:
        return self._job.attempt

    @property
    def index(self) -> int:
        """Row of the rollout in its group, 0-based."""
        return self._job.index

    @property
    def policy_version(self) -> int:
        """The group's."""
        return self._job.policy_version

    @property
    def cancelled(self) -> bool:
        """Whether the rollout is over: what it makes from here on is not used."""
        return self._token.reason is not None

    async def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Reply:
        """The policy's answer to `messages`. `tools`: their schemas, as the OpenAI API takes them.

        `sampling`: overrides of `[sampling]` for this call. Raises GenerationFailed where no engine gave an answer,
        InvalidField for a sampling field that cannot be set, RolloutCancelled.
        """
        extra: dict[str, Any] = {}
        if tools:
            extra["tools"] = list(tools)
        if tool_choice is not None:
            extra["tool_choice"] = tool_choice
        history = [dict(message) for message in messages]
        answer = await self._generate(sampling, messages=history, extra=extra)
        self._record.last_messages = history
        message = dict(answer.turn.message or {"role": "assistant", "content": answer.turn.text})
        return _reply(answer.turn, message)

    async def generate(self, prompt: Sequence[int] | str, **sampling: Any) -> Reply:
        """The policy's continuation of token ids, or of a text. Raises as `chat`."""
        if isinstance(prompt, str):
            answer = await self._generate(sampling, text=prompt)
        else:
            answer = await self._generate(sampling, token_ids=array("i", list(prompt)))
        return _reply(answer.turn, {"role": "assistant", "content": answer.turn.text})

    def reward(self, value: float | None) -> None:
        """The rollout's own reward, beside those of the reward functions; None takes it back."""
        self._token.check()
        if value is not None and not math.isfinite(value):
            value = None  # not scored, as with reward functions
        self._record.reward = None if value is None else float(value)

    def metric(self, name: str, value: float) -> None:
        """A number to deliver with the sample; the last one of a name counts."""
        self._token.check()
        if not isinstance(name, str) or not name.isprintable() or len(name) > MAX_NAME:
            raise ValueError(f"a metric's name is a printable text of at most {MAX_NAME} characters")
        if len(self._record.metrics) >= MAX_METRICS and name not in self._record.metrics:
            raise ValueError(f"a rollout has {MAX_METRICS} metrics at most")
        self._record.metrics[clean(name)] = float(value)

    async def sleep(self, seconds: float) -> None:
        """Wait, or raise RolloutCancelled where the rollout ends meanwhile."""
        self._token.check()
        await asyncio.sleep(seconds)
        self._token.check()

    def close(self) -> None:
        """Abort what is still being generated; the token is set."""
        for asking in self._open:
            asking.cancel()

    async def _generate(
        self,
        overrides: Mapping[str, Any],
        *,
        messages: Messages | None = None,
        text: str | None = None,
        token_ids: array[int] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Answer:
        self._token.check()
        record, job = self._record, self._job
        place = len(record.turns)
        record.turns.append(None)
        request = GenerateRequest(
            tag=f"{job.rollout_id}.{place}",
            messages=messages,
            text=text,
            token_ids=token_ids,
            sampling=effective_sampling(self._sampling, {**job.prompt.sampling, **overrides}),
            group=f"{job.group_id}.{job.attempt}",
            rollout=job.rollout_id,
            many_turns=True,
            priority=group_seq(job.group_id),
            extra=extra or {},
        )
        # A deadline of this call's own: calls side by side would extend a shared one twice for one pause.
        deadline = Deadline(self._clock, self._remaining())
        # In a task that is kept: a program may have left it running beside others, or behind, when its rollout ends.
        asking = asyncio.get_running_loop().create_task(
            self._engines.generate(request, gate=self._gate, deadline=deadline), name="generation"
        )
        self._open.add(asking)
        asking.add_done_callback(self._open.discard)
        try:
            answer = await asking
        except asyncio.CancelledError:
            self._token.check()
            raise
        self._token.check()
        record.samplings.append(request.sampling)
        record.turns[place] = replace(answer.turn, version=answer.policy_version)
        record.attempts += answer.attempts
        record.wasted_tokens += answer.wasted_tokens
        record.logprobs_mode = answer.logprobs_mode
        return answer


class ThreadContext:
    """For plain `def` programs, which run in a thread: the same calls, blocking."""

    def __init__(self, context: Context, token: CancelToken, loop: asyncio.AbstractEventLoop) -> None:
        self._context, self._token, self._loop = context, token, loop

    @property
    def group_id(self) -> str:
        return self._context.group_id

    @property
    def attempt(self) -> int:
        return self._context.attempt

    @property
    def index(self) -> int:
        """Row of the rollout in its group, 0-based."""
        return self._context.index

    @property
    def policy_version(self) -> int:
        """The group's."""
        return self._context.policy_version

    @property
    def cancelled(self) -> bool:
        """Whether the rollout is over: what it makes from here on is not used."""
        return self._context.cancelled

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Reply:
        """See Context.chat."""
        return self._wait(self._context.chat(messages, tools=tools, tool_choice=tool_choice, **sampling))

    def generate(self, prompt: Sequence[int] | str, **sampling: Any) -> Reply:
        """See Context.generate."""
        return self._wait(self._context.generate(prompt, **sampling))

    def reward(self, value: float | None) -> None:
        """See Context.reward."""
        self._context.reward(value)

    def metric(self, name: str, value: float) -> None:
        """See Context.metric."""
        self._context.metric(name, value)

    def sleep(self, seconds: float) -> None:
        """See Context.sleep."""
        self._wait(self._context.sleep(seconds))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._token.reason is not None:
            work.close()
            self._token.check()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._token.attach(future)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            # Whatever it was: where the rollout is over, that is what the program has to hear.
            self._token.check()
            raise
        finally:
            self._token.detach(future)


def _reply(turn: Turn, message: dict[str, Any]) -> Reply:
    return Reply(
        text=turn.text,
        message=message,
        ids=turn.output_ids.tolist(),
        logprobs=turn.logprobs.tolist(),
        prompt_ids=turn.prompt_ids.tolist(),
        finish_reason=turn.finish_reason,
    )


__all__ = ["Context", "Messages", "Record", "Reply", "RolloutCancelled", "ThreadContext"]
