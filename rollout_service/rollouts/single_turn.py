"""A rollout of one turn: the prompt goes to an engine, the completion comes back.

What always holds: `run` gives a FinishedRollout or a FailedRollout and raises nothing but the cancellation of its own
task; a finished one has exactly what one engine request sampled.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from rollout_service.core.group import group_seq
from rollout_service.core.model import FailedRollout, FailureReason, FinishedRollout, RolloutJob, Turn
from rollout_service.engines import Answer, Deadline, Gate, GenerateRequest, GenerationFailed
from rollout_service.rollouts.sampling import SamplingDefaults, effective_sampling

log = structlog.get_logger(__name__)


class Engines(Protocol):
    """What a rollout needs of a fleet."""

    async def generate(self, request: GenerateRequest, *, gate: Gate, deadline: Deadline) -> Answer: ...

    async def prompt_text(self, ids: array[int]) -> str | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleTurnSettings:
    """Limits of a rollout."""

    rollout_timeout_s: float = 1800.0
    """From the first try to the last token; time spent at a closed gate does not count."""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)


class SingleTurn:
    """Makes rollouts of one turn. Holds nothing between rollouts; any number may run at once."""

    def __init__(
        self, engines: Engines, settings: SingleTurnSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engines = engines
        self._settings = settings
        self._clock = clock
        self._defaults = effective_sampling(settings.sampling, {})

    async def run(self, job: RolloutJob, gate: Gate) -> FinishedRollout | FailedRollout:
        """One rollout. Cancelling the task aborts it at the engine."""
        try:
            return await self._made(job, gate)
        except GenerationFailed as failed:
            return FailedRollout(
                index=job.index,
                reason=failed.reason,
                error=str(failed),
                engine=failed.engine,
                attempts=failed.attempts,
                wasted_tokens=failed.wasted_tokens,
            )
        except Exception as error:
            # A fault of ours ends this rollout only (design 3.2.9); the traceback is for whoever mends it.
            log.exception("rollout_internal_error", group_id=job.group_id, attempt=job.attempt, index=job.index)
            words = f"{type(error).__name__}: {error}"[:2_000]
            return FailedRollout(index=job.index, reason=FailureReason.INTERNAL, error=words)

    async def _made(self, job: RolloutJob, gate: Gate) -> FinishedRollout:
        prompt = job.prompt
        started = self._clock()
        request = GenerateRequest(
            tag=job.rollout_id,
            messages=prompt.messages,
            text=prompt.text,
            token_ids=prompt.token_ids,
            sampling=effective_sampling(self._settings.sampling, prompt.sampling)
            if prompt.sampling
            else self._defaults,
            group=f"{job.group_id}.{job.attempt}",
            rollout=job.rollout_id,
            priority=group_seq(job.group_id),
            text_wanted=True,
        )
        deadline = Deadline(self._clock, self._settings.rollout_timeout_s)
        answer = await self._engines.generate(request, gate=gate, deadline=deadline)
        turn = answer.turn
        shown: Sequence[Mapping[str, Any]] | str | None = prompt.text if prompt.messages is None else prompt.messages
        if prompt.token_ids is not None:
            shown = await self._engines.prompt_text(prompt.token_ids)
        return FinishedRollout(
            index=job.index,
            prompt=shown,
            completion=_completion(turn),
            turns=(turn,),
            metrics={
                "completion_tokens": float(len(turn.output_ids)),
                "prompt_tokens": float(len(turn.prompt_ids)),
                "duration_s": self._clock() - started,
                "attempts": float(answer.attempts),
                "wasted_tokens": float(answer.wasted_tokens),
            },
            logprobs_mode=answer.logprobs_mode,
            sampling=request.sampling,
        )


def _completion(turn: Turn) -> Sequence[Mapping[str, Any]] | str:
    return turn.text if turn.message is None else (turn.message,)
