"""The one writer between the pure core and everything that waits, stores or talks."""

from rollout_service.orchestrator.checkpoint_calls import Rewound
from rollout_service.orchestrator.orchestrator import Orchestrator
from rollout_service.orchestrator.parts import RolloutRunner
from rollout_service.orchestrator.policy_updates import PolicyUpdates
from rollout_service.orchestrator.views import (
    GroupView,
    LeaseAnswer,
    LeaseRequest,
    LeaseStatus,
    StatusView,
    Submission,
)
from rollout_service.orchestrator.waiters import HungUp
from rollout_service.orchestrator.workshop import Rules

__all__ = [
    "GroupView",
    "HungUp",
    "LeaseAnswer",
    "LeaseRequest",
    "LeaseStatus",
    "Orchestrator",
    "PolicyUpdates",
    "Rewound",
    "RolloutRunner",
    "Rules",
    "StatusView",
    "Submission",
]
