"""One lease a step, shared by all ranks.

What always holds:

- Every rank asks under the same `request_id`, so all get one lease; all agree on its groups before any of them trains.
- A step is settled only after every rank has come back for more, by the leader alone: trained groups acked.
  The leader renews the lease until then.
- A call that fails on one rank raises on all of them, where they can tell each other (torch.distributed); with a mere
  barrier the others learn nothing of it.
- A leader that leaves gives back the lease in hand. A rank that does not lead leaves its groups to the leader, or where
  that one is gone too, to the expiry of the lease.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from trainer_client.client import RolloutClient
from trainer_client.errors import ClientError, Conflict, NotFound, Problem, problem
from trainer_client.tensors.ranks import Ranks
from trainer_client.types import Group, Lease, LeaseStatus

__all__ = ["SharedLeases"]

logger = logging.getLogger("trainer_client")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outline:
    """What ranks compare of a lease."""

    status: LeaseStatus
    lease_id: str | None
    group_ids: tuple[str, ...]


class SharedLeases:
    """`even`: only multiples of `ranks.world` groups are trained, the rest is given back."""

    def __init__(self, client: RolloutClient, ranks: Ranks, ask: Mapping[str, Any], *, even: bool) -> None:
        self._client, self._ranks, self._ask, self._even = client, ranks, dict(ask), even
        self._in_hand: Lease | None = None
        """What is being trained, on every rank the same groups; None: settled."""
        self._asking: str | None = None
        """A call that may have made a lease which nobody has seen."""
        self._held: str | None = None
        """The leader's lease, neither acked nor given back yet."""
        self._stop_renewing: Callable[[], None] | None = None

    def take(self, request_id: str) -> Lease | None:
        """Settle the step in hand and wait for the next one; None when exhausted. Raises ClientError."""
        trained = self._in_hand
        if trained is not None:
            self._ranks.gather(None)
        self._in_hand = None

        def settle_and_ask() -> Lease:
            self._settle(trained)
            return self._lease(request_id)

        lease, outlines = self._agree(settle_and_ask, _outline)
        if len({(outline.status, outline.lease_id) for outline in outlines}) > 1:
            raise ClientError(f"the ranks got different answers for {request_id}: {outlines}")
        if lease.status is LeaseStatus.EXHAUSTED:
            return None
        # A group cancelled between two ranks' answers is in one of them only.
        known = set(outlines[0].group_ids).intersection(*(outline.group_ids for outline in outlines))
        groups = [group for group in lease.groups if group.group_id in known]
        kept = groups[: len(groups) - len(groups) % self._ranks.world] if self._even else groups
        if self._even and not kept:
            self._agree(lambda: self._explain_too_few(lease), lambda _: None)
            return None
        if len(kept) < len(groups):
            # Now, and not with the ack: the next lease must find them ready, or it may be made of what little is.
            self._agree(lambda: self._release(lease, groups[len(kept) :]), lambda _: None)
        self._in_hand = msgspec.structs.replace(lease, groups=kept)
        return self._in_hand

    def ack(self) -> None:
        """Settle the step in hand now. Every rank has to call it. Raises ClientError."""
        trained, self._in_hand = self._in_hand, None
        if trained is not None:
            self._ranks.gather(None)
            self._agree(lambda: self._settle(trained), lambda _: None)

    def close(self) -> None:
        """The leader gives back what is in hand, or was asked for and not seen."""
        if not self._ranks.leads:
            return
        self._give_back()
        if self._asking is not None:
            self._client._run(self._client._core.recover(self._ask, self._asking))

    def _agree(self, work: Callable[[], T], outline: Callable[[T], Any]) -> tuple[T, list[Any]]:
        """Do `work` on every rank; its result here and the outlines of all. An error of one is raised by all."""
        result: tuple[T] | None = None
        error: ClientError | None = None
        try:
            result = (work(),)
        except ClientError as raised:
            error = raised
        told = self._ranks.gather(error if result is None else outline(result[0]))
        if error is not None:
            raise error
        for answer in told:
            if isinstance(answer, ClientError):
                answer.add_note("raised on another rank")
                raise answer
        if result is None:
            raise AssertionError("work ends with a result or an error")
        return result[0], told

    def _lease(self, request_id: str) -> Lease:
        """Wait until there are groups or nothing more comes."""
        while True:
            self._asking = request_id
            try:
                lease = self._client.lease(**self._ask, request_id=request_id)
            except Problem:
                self._asking = None  # refused: there is no lease
                raise
            self._asking = None
            if lease.groups and lease.lease_id is not None and self._ranks.leads:
                # Before the ranks agree: from here on somebody has to keep it, or to give it back.
                self._client._core.hold(lease)
                self._held = lease.lease_id
                self._stop_renewing = _renewing(self._client, lease.lease_id, self._ask["lease_s"] / 2)
            if lease.status is not LeaseStatus.EMPTY:
                return lease

    def _settle(self, lease: Lease | None) -> None:
        if lease is not None and self._ranks.leads:
            self._client._run(self._client._core.finish(lease))
            self._give_back()  # what not all ranks knew

    def _release(self, lease: Lease, rest: list[Group]) -> None:
        if self._ranks.leads:
            try:
                self._client.release(lease, [group.group_id for group in rest])
            except (Conflict, NotFound) as error:  # the lease ran out: the service has them already
                logger.warning("groups of lease %s were no longer ours: %s", lease.lease_id, error)

    def _give_back(self) -> None:
        if self._stop_renewing is not None:
            self._stop_renewing()
            self._stop_renewing = None
        if self._held is not None:
            self._client._run(self._client._core.give_back(self._held))
            self._held = None

    def _explain_too_few(self, lease: Lease) -> None:
        """Fewer groups than ranks is the end of the run, unless something else is behind it."""
        if not self._ranks.leads:
            return
        status, left = self._client.status(), len(lease.groups)
        if status.halted is not None:
            facts = msgspec.to_builtins(status.halted)
            raise problem(503, {"type": "halted", "detail": f"halted: {status.halted.reason}", **facts})
        if status.outstanding > left:
            raise ClientError(
                f"a lease of {left} groups cannot be divided evenly among {self._ranks.world} ranks, though "
                f"{status.outstanding} are outstanding: raise store.max_lease_bytes and groups.max_ready_bytes, "
                "or lease without other consumers"
            )
        names = ", ".join(group.group_id for group in lease.groups)
        logger.warning("the run ends; fewer groups than the %d ranks are given back: %s", self._ranks.world, names)


def _outline(lease: Lease) -> _Outline:
    return _Outline(
        status=lease.status, lease_id=lease.lease_id, group_ids=tuple(group.group_id for group in lease.groups)
    )


def _renewing(client: RolloutClient, lease_id: str, every_s: float) -> Callable[[], None]:
    """Renew in a thread, for training leaves no moment for it; returns what ends that."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(every_s):
            try:
                client.renew(lease_id)
            except (Conflict, NotFound) as error:
                logger.warning("lease %s is lost: %s", lease_id, error)
                return
            except ClientError as error:
                logger.warning("lease %s could not be renewed yet: %s", lease_id, error)

    thread = threading.Thread(target=renew, name="trainer-client-renewal", daemon=True)
    thread.start()

    def stop() -> None:
        ended.set()
        thread.join()

    return stop
