"""The tables of the configuration: names, defaults and bounds as design section 10 has them.

Each number has a least and a greatest value and is finite, each type is exact (a text is no number, 1 is no true), and
no table takes a key it does not know. What one table can check alone it checks here; the rest is in `checks`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rollout_service.settings.problems import FieldProblems, shown
from rollout_service.settings.urls import DnsName, EnginesFile, engine_entry, engine_url, engines_source, http_url

DAY_S = 86_400.0
MAX_GROUP_SIZE = 1024
"""Most rollouts of one group."""
MAX_COUNT = 1_000_000
MAX_SLOTS = 100_000
"""Beyond what one process can hold open."""
TERABYTE = 2**40
DEFAULT_CEILING = 1024
"""Of `max_inflight = "auto"`: the largest batch vLLM makes unless it is told otherwise."""
MAX_VERSION = 2**53 - 1
"""Greatest policy version: every JSON reader still has it exactly."""


class Table(BaseModel):
    """A table: exact types, no unknown keys, nothing changes after it was read."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def code_target(value: str) -> str:
    """Checks the form `package.module:name`. ValueError says what is wrong."""
    module, colon, name = value.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError(f'expected "package.module:name", got "{value[:80]}"' if value.isprintable() else "not a name")
    return value


def environment_name(value: str) -> str:
    """Checks that it can be a variable's name, or is empty. ValueError says what is wrong."""
    if value and not (value.isascii() and value.isidentifier()):
        raise ValueError("expected the name of an environment variable, not the key itself")
    return value


def inflight(value: Any) -> Any:
    """Checks what may stand as `max_inflight`; one message for both kinds. ValueError says what is wrong."""
    if value != "auto" and (type(value) is not int or not 1 <= value <= MAX_SLOTS):
        raise ValueError(f'expected an integer from 1 to {MAX_SLOTS}, or "auto", got {shown(value)}')
    return value


Inflight = Annotated[int, Field(ge=1, le=MAX_SLOTS)] | Literal["auto"]
"""Most requests at once to an engine, or "auto": as many as it takes without a queue."""


class EngineSettings(Table):
    """`[[engines]]`: one vLLM server, or a source that lists some."""

    url: str = Field(
        default="http://127.0.0.1:8000",
        description="Base URL, without /v1. Or where engines are listed: dns://name:port (each of its addresses is an "
        "engine), file:path (a URL a line; relative to the working directory). Both are looked at again and again.",
    )
    max_inflight: Inflight = Field(
        default=256,
        description='Most requests at once to an engine (its --max-num-seqs); "auto": adapted to its queue and cache.',
    )
    max_inflight_ceiling: int = Field(
        default=DEFAULT_CEILING, ge=1, le=MAX_SLOTS, description='What max_inflight = "auto" never goes beyond.'
    )
    api_key_env: str = Field(
        default="", description="Name of the environment variable that holds the API key; empty: no key."
    )

    @field_validator("url")
    @classmethod
    def _one_spelling(cls, value: str) -> str:
        return engine_entry(value)

    @field_validator("max_inflight", mode="before")
    @classmethod
    def _number_or_auto(cls, value: Any) -> Any:
        return inflight(value)

    @field_validator("api_key_env")
    @classmethod
    def _a_name(cls, value: str) -> str:
        return environment_name(value)

    @model_validator(mode="after")
    def _ceiling_of_something(self) -> Self:
        if self.max_inflight != "auto" and self.max_inflight_ceiling != DEFAULT_CEILING:
            what = f'has a meaning only with max_inflight = "auto", and max_inflight is {self.max_inflight}'
            raise FieldProblems([(("max_inflight_ceiling",), what)])
        return self

    @property
    def source(self) -> DnsName | EnginesFile | None:
        """Where the engines are listed; None where it is one engine."""
        return engines_source(self.url)


class DiscoverySettings(Table):
    """`[discovery]`: engines that `dns://` and `file:` entries list."""

    interval_s: float = Field(default=5.0, ge=0.1, le=3600, description="Time between two looks at a source.")
    drain_s: int = Field(
        default=30,
        ge=0,
        le=3600,
        description="How long what runs on an engine that is listed no more may go on; then it goes to another.",
    )


class PromptsSettings(Table):
    """`[prompts]`: the dataset, if prompts do not come over HTTP alone."""

    path: str = Field(
        default="", max_length=4096, description=".jsonl, .parquet or a datasets name; empty: only POST /prompts."
    )
    epochs: int = Field(default=1, ge=0, le=MAX_COUNT, description="Passes over the dataset; 0 is for ever.")
    shuffle_seed: int = Field(
        default=-1, ge=-1, le=2**63 - 1, description="Seed of each epoch's order; -1: file order."
    )

    @field_validator("path")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("a path without control characters is expected")
        return value


