"""One span for each rollout, under its group's, around whatever makes it.

What always holds: the runner's outcome and whatever it raises pass through unchanged; while the runner works its span
is the current one, also in tasks it makes, so that engine requests come under it.
"""

from __future__ import annotations

import asyncio

from opentelemetry.trace import Span, Status, StatusCode, Tracer, use_span

from rollout_service.core.model import FailedRollout, FinishedRollout, RolloutJob
from rollout_service.orchestrator.parts import Gate, RolloutRunner
from rollout_service.tracing import names
from rollout_service.tracing.groups import GroupSpans


class TracedRunner:
    """A RolloutRunner around another."""

    def __init__(self, inner: RolloutRunner, groups: GroupSpans, tracer: Tracer) -> None:
        self._inner, self._groups, self._tracer = inner, groups, tracer

    async def run(self, job: RolloutJob, gate: Gate) -> FinishedRollout | FailedRollout:
        """As the inner one's."""
        span = self._tracer.start_span(
            "rollout",
            context=self._groups.context_of(job),
            attributes={
                names.GROUP_ID: job.group_id,
                names.ATTEMPT: job.attempt,
                names.INDEX: job.index,
                names.POLICY_VERSION: job.policy_version,
            },
        )
        # Never the exception itself: its words may be those of an engine, which quotes what it was sent.
        with use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                outcome = await self._inner.run(job, gate)
            except asyncio.CancelledError:
                span.set_attribute(names.OUTCOME, "aborted")
                raise
            except BaseException as error:
                _failed(span, type(error).__name__)
                raise
            if isinstance(outcome, FailedRollout):
                _failed(span, outcome.reason.value, outcome.attempts)
            else:
                _finished(span, outcome)
            return outcome


def _finished(span: Span, rollout: FinishedRollout) -> None:
    span.set_attributes(
        {
            names.OUTCOME: "finished",
            names.FINISH_REASON: rollout.finish_reason.value,
            names.TURNS: len(rollout.turns),
            names.COMPLETION_TOKENS: rollout.output_tokens,
            names.ATTEMPTS: int(rollout.metrics.get("attempts", len(rollout.turns))),
        }
    )


def _failed(span: Span, reason: str, attempts: int = 0) -> None:
    span.set_attributes({names.OUTCOME: "failed", names.REASON: reason, names.ERROR: reason, names.ATTEMPTS: attempts})
    span.set_status(Status(StatusCode.ERROR))
