"""The HTTP interface: one router a resource, over an orchestrator and a fleet that are given."""

from rollout_service.api.application import build_api
from rollout_service.api.context import Context

__all__ = ["Context", "build_api"]
