"""The HTTP interface: one router a resource, over an orchestrator and a fleet that are given."""

from rollout_service.api.access import Access
from rollout_service.api.application import build_api
from rollout_service.api.context import Context, EngineCalls
from rollout_service.api.viewers import Viewers

__all__ = ["Access", "Context", "EngineCalls", "Viewers", "build_api"]
