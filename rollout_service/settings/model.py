"""The whole configuration. A `Settings` that exists is consistent: every check across tables has passed.

`Settings(...)` reads no file and no environment; `load_settings` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from rollout_service.core.scoring import OWN_REWARD
from rollout_service.settings.problems import FieldProblems
from rollout_service.settings.registration import RegistrationSettings
from rollout_service.settings.sampling import SamplingSettings
from rollout_service.settings.server import ServerSettings, server_problems
from rollout_service.settings.stores import ReplicaSettings, StoreSettings
from rollout_service.settings.tables import (
    DiscoverySettings,
    DispatchSettings,
    EngineSettings,
    GroupsSettings,
    ProgramSettings,
    PromptsSettings,
    RewardSettings,
    RewardWorkersSettings,
    TeacherSettings,
    WeightsSettings,
)
from rollout_service.settings.tracing import TracingSettings
from rollout_service.settings.urls import same_engine

Found = tuple[tuple[str | int, ...], str]
"""A problem: the field's path, and what is wrong with it."""


class Settings(BaseSettings):
    """One run of the service."""

    model_config = SettingsConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        case_sensitive=True,
        env_prefix="ROLLOUT_",
        env_nested_delimiter="__",
    )

    mode: Literal["grpo", "distillation"] = Field(
        default="grpo", description="Groups with advantages, or samples that teachers score."
    )
    model: str = Field(
        default="",
        max_length=512,
        description="The model to ask for; empty: what the engine's /v1/models serves. {policy_version} in it stands "
        "for the version current when a request is sent: a LoRA adapter for each.",
    )
    engines: list[EngineSettings] = Field(
        default=[], max_length=1024, description="At least one, unless engines may register."
    )
    registration: RegistrationSettings = RegistrationSettings()
    discovery: DiscoverySettings = DiscoverySettings()
    tracing: TracingSettings = TracingSettings()
    prompts: PromptsSettings = PromptsSettings()
    groups: GroupsSettings = GroupsSettings()
    dispatch: DispatchSettings = DispatchSettings()
    sampling: SamplingSettings = SamplingSettings()
    program: ProgramSettings = ProgramSettings()
    rewards: list[RewardSettings] = Field(
        default=[], max_length=64, description="At least one, unless rollouts or teachers score."
    )
    teachers: list[TeacherSettings] = Field(default=[], max_length=64, description='For mode "distillation".')
    reward_workers: RewardWorkersSettings = RewardWorkersSettings()
    store: StoreSettings = StoreSettings()
    replica: ReplicaSettings = ReplicaSettings()
    weights: WeightsSettings = WeightsSettings()
    server: ServerSettings = ServerSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # The file and the environment are merged, each value with its origin, before this model sees them.
        return (init_settings,)

    @field_validator("model")
    @classmethod
    def _one_placeholder(cls, value: str) -> str:
        if not set("{}").isdisjoint(value.replace("{policy_version}", "")):
            raise ValueError('"{policy_version}" is the only placeholder')
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if found := [
            *_engine_problems(self),
            *_group_problems(self),
            *_reward_problems(self),
            *_teacher_problems(self),
            *server_problems(self.server),
        ]:
            raise FieldProblems(found)
        return self


def _engine_problems(settings: Settings) -> Iterator[Found]:
    if not settings.engines and not settings.registration.allowed:
        yield ("engines",), "at least one [[engines]] table is required"
    if len(settings.engines) > settings.registration.max_engines and settings.registration.allowed:
        yield ("registration", "max_engines"), f"is below the {len(settings.engines)} engines configured"
    counts = Counter(same_engine(engine.url) for engine in settings.engines)
    for position, engine in enumerate(settings.engines):
        if counts[same_engine(engine.url)] > 1:
            what = "engine stands here twice; raise its max_inflight instead"
            if engine.source is not None:
                what = "source stands here twice"
            yield ("engines", position, "url"), f"the same {what}"
            return


def _group_problems(settings: Settings) -> Iterator[Found]:
    groups, dispatch = settings.groups, settings.dispatch
    if groups.num_generations < groups.min_group_size and settings.mode == "grpo":
        yield (
            ("groups", "num_generations"),
            f"{groups.num_generations} is below groups.min_group_size ({groups.min_group_size}): "
            "every group would be dropped",
        )
    if groups.advantage == "rloo" and groups.min_group_size < 2 and settings.mode == "grpo":
        yield ("groups", "min_group_size"), 'groups.advantage "rloo" compares a rollout with the others: at least 2'
    if groups.zero_variance == "drop" and groups.num_generations == 1:
        yield ("groups", "zero_variance"), '"drop" with groups.num_generations = 1 would drop every group'
    if dispatch.admission == "pace" and dispatch.groups_per_step == 0:
        yield ("dispatch", "groups_per_step"), 'dispatch.admission "pace" needs it to be at least 1'


def _reward_problems(settings: Settings) -> Iterator[Found]:
    if not (settings.rewards or settings.program.scores_itself or settings.mode == "distillation"):
        yield ("rewards",), "at least one [[rewards]] table is required: without it no group can be scored"
    seen: set[str] = set()
    for position, reward in enumerate(settings.rewards):
        if reward.name == OWN_REWARD:
            yield ("rewards", position, "name"), f'"{OWN_REWARD}" is the name of what a rollout brings along itself'
        if reward.name in seen:
            yield ("rewards", position, "name"), f'"{reward.name}" is used twice; names tell rewards apart'
        seen.add(reward.name)


def _teacher_problems(settings: Settings) -> Iterator[Found]:
    if settings.mode == "distillation" and not settings.teachers:
        yield ("teachers",), 'mode "distillation" needs at least one [[teachers]] table'
    if settings.mode != "distillation" and settings.teachers:
        yield ("teachers",), 'teachers score in mode "distillation" only'
    seen: set[str] = set()
    for position, teacher in enumerate(settings.teachers):
        if teacher.id in seen:
            yield ("teachers", position, "id"), f'"{teacher.id}" is used twice; rows name their teacher by it'
        seen.add(teacher.id)
