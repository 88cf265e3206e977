"""The configuration: one TOML file, the environment over it, everything bounded and checked before anything starts."""

from rollout_service.settings.load import load_settings
from rollout_service.settings.model import Settings
from rollout_service.settings.registration import RegistrationSettings
from rollout_service.settings.sampling import SamplingOverrides, SamplingSettings
from rollout_service.settings.server import KeySettings, ServerSettings
from rollout_service.settings.stores import ReplicaSettings, StoreSettings
from rollout_service.settings.tables import (
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

__all__ = [
    "DispatchSettings",
    "EngineSettings",
    "GroupsSettings",
    "KeySettings",
    "ProgramSettings",
    "PromptsSettings",
    "RegistrationSettings",
    "ReplicaSettings",
    "RewardSettings",
    "RewardWorkersSettings",
    "SamplingOverrides",
    "SamplingSettings",
    "ServerSettings",
    "Settings",
    "StoreSettings",
    "TeacherSettings",
    "WeightsSettings",
    "load_settings",
]
