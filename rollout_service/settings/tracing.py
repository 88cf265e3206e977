"""`[tracing]`: spans of groups, rollouts and engine requests, by OpenTelemetry (the extra `otel`)."""

from __future__ import annotations

from pydantic import Field, field_validator

from rollout_service.settings.tables import Table
from rollout_service.settings.urls import http_url


class TracingSettings(Table):
    """Off while `endpoint` is empty. OpenTelemetry's own environment variables (OTEL_…) hold beside it."""

    endpoint: str = Field(
        default="",
        description="Where spans go, OTLP over HTTP, the whole URL: http://collector:4318/v1/traces. Empty: no traces.",
    )
    sample_ratio: float = Field(
        default=1.0, ge=0.0, le=1.0, description="Share of group attempts that are traced, each with all its rollouts."
    )

    @field_validator("endpoint")
    @classmethod
    def _a_url(cls, value: str) -> str:
        if not value:
            return value
        parts = http_url(value, secrets="keys of a collector go into OTEL_EXPORTER_OTLP_HEADERS")
        if parts.path.rstrip("/") == "":
            raise ValueError("expected the whole URL with its path, /v1/traces as a rule")
        return value
