"""One span for each attempt of a group: from its first dispatch to its end.

What always holds: a group has at most one open span; an attempt that ended, in whatever way, has an ended span with its
outcome; what is remembered is bounded by the outstanding groups. A group that was open at a restart has a span from its
first rollout after it.
"""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context

from rollout_service.core.changes import Moved
from rollout_service.core.group import Group
from rollout_service.core.lifecycle import EventKind
from rollout_service.core.model import GroupState, RolloutJob
from rollout_service.observers.fanout import Quiet
from rollout_service.tracing import names

STOPPED = "stopped"
"""Outcome of a span whose group was outstanding when the service stopped; it goes on after the next start."""


class GroupSpans(Quiet):
    """Observer that keeps the spans."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[str, tuple[int, Span]] = {}
        """By group id: the attempt, and its span."""

    def context_of(self, job: RolloutJob) -> Context:
        """What a span of one of its rollouts is made in."""
        attempt, span = self._open.get(job.group_id, (0, None))
        if span is None or attempt != job.attempt:
            facts: names.Facts = {
                names.PROMPT_ID: job.prompt.prompt_id,
                names.NUM_GENERATIONS: job.prompt.num_generations,
            }
            span = self._begin(job.group_id, job.attempt, job.policy_version, facts)
        return set_span_in_context(span, Context())

    def group_moved(self, moved: Moved) -> None:
        before, after = moved.before, moved.after
        if after.state is GroupState.PENDING or after.state.terminal:
            self._end(moved)
        elif before.state is GroupState.PENDING:
            self._begin_anew(after)
        elif before.state is not after.state and (found := self._open.get(after.group_id)) is not None:
            found[1].add_event(after.state.value)

    def end_all(self) -> None:
        """The service stops."""
        for _, span in self._open.values():
            span.set_attribute(names.OUTCOME, STOPPED)
            span.end()
        self._open.clear()

    def _begin_anew(self, group: Group) -> None:
        facts: names.Facts = {
            names.PROMPT_ID: group.prompt_id,
            names.EPOCH: group.epoch,
            names.NUM_GENERATIONS: group.num_generations,
        }
        self._begin(group.group_id, group.attempt, group.version or 0, facts)

    def _begin(self, group_id: str, attempt: int, version: int, facts: names.Facts) -> Span:
        _, left = self._open.pop(group_id, (0, None))
        if left is not None:  # its end was undone together with a commit that failed
            left.set_attribute(names.OUTCOME, EventKind.RECOVERED.value)
            left.end()
        here: names.Facts = {names.GROUP_ID: group_id, names.ATTEMPT: attempt, names.POLICY_VERSION: version}
        # Each attempt is a trace of its own, whatever HTTP request or task happens to be current.
        span = self._tracer.start_span("group", context=Context(), attributes={**here, **facts})
        self._open[group_id] = attempt, span
        return span

    def _end(self, moved: Moved) -> None:
        after = moved.after
        _, span = self._open.pop(after.group_id, (0, None))
        if span is None:
            return
        goes_on = not after.state.terminal
        outcome = moved.kind.value if goes_on else after.state.value
        span.set_attribute(names.OUTCOME, "stale" if moved.kind is EventKind.OUTDATED else outcome)
        if goes_on:
            span.set_attribute(names.GOES_ON, True)
        if after.reason is not None:
            span.set_attribute(names.REASON, after.reason.value)
        if after.state is GroupState.FAILED:
            span.set_status(Status(StatusCode.ERROR))
        span.end()
