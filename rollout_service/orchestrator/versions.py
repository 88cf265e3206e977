"""What is said of a policy version, whoever keeps it."""

from __future__ import annotations

import structlog

from rollout_service.core.changes import Bumped
from rollout_service.core.scheduler import VersionTooLow
from rollout_service.errors import Conflict

log = structlog.get_logger(__name__)


def too_low(error: VersionTooLow) -> Conflict:
    """To the caller who posted it."""
    return Conflict(f'{error}; a trainer that went back says "reset": true', version=error.current)


def say_stale(bumped: Bumped) -> None:
    """To the operator, where it cost anything."""
    if bumped.stale_groups:
        log.warning(
            "groups_went_stale",
            groups=bumped.stale_groups,
            aborted_rollouts=bumped.aborted_rollouts,
            version=bumped.version,
            detail="more is generated than the trainer takes within max_staleness versions: "
            'dispatch.admission = "pace" with groups_per_step generates less ahead',
        )
