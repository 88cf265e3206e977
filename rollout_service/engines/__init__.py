"""Engines: vLLM servers as one fleet. Nothing outside of this package speaks HTTP to an engine."""

from rollout_service.engines.cache_salt import CacheSalt
from rollout_service.engines.faults import GenerationFailed
from rollout_service.engines.fleet import Fleet
from rollout_service.engines.requests import GenerateRequest
from rollout_service.engines.retry import Answer, Deadline, Gate
from rollout_service.engines.settings import EngineEvents, FleetSettings, NoEvents
from rollout_service.engines.sources import LookFailed, read_engines
from rollout_service.engines.vllm import EngineSpec

__all__ = [
    "Answer",
    "CacheSalt",
    "Deadline",
    "EngineEvents",
    "EngineSpec",
    "Fleet",
    "FleetSettings",
    "Gate",
    "GenerateRequest",
    "GenerationFailed",
    "LookFailed",
    "NoEvents",
    "read_engines",
]
