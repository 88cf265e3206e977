"""Who is told what became durable, beside the metrics: people who look, and the log."""

from rollout_service.observers.fanout import Observers, Quiet
from rollout_service.observers.history import History, Recent, RecentKind
from rollout_service.observers.outcomes import OutcomeLog

__all__ = ["History", "Observers", "OutcomeLog", "Quiet", "Recent", "RecentKind"]
