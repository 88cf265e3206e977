"""How one simulated engine behaves, fixed for its life.

A `SimulatorSettings` that exists is valid: every number is within its bounds, and a bad one raises `ValueError` with
one line that names the field, the value and the bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

VLLM_MAX_NUM_SEQS = 256
"""vLLM's own default for the number of requests that decode together."""

_NUMBERS: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "max_model_len": (2, 2**24),
    "seed": (0, 2**63 - 1),
    "tokens_per_s": (1e-3, 1e9),
    "batch_half": (1e-3, 1e9),
    "latency": (0.0, 86400.0),
    "jitter": (0.0, 1.0),
    "max_num_seqs": (1, 2**20),
    "mean_tokens": (1, 2**24),
    "sigma": (0.0, 4.0),
    "kv_cache_tokens": (1, 2**40),
    "keepalive_s": (0.01, 86400.0),
    "stream_interval_s": (0.001, 60.0),
    "journal_size": (0, 10**6),
}


class Lengths(StrEnum):
    """How many tokens a completion wants before `max_tokens` cuts it."""

    FIXED = "fixed"
    """Every completion wants exactly `mean_tokens`."""
    UNIFORM = "uniform"
    """Evenly between 1 and `2 * mean_tokens - 1`."""
    LOGNORMAL = "lognormal"
    """A long tail: lognormal with mean `mean_tokens` and shape `sigma`."""


class LogprobsMode(StrEnum):
    """What `/server_info` reports; the logprobs themselves are drawn, not computed."""

    RAW = "raw_logprobs"
    """vLLM's default: logprobs before temperature."""
    PROCESSED = "processed_logprobs"
    """Logprobs of the distribution that was sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatorSettings:
    """Settings of one simulated engine. Times are seconds, rates tokens per second."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on; 0 takes a free one (`Simulator.url` tells)."""
    model: str = "simulated"
    """The one model name served."""
    max_model_len: int = 4096
    """Prompt and completion together, in tokens."""
    seed: int = 0
    """Same seed and same request ids: same completions."""
    tokens_per_s: float = 600.0
    """Decoding speed of one request alone."""
    batch_half: float = 16.0
    """With b requests decoding, each gets `tokens_per_s / (1 + (b - 1) / batch_half)`: half speed at batch_half + 1."""
    latency: float | None = None
    """Fixed seconds for each completion, whatever its length and the batch; None: the batch model above."""
    jitter: float = 0.0
    """Share by which `latency` is spread, seeded: latency * (1 ± jitter)."""
    max_num_seqs: int | None = None
    """Requests that decode together; the rest wait. None: 256 as in vLLM, or no bound where `latency` is set."""
    lengths: Lengths = Lengths.LOGNORMAL
    """Distribution of completion lengths."""
    mean_tokens: int = 128
    """Mean of that distribution."""
    sigma: float = 0.8
    """Shape of the lognormal; 0 makes it fixed."""
    kv_cache_tokens: int = 2**20
    """What `vllm:kv_cache_usage_perc` is a share of; it never limits."""
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    """Reported by `/server_info`."""
    dev_mode: bool = True
    """VLLM_SERVER_DEV_MODE: abort, pause, weight and information routes."""
    scale_out: bool = True
    """--enable-scale-out: `/inference/v1/*`; without it those answer 403."""
    api_key: str = ""
    """Bearer key that guards `/v1`, `/v2` and `/inference`; empty: open."""
    keepalive_s: float = 5.0
    """Idle connections are closed after this long, as by vLLM's server."""
    stream_interval_s: float = 0.02
    """Time between two chunks of a stream; a chunk carries all tokens decoded since the last."""
    journal_size: int = 2000
    """How many of the latest requests `/sim/requests` remembers."""

    def __post_init__(self) -> None:
        for name, (low, high) in _NUMBERS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name} must be a number, not {value!r}")
            if not low <= value <= high:
                raise ValueError(f"{name} is {value:g}, must be between {low:g} and {high:g}")
        for name in ("host", "model"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        object.__setattr__(self, "lengths", Lengths(self.lengths))
        object.__setattr__(self, "logprobs_mode", LogprobsMode(self.logprobs_mode))
        if self.jitter and self.latency is None:
            raise ValueError("jitter spreads latency: set latency too")

    @property
    def batch_limit(self) -> int | None:
        """The bound on requests that decode together; None: no bound."""
        if self.max_num_seqs is None and self.latency is None:
            return VLLM_MAX_NUM_SEQS
        return self.max_num_seqs
