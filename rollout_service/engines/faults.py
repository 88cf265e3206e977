"""What one engine request can end in, other than a turn.

    EngineFault            reason, whether trying again may help, tokens known to be wasted
    ├── TransportFault     no answer: connect error, broken connection, half an answer
    │   └── StaleConnection    the engine closed an idle connection just as it was used again; nobody's fault
    ├── RequestTimeout     the request ran past its limit
    ├── StatusFault        the engine answered something else than 200
    ├── EngineRemoved      the engine was taken out of the fleet while it worked; nobody's fault
    ├── BadAnswer          a 200 that is no completion
    └── AbortedAnswer      a 200 whose generation ended in a way nobody here asked for

A fault never holds a URL with credentials in it, and its text is at most `MAX_MESSAGE` characters.
"""

from __future__ import annotations

from typing import ClassVar

from rollout_service.core.model import FailureReason

MAX_MESSAGE = 2_000
"""Characters of an engine's own words that are kept: enough for a person, too little to fill a store."""


class EngineFault(Exception):
    """One engine request failed."""

    reason: ClassVar[FailureReason] = FailureReason.CONNECTION

    def __init__(self, detail: str, *, tokens: int = 0) -> None:
        super().__init__(detail[:MAX_MESSAGE])
        self.tokens = tokens
        """Tokens generated in vain, as far as the answer tells."""

    @property
    def failure_reason(self) -> FailureReason:
        return self.reason

    @property
    def transient(self) -> bool:
        """Whether the same request may succeed when it is sent again."""
        return True

    @property
    def retry_after_s(self) -> float | None:
        """What the engine asked to wait, seconds."""
        return None


class TransportFault(EngineFault):
    """The connection could not be made, or broke before the whole answer was here."""


class StaleConnection(TransportFault):
    """A reused keep-alive connection ended before the first byte of the answer."""


class RequestTimeout(EngineFault):
    """The request ran past its limit; it was closed and aborted."""

    reason = FailureReason.TIMEOUT


class EngineRemoved(EngineFault):
    """The engine is being removed from the fleet: the request was aborted there, or not sent at all."""

    reason = FailureReason.ENGINE_UNAVAILABLE


class StatusFault(EngineFault):
    """The engine answered with another status than 200."""

    def __init__(self, status: int, message: str, *, param: str | None = None, retry_after_s: float | None = None):
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self._param = param
        self._retry_after_s = retry_after_s

    @property
    def transient(self) -> bool:
        return self.status in (408, 429) or self.status >= 500

    @property
    def failure_reason(self) -> FailureReason:
        if self.status == 400 and self._param in ("input_tokens", "input_text"):
            return FailureReason.PROMPT_TOO_LONG
        return FailureReason.SERVER_ERROR if self.transient else FailureReason.REJECTED

    @property
    def retry_after_s(self) -> float | None:
        return self._retry_after_s


class BadAnswer(EngineFault):
    """A 200 that is malformed, misaligned, without ids or not finite. Nothing of it is used."""

    reason = FailureReason.BAD_ANSWER


class AbortedAnswer(EngineFault):
    """A 200 with finish_reason `abort`, `error`, null, missing or unknown. Nothing of it is used."""

    reason = FailureReason.ABORTED


class GenerationFailed(Exception):
    """A generation failed after all its attempts; what a rollout is told."""

    def __init__(
        self,
        reason: FailureReason,
        detail: str,
        *,
        engine: str | None = None,
        attempts: int = 0,
        wasted_tokens: int = 0,
    ) -> None:
        super().__init__(detail[:MAX_MESSAGE])
        self.reason = reason
        self.engine = engine
        """URL of the engine that failed last, without credentials; None where none was asked."""
        self.attempts = attempts
        """Counted attempts."""
        self.wasted_tokens = wasted_tokens
