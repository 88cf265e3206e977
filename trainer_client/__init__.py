"""Trains on the scored groups of a rollout-service, over its REST interface.

    from trainer_client import RolloutClient
    from trainer_client.tensors import to_tensors      # the only module that needs torch

Importing this package opens nothing and imports neither httpx, numpy nor torch; nothing in it imports the service.
"""

from trainer_client.client import AsyncRolloutClient, RolloutClient
from trainer_client.errors import (
    ClientError,
    Conflict,
    Denied,
    EnginesBehind,
    Forbidden,
    Halted,
    InvalidRequest,
    NotFound,
    Problem,
    QueueFull,
    ServiceUnreachable,
    ShuttingDown,
    StoreUnavailable,
    Unauthorized,
    Unavailable,
    UnexpectedAnswer,
)
from trainer_client.types import (
    BumpResult,
    Group,
    GroupInfo,
    GroupPage,
    Halt,
    Lease,
    LeaseStatus,
    Renewal,
    Sample,
    Slots,
    Status,
    SubmittedGroup,
    Version,
)

__all__ = [
    "AsyncRolloutClient",
    "BumpResult",
    "ClientError",
    "Conflict",
    "Denied",
    "EnginesBehind",
    "Forbidden",
    "Group",
    "GroupInfo",
    "GroupPage",
    "Halt",
    "Halted",
    "InvalidRequest",
    "Lease",
    "LeaseStatus",
    "NotFound",
    "Problem",
    "QueueFull",
    "Renewal",
    "RolloutClient",
    "Sample",
    "ServiceUnreachable",
    "ShuttingDown",
    "Slots",
    "Status",
    "StoreUnavailable",
    "SubmittedGroup",
    "Unauthorized",
    "Unavailable",
    "UnexpectedAnswer",
    "Version",
]
