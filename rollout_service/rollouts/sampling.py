"""Sampling of a prompt: the configured defaults under the prompt's own fields (design 3.3).

What always holds of the result: temperature, top_p, top_k, min_p, repetition_penalty and max_tokens are in it, so that
an engine fills in nothing from its model's generation_config; no key is in it that `SAMPLING_KEYS` does not name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rollout_service.errors import InvalidField


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDefaults:
    """`[sampling]`. None: not sent."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 2048
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Prompts given as messages only."""
    seed_per_attempt: bool | None = None
    """A seed that differs for every engine request; slows vLLM's sampler."""


SAMPLING_KEYS = frozenset(field.name for field in fields(SamplingDefaults))


def effective_sampling(defaults: SamplingDefaults, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What is sent for a prompt with `overrides`; None in an override takes the default back.

    Raises InvalidField for a key that cannot be set per prompt (`n`, `stream`, `logprobs`, `model`, or unknown).
    """
    if unknown := sorted(overrides.keys() - SAMPLING_KEYS):
        raise InvalidField(f"sampling.{unknown[0]} cannot be set; it takes {', '.join(sorted(SAMPLING_KEYS))}")
    sampling = {}
    for name in _ORDER:
        value = overrides.get(name)
        if value is None:
            value = getattr(defaults, name)
        if value is not None:
            sampling[name] = value
    return sampling


_ORDER = tuple(field.name for field in fields(SamplingDefaults))
