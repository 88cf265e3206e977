"""What the loops over leases share beside the calls themselves; without I/O, as `core` is.

What always holds: a lease call whose answer was lost is asked again under its request id until that id is certainly
used up; a lease whose training is over is acked or left to run out, never given back to be trained once more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trainer_client.core import Core, Flow
from trainer_client.errors import ClientError, Conflict, Halted, Problem, ShuttingDown, StoreUnavailable, Unavailable
from trainer_client.types import Lease

__all__ = ["finish_late", "maybe_made", "next_lease"]

logger = logging.getLogger("trainer_client")


def next_lease(core: Core, ask: Mapping[str, Any], request_id: str, asked_before: bool = False) -> Flow[Lease | None]:
    """Ask for a lease; None: it was made and has ended before its answer arrived, so ask anew under another id.

    `asked_before`: an earlier call with this `request_id` got no answer.
    """
    try:
        return (yield from core.lease(**ask, request_id=request_id))
    except Conflict as error:
        if not (asked_before or error.repeated):
            raise
        logger.warning("a lease whose answer was lost has ended meanwhile: %s", error)
        return None


def maybe_made(error: ClientError, asked_before: bool) -> bool:
    """Whether there may be a lease although its call failed with `error`."""
    if isinstance(error, Halted | Conflict):
        return False  # what was made before would have been the answer, or has ended
    if isinstance(error, Problem) and not (asked_before or error.repeated):
        return isinstance(error, Unavailable) and not isinstance(error, StoreUnavailable | ShuttingDown)
    return True


def finish_late(core: Core, lease: Lease) -> Flow[None]:
    """Ack what a loop still holds of a trained lease, with little patience: the ack itself failed or was cut off.

    Never raises a `ClientError`: an error or an interrupt is on its way already.
    """
    lease_id = lease.lease_id or ""
    if not (left := core.held.pop(lease_id, None)):
        return
    brief = core._brief()
    brief.held[lease_id] = left
    try:
        yield from brief.finish(lease)
    except ClientError as error:
        logger.warning("lease %s was trained, but its ack was not answered: %s", lease_id, error)
