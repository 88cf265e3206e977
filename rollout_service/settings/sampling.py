"""Sampling parameters: one set of names and bounds for the `[sampling]` table and for a prompt's `sampling`.

What decides how many completions are made, how they travel and which policy makes them is the service's own and
refused here. Names are the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from rollout_service.settings.json_values import json_problem
from rollout_service.settings.problems import FieldProblems

REFUSED: Mapping[str, str] = {
    "n": "not taken: one request makes one rollout; set num_generations",
    "stream": "not taken: the service reads whole completions",
    "logprobs": "not taken: the service always asks for the logprob of each sampled token",
    "model": "not taken: all rollouts are made by the one policy; set the top-level model",
    "seed": "not taken: one seed would make all rollouts of a group the same; set seed_per_attempt",
}
"""Names the engine knows and nobody may set, with the reason."""


def _one_as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopText = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]

Temperature = Annotated[float, Field(ge=0, le=100, description="0 is greedy: all rollouts of a group are the same.")]
TopP = Annotated[float, Field(gt=0, le=1, description="Nucleus sampling; 1 keeps every token.")]
TopK = Annotated[int, Field(ge=-1, le=2**31 - 1, description="Keep the k likeliest tokens; 0 and -1 keep every token.")]
MinP = Annotated[float, Field(ge=0, le=1, description="Least probability, relative to the likeliest token's.")]
RepetitionPenalty = Annotated[float, Field(gt=0, le=100, description="1 is none.")]
MaxTokens = Annotated[int, Field(ge=1, le=10_000_000, description="Most tokens of one turn of generation.")]
Stop = Annotated[
    Annotated[list[StopText], Field(max_length=64)] | None,
    BeforeValidator(_one_as_list),
    Field(description="Texts that end a completion: a list, or one text."),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": 1024},
                {"type": "array", "maxItems": 64, "items": {"type": "string", "minLength": 1, "maxLength": 1024}},
                {"type": "null"},
            ]
        }
    ),
]
StopTokenIds = Annotated[list[TokenId] | None, Field(max_length=1024, description="Token ids that end a completion.")]
Penalty = Annotated[float | None, Field(ge=-2, le=2, description="As in the OpenAI API; unset: not sent.")]
TemplateArguments = Annotated[
    dict[str, Any] | None, Field(description="Arguments of the chat template (messages only).")
]
SeedPerAttempt = Annotated[
    bool, Field(description="Send each attempt its own seed: repeatable where the engine is, but a slower sampler.")
]


class _Sampling(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_names(cls, values: Any) -> Any:
        if isinstance(values, dict) and (found := [name for name in REFUSED if name in values]):
            raise FieldProblems(((name,), REFUSED[name]) for name in found)
        return values

    @field_validator("chat_template_kwargs", check_fields=False)
    @classmethod
    def _json_only(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and (problem := json_problem(value, "")):
            path, what = problem
            raise FieldProblems([((path,) if path else (), what)])
        return value


class SamplingSettings(_Sampling):
    """`[sampling]`: how every rollout is sampled unless its prompt says otherwise."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    max_tokens: MaxTokens = 2048
    stop: Stop = None
    stop_token_ids: StopTokenIds = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    chat_template_kwargs: TemplateArguments = None
    seed_per_attempt: SeedPerAttempt = False
    allow_raw_logprobs: bool = Field(
        default=False,
        description="Start although the engine reports logprobs of the raw distribution and temperature is not 1: "
        "old_log_probs are then not those of the distribution that was sampled.",
    )

    def request_fields(self) -> dict[str, Any]:
        """What goes into every request, by the engine's names.

        The five parameters an engine would fill in from the model's generation_config are always there.
        """
        fields = self.model_dump(exclude={"allow_raw_logprobs", "seed_per_attempt"})
        return {name: value for name, value in fields.items() if value is not None}


class SamplingOverrides(_Sampling):
    """A prompt's `sampling`: what is set here replaces that one value of `[sampling]`; null is not set."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_tokens: MaxTokens | None = None
    stop: Stop = None
    stop_token_ids: StopTokenIds = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    chat_template_kwargs: TemplateArguments = None
    seed_per_attempt: SeedPerAttempt | None = None

    def overrides(self) -> dict[str, Any]:
        """Only what is set."""
        return self.model_dump(exclude_none=True)
