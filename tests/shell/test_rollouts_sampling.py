"""Sampling as it is sent (design 3.3)."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_service.errors import InvalidField
from rollout_service.rollouts import SAMPLING_KEYS, SamplingDefaults, effective_sampling


def test_what_an_engine_would_fill_in_from_its_generation_config_is_always_sent() -> None:
    assert effective_sampling(SamplingDefaults(), {}) == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 2048,
    }


def test_a_prompts_own_sampling_wins_over_the_defaults_and_the_rest_stays() -> None:
    defaults = SamplingDefaults(temperature=0.7, stop=["\n"], max_tokens=16)
    sampling = effective_sampling(defaults, {"temperature": 0.0, "top_k": 5, "stop_token_ids": [2]})
    assert sampling["temperature"] == 0.0
    assert (sampling["top_k"], sampling["stop"], sampling["stop_token_ids"]) == (5, ["\n"], [2])
    assert sampling["max_tokens"] == 16


def test_null_in_a_prompts_sampling_means_the_default() -> None:
    assert effective_sampling(SamplingDefaults(max_tokens=9), {"max_tokens": None, "stop": None})["max_tokens"] == 9


@pytest.mark.parametrize("key", ["n", "stream", "logprobs", "model", "seed", "return_token_ids", "temprature"])
def test_what_would_change_the_shape_of_an_answer_cannot_be_set(key: str) -> None:
    with pytest.raises(InvalidField, match=rf"sampling\.{key}\b"):
        effective_sampling(SamplingDefaults(), {key: 1})


def test_every_key_that_can_be_set_is_sent() -> None:
    values: dict[str, Any] = {key: f"value of {key}" for key in SAMPLING_KEYS}
    assert effective_sampling(SamplingDefaults(), values) == values
