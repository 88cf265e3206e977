"""A teacher as configured."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherSpec:
    """One vLLM server that scores completions."""

    id: str
    """What rows call it."""
    url: str
    """Base URL, without `/v1`."""
    model: str = ""
    """The model to ask for; empty: what it serves first."""
    top_k: int = 8
    """Most likely tokens beside the sampled one, >= 1."""
    max_inflight: int = 32
    """Requests at once, >= 1."""
    timeout_s: float = 120.0
    """Deadline of one request."""
    max_attempts: int = 3
    """Requests for one sample, at most."""
    api_key: str = field(default="", repr=False)
    """Bearer key, or empty."""
