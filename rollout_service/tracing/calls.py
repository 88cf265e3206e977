"""One client span for each engine request, and the header by which the engine goes on with its trace.

What always holds: each request that is sent has one span, retries of it have theirs; a request that is aborted here is
no error; the header is W3C's `traceparent`, whatever propagators the environment names.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from urllib.parse import urlsplit

from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rollout_service.core.model import Turn
from rollout_service.engines.faults import EngineFault, StatusFault
from rollout_service.engines.requests import GenerateRequest
from rollout_service.tracing import names

_W3C = TraceContextTextMapPropagator()


class EngineCalls:
    """The fleet's CallTracer."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._where: dict[str, names.Facts] = {}
        """Engine URL → attributes of where it is; as many as there were engines."""

    def call(self, request: GenerateRequest, request_id: str, engine: str) -> Call:
        """Enter it when `request` is sent to the engine at `engine`, a URL without credentials."""
        path = request.route.path
        if (where := self._where.get(engine)) is None:
            where = self._where[engine] = _place(engine)
        attributes: names.Facts = {
            names.METHOD: "POST",
            names.URL: engine + path,
            names.REQUEST_ID: request_id,
            **where,
        }
        return Call(self._tracer, f"POST {path}", attributes)


class Call:
    """One engine request. Used once."""

    __slots__ = ("_span", "headers")

    def __init__(self, tracer: Tracer, name: str, attributes: names.Facts) -> None:
        # Under the current span, the rollout's.
        self._span = tracer.start_span(name, kind=SpanKind.CLIENT, attributes=attributes)
        self.headers: dict[str, str] = {}
        """To send with the request."""
        _W3C.inject(self.headers, set_span_in_context(self._span))

    def answered(self, turn: Turn) -> None:
        """It gave a completion."""
        self._span.set_attributes(
            {
                names.OUTCOME: "answered",
                names.STATUS_CODE: 200,
                names.FINISH_REASON: turn.finish_reason.value,
                names.PROMPT_TOKENS: len(turn.prompt_ids),
                names.COMPLETION_TOKENS: len(turn.output_ids),
            }
        )

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        span = self._span
        if isinstance(error, asyncio.CancelledError):
            span.set_attribute(names.OUTCOME, "aborted")
        elif error is not None:
            span.set_attribute(names.OUTCOME, "failed")
            span.set_attribute(names.ERROR, type(error).__name__)
            if isinstance(error, EngineFault):
                span.set_attribute(names.REASON, error.failure_reason.value)
            if isinstance(error, StatusFault):
                span.set_attribute(names.STATUS_CODE, error.status)
            span.set_status(Status(StatusCode.ERROR))
        span.end()


def _place(engine: str) -> names.Facts:
    parts = urlsplit(engine)
    return {
        names.HOST: parts.hostname or "",
        names.PORT: parts.port or (443 if parts.scheme == "https" else 80),
    }