class GroupsSettings(Table):
    """`[groups]`: size, staleness, advantages and queues of groups."""

    num_generations: int = Field(default=8, ge=1, le=MAX_GROUP_SIZE, description="Rollouts of a group.")
    max_staleness: int = Field(
        default=4, ge=0, le=MAX_COUNT, description="S: a group is stale when it is more than S versions old."
    )
    min_group_size: int = Field(
        default=2, ge=1, le=MAX_GROUP_SIZE, description="A group with fewer scored survivors is dropped."
    )
    on_stale: Literal["drop", "requeue"] = Field(
        default="drop", description="What becomes of a stale group: it ends, or its whole prompt is generated again."
    )
    max_group_attempts: int = Field(
        default=3, ge=1, le=1000, description='Attempts of a group in all, with on_stale = "requeue".'
    )
    advantage: Literal["grpo", "mean", "rloo", "none"] = Field(
        default="grpo",
        description="Baseline: mean and standard deviation, mean alone, mean of the others, or the reward itself.",
    )
    zero_variance: Literal["keep", "drop"] = Field(
        default="keep", description="What becomes of a group whose rewards are all equal."
    )
    halt_after_failed_groups: int = Field(
        default=1, ge=0, le=MAX_COUNT, description="Failed groups in a row that halt the service; 0: never."
    )
    halt_after_unproductive_groups: int = Field(
        default=32, ge=0, le=MAX_COUNT, description="Dropped or failed groups in a row that halt it; 0: never."
    )
    max_pending_groups: int = Field(
        default=10_000, ge=1, le=10_000_000, description="POST /prompts answers 429 beyond so many pending groups."
    )
    max_ready_groups: int = Field(
        default=64, ge=1, le=MAX_SLOTS, description="No new group is opened while ready + scoring reach it."
    )
    max_ready_bytes: int = Field(
        default=2**30, ge=1, le=TERABYTE, description="The same, by bytes of their token data and texts."
    )


class DispatchSettings(Table):
    """`[dispatch]`: slots, attempts and deadlines of rollouts."""

    max_inflight_rollouts: int = Field(
        default=128, ge=1, le=MAX_SLOTS, description="Slots: rollouts in flight at once."
    )
    admission: Literal["slots", "pace"] = Field(
        default="slots", description="What bounds opened groups: slots alone, or also (S + 1) * groups_per_step."
    )
    groups_per_step: int = Field(
        default=0, ge=0, le=MAX_SLOTS, description='Groups the trainer takes a step; needed by admission = "pace".'
    )
    max_attempts: int = Field(
        default=3, ge=1, le=100, description="Engine requests for one turn of a rollout, at most."
    )
    request_timeout_s: float = Field(default=600.0, ge=0.01, le=DAY_S, description="Deadline of one engine request.")
    rollout_timeout_s: float = Field(
        default=1800.0, ge=0.01, le=7 * DAY_S, description="Deadline of one rollout, all attempts and turns."
    )
    engine_wait_s: float = Field(
        default=300.0, ge=0, le=7 * DAY_S, description="How long rollouts wait while no engine is healthy."
    )
    probe_interval_s: float = Field(default=2.0, ge=0.01, le=3600, description="Time between two probes of an engine.")
    wait_for_version: int = Field(
        default=0, ge=0, le=MAX_VERSION, description="Nothing is dispatched before this policy version is posted."
    )
    cache_salt: bool = Field(
        default=True,
        description="Requests of different policy versions share no prefix in an engine's cache: what is cached there "
        "was computed with the weights of its time. Off only where every update of the weights empties the cache.",
    )


