"""What ends one rollout of a program, and nothing else."""

from __future__ import annotations

from rollout_service.core.model import FailureReason


class ProgramFault(Exception):
    """What a program did, or met, is no rollout; its rollout failed for `reason`."""

    def __init__(self, detail: str, reason: FailureReason = FailureReason.PROGRAM) -> None:
        super().__init__(detail)
        self.reason = reason
