"""What the engines room is told at start, and what it tells while it works."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from rollout_service.core.model import FailureReason, Turn
from rollout_service.engines.requests import GenerateRequest
from rollout_service.settings.registration import Pattern

POLICY_VERSION = "{policy_version}"
"""In a model's name: the policy version that is current when a request is sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSettings:
    """Limits of a fleet; the names are those of the configuration."""

    model: str = ""
    """Served model every engine must have; empty, or with `{policy_version}` in it: what each serves first."""
    max_attempts: int = 3
    """Engine attempts of one generation, >= 1."""
    request_timeout_s: float = 600.0
    engine_wait_s: float = 300.0
    """How long a generation waits while no engine is healthy."""
    probe_interval_s: float = 2.0
    temperature: float = 1.0
    """The configured temperature: at another one than 1 raw logprobs are refused."""
    allow_raw_logprobs: bool = False
    weights_timeout_s: float = 600.0
    """How long an engine may take to load new weights."""
    adapters_kept: int = 6
    """LoRA adapters that stay loaded: one for every version a request may still be made at, and the newest."""

    addable: tuple[Pattern, ...] = ()
    """Addresses where engines may be added while the fleet works; none: nowhere."""
    max_engines: int = 1024
    """Engines in all, those of the start included."""
    ids_by_address: bool = False
    """An engine's id is made of its URL, the same in every fleet; else they are numbered."""
    added_api_key: str = field(default="", repr=False)
    """Bearer key of added engines, or empty."""
    discovery_interval_s: float = 5.0
    """Between two looks at where engines are listed."""
    discovery_drain_s: float = 30.0
    """What runs on an engine that is listed no more may go on for so long."""

    @property
    def model_per_version(self) -> bool:
        """Whether requests name another model at every policy version."""
        return POLICY_VERSION in self.model


class EngineEvents(Protocol):
    """What the fleet counts. Called on the event loop; must not raise."""

    def retried(self, reason: FailureReason) -> None:
        """An engine request failed for `reason` and is sent again."""

    def abort_issued(self, count: int) -> None:
        """`count` engine requests are being aborted (each once, repetitions of a call not counted)."""

    def abort_failed(self, count: int) -> None:
        """An abort call for `count` ids failed."""

    def request_done(self, seconds: float) -> None:
        """An engine request gave a completion, `seconds` after it was sent."""


class Call(Protocol):
    """One engine request that is followed."""

    @property
    def headers(self) -> Mapping[str, str]:
        """To send with it."""

    def answered(self, turn: Turn) -> None:
        """It gave a completion."""


class CallTracer(Protocol):
    """Follows engine requests from their sending to their end."""

    def call(self, request: GenerateRequest, request_id: str, engine: str) -> AbstractContextManager[Call]:
        """Entered while `request` is at the engine of that URL; sees what it raises."""


class NoEvents:
    """Counts nothing."""

    def retried(self, reason: FailureReason) -> None:
        pass

    def abort_issued(self, count: int) -> None:
        pass

    def abort_failed(self, count: int) -> None:
        pass

    def request_done(self, seconds: float) -> None:
        pass