class ProgramSettings(Table):
    """`[program]`: how one rollout is made; by default one turn of generation."""

    target: str = Field(
        default="", max_length=512, description='"package.module:function": makes the rollout, `def` or `async def`.'
    )
    tools: list[str] = Field(
        default=[], max_length=128, description='"package.module:function" each: what the policy may call in turns.'
    )
    openenv: str = Field(default="", description="URL of an OpenEnv server: each rollout is an episode there.")
    openenv_action: str = Field(
        default="", max_length=512, description='"package.module:function": the policy\'s answer as an action.'
    )
    openenv_observation: str = Field(
        default="", max_length=512, description='"package.module:function": an observation as messages.'
    )
    openenv_reward: Literal["sum", "last"] = Field(
        default="sum", description="A rollout's reward: the sum of its steps' rewards, or the last one."
    )
    openenv_seed_by: Literal["rollout", "group"] = Field(
        default="group",
        description="One seed for the resets of a group, so that its rollouts are compared on one task.",
    )
    max_turns: int = Field(default=8, ge=1, le=1000, description="Most turns of generation of one rollout.")
    tool_timeout_s: float = Field(default=30.0, ge=0.01, le=DAY_S, description="Deadline of one tool or step call.")
    fork_threshold_tokens: int = Field(
        default=1024,
        ge=0,
        le=2**31 - 1,
        description="Where rendering a rollout's history again changes fewer tokens of its last answer, they become "
        "context; otherwise the rollout goes on in a sample of its own.",
    )
    threads: int = Field(
        default=64, ge=1, le=4096, description="Plain `def` programs and tools that run at once, each in a thread."
    )
    grace_s: float = Field(
        default=5.0, ge=0, le=3600, description="How long a cancelled thread may go on before its place is made good."
    )

    @field_validator("target", "openenv_action", "openenv_observation")
    @classmethod
    def _function(cls, value: str) -> str:
        return code_target(value) if value else value

    @field_validator("tools")
    @classmethod
    def _functions(cls, value: list[str]) -> list[str]:
        return [code_target(tool) for tool in value]

    @field_validator("openenv")
    @classmethod
    def _server(cls, value: str) -> str:
        if value:
            http_url(value)
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if sum(map(bool, (self.target, self.tools, self.openenv))) > 1:
            raise ValueError("expected one of target, tools and openenv: each of them makes the whole rollout")
        return self

    @property
    def scores_itself(self) -> bool:
        """Whether a rollout can bring a reward of its own along."""
        return bool(self.target or self.openenv)


class TeacherSettings(Table):
    """`[[teachers]]`: one vLLM server whose logprobs of every completion are delivered (mode "distillation")."""

    id: str = Field(
        default="teacher",
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$",
        description="What a row's teacher_id names: letters, digits, `_`, `.` and `-`, at most 64.",
    )
    url: str = Field(description="Base URL, without /v1.")
    model: str = Field(default="", max_length=512, description="Empty: what its /v1/models serves.")
    top_k: int = Field(
        default=8,
        ge=1,
        le=1000,
        description="Most likely tokens beside the sampled one; above 20 the server needs --max-logprobs.",
    )
    max_inflight: int = Field(default=32, ge=1, le=MAX_SLOTS, description="Requests at once to this teacher.")
    timeout_s: float = Field(default=120.0, ge=0.01, le=DAY_S, description="Deadline of one request.")
    max_attempts: int = Field(default=3, ge=1, le=100, description="Requests for one sample, at most.")
    api_key_env: str = Field(default="", description="Name of the environment variable that holds its API key.")

    @field_validator("url")
    @classmethod
    def _one_spelling(cls, value: str) -> str:
        return engine_url(value)

    @field_validator("api_key_env")
    @classmethod
    def _a_name(cls, value: str) -> str:
        return environment_name(value)


class RewardSettings(Table):
    """`[[rewards]]`: one reward, a function or a webhook."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$",
        description="Its name in samples and metrics: letters, digits, `_`, `.` and `-`, at most 64.",
    )
    function: str = Field(default="", max_length=512, description='"package.module:name", with TRL\'s signature.')
    url: str = Field(default="", description='A webhook that answers {"rewards": [...]}.')
    weight: float = Field(default=1.0, ge=-1e6, le=1e6, description="Its factor in the sum; 0: reported only.")
    timeout_s: float = Field(default=30.0, ge=0.01, le=DAY_S, description="Deadline of one call (one group).")

    @field_validator("function")
    @classmethod
    def _target(cls, value: str) -> str:
        return code_target(value) if value else value

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        if value:
            http_url(value)
        return value

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if bool(self.function) == bool(self.url):
            raise ValueError("expected exactly one of function and url")
        return self


class RewardWorkersSettings(Table):
    """`[reward_workers]`: the processes reward functions run in."""

    processes: int = Field(default=2, ge=1, le=256, description="Reward functions that run at once.")


class WeightsSettings(Table):
    """`[weights]`: what `POST /policy_version` may have the engines load."""

    allowed_paths: list[str] = Field(
        default=[], max_length=64, description="Folders weights and adapters may be loaded from; none: no loading."
    )
    timeout_s: float = Field(default=600.0, ge=0.01, le=DAY_S, description="How long one engine may take to load.")

    @field_validator("allowed_paths")
    @classmethod
    def _folders(cls, value: list[str]) -> list[str]:
        for path in value:
            if not path.isprintable() or not path.startswith("/") or ".." in path.split("/") or not path.strip("/"):
                raise ValueError("absolute paths of folders are expected, without `..`, and not all of the disk")
        return value
