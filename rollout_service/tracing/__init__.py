"""Traces of groups, rollouts and engine requests by OpenTelemetry; an extra, and off where no endpoint is configured.

What always holds: without an endpoint nothing of OpenTelemetry's SDK is imported and nothing is traced; no prompt, no
completion and no words of an engine, a reward or a program stand in a span; tracing that fails costs spans, never a
rollout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout_service.errors import ConfigError

if TYPE_CHECKING:
    from rollout_service.tracing.tracing import Tracing


def open_tracing(endpoint: str, sample_ratio: float) -> Tracing | None:
    """Spans go to `endpoint` (OTLP over HTTP, the whole URL); None where it is empty.

    `sample_ratio`: share of group attempts that are traced, each with all its rollouts. Raises ConfigError.
    """
    if not endpoint:
        return None
    try:
        from rollout_service.tracing.export import open_export
        from rollout_service.tracing.tracing import Tracing
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise ConfigError(
            "tracing.endpoint needs OpenTelemetry: pip install '.[otel]' in a checkout, or SERVICE_EXTRAS=otel (image)"
        ) from None
    return Tracing(*open_export(endpoint, sample_ratio))


__all__ = ["open_tracing"]
