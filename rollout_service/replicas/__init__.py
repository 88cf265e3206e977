"""Several services that share one run over one store. `ReplicaOrchestrator` is the door."""

from rollout_service.replicas.replica import ReplicaOrchestrator, ReplicaSettings

__all__ = ["ReplicaOrchestrator", "ReplicaSettings"]
