"""The way of finished spans to the collector: batched, bounded, in the SDK's own thread.

What always holds: ending a span costs the event loop an append to a queue of bounded length; when the queue is full
spans are lost, and when the collector is gone so is what was sent to it; of all that the SDK complains about the log
gets one line a minute at most. OpenTelemetry's own environment variables hold as they do elsewhere
(OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_CERTIFICATE, OTEL_SERVICE_NAME, OTEL_BSP_MAX_QUEUE_SIZE, …).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from rollout_service import __version__

QUIET_S = 60.0
SDK_LOGGER = "opentelemetry"

log = structlog.get_logger(__name__)


def open_export(endpoint: str, sample_ratio: float) -> tuple[TracerProvider, Callable[[], None]]:
    """A provider whose spans go to `endpoint`, the whole URL (`…/v1/traces`), and what makes it give up at once.

    Nothing is sent yet.
    """
    complaints, logger = Complaints(), logging.getLogger(SDK_LOGGER)
    logger.handlers, logger.propagate = [complaints], False
    exporter = OTLPSpanExporter(endpoint=endpoint)
    provider = make_provider(sample_ratio)
    provider.add_span_processor(BatchSpanProcessor(exporter))

    def give_up() -> None:
        complaints.mute()  # that it gave up is said by who made it
        exporter.shutdown()  # type: ignore[no-untyped-call]  # the SDK left its annotation out

    return provider, give_up


def make_provider(sample_ratio: float) -> TracerProvider:
    """A provider without a way out."""
    resource = Resource.create({SERVICE_VERSION: __version__})
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "rollout-service"}))
    # Who stops the service stops this too: at the interpreter's exit a dead collector could hold it up.
    return TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)), resource=resource, shutdown_on_exit=False
    )


class Complaints(logging.Handler):
    """What the SDK warns of, as lines of our log; most of it repeats itself for as long as a collector is away."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._quiet_until = 0.0
        self._left_out = 0

    def mute(self) -> None:
        """Nothing it hears from now on concerns anybody."""
        self._quiet_until = math.inf

    def emit(self, record: logging.LogRecord) -> None:
        """Called under the handler's lock, from the SDK's thread or the event loop's."""
        now = time.monotonic()
        if now < self._quiet_until:
            self._left_out += 1
            return
        self._quiet_until = now + QUIET_S
        error = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            error = f"{error} {record.exc_info[1]!r}"
        log.warning("traces_trouble", error=error, left_out=self._left_out)
        self._left_out = 0
