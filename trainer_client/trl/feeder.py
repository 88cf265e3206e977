"""The thread that leases groups and puts their rows into TRL's queue.

What always holds:

- A lease call whose answer was lost is asked again under its `request_id` until the service has answered it, or `stop`
  gives back what it may have made.
- No wait is longer than a few seconds, so that `stop` ends the thread and leases are renewed in time: calls are tried
  once, long polls are short, and the queue is waited for in slices.
- Groups are leased only when the trainer has found the buffer empty: until then they stay at the service, which sees to
  their age and counts them in its pace. At most one lease is in hand beside what the buffer holds.
- What passes (a restart, a halt that somebody clears) is waited out and shown in `condition`; what does not ends the
  leasing. The leases of rows that wait or are being trained are renewed until the end all the same.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from trainer_client.client import RolloutClient
from trainer_client.errors import (
    ClientError,
    Conflict,
    Halted,
    NotFound,
    QueueFull,
    ServiceUnreachable,
    Unavailable,
)
from trainer_client.trl.buffer import Delivery, RolloutBuffer, Row
from trainer_client.trl.health import Condition
from trainer_client.trl.samples import UnfitSample, to_samples
from trainer_client.types import Group, Lease, LeaseStatus

logger = logging.getLogger("trainer_client")

LONG_POLL_S = 2
"""Short: a blocking call cannot be interrupted, and `stop` waits for it."""
SLICE_S = 0.2
AGAIN_S = 1.0
JOIN_S = 15.0
"""More than the longest call of the feeder takes."""
PASSING = (ServiceUnreachable, Unavailable, QueueFull)


class Feeder:
    """Runs from `start` to `stop`. `ask`: what every lease call asks for; `version_offset`: see `to_samples`."""

    def __init__(
        self,
        client: RolloutClient,
        buffer: RolloutBuffer,
        *,
        ask: dict[str, Any],
        version_offset: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._buffer, self._clock = client, buffer, clock
        self._ask = {**ask, "min_groups": 1, "wait_s": min(LONG_POLL_S, max(1, ask["lease_s"] // 4))}
        self._offset = version_offset
        self._stopping = threading.Event()
        self._outbox: deque[Row] = deque()
        self._asking: str | None = None
        """The request id of a call that has not been answered yet."""
        self.condition = Condition()
        self._thread = threading.Thread(target=self.run, name="trainer-client-trl", daemon=True)

    def start(self) -> None:
        """From here on rows come."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and give back what a call that was never answered may have leased."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
        if self._thread.is_alive():
            logger.warning("the rollout worker's thread is still waiting for the service; left behind")
        if self._asking is not None:
            self._client._run(self._client._core.recover(self._ask, self._asking))

    def run(self) -> None:
        """The thread's body."""
        try:
            while not self._stopping.is_set():
                self.turn()
        except Exception as error:  # whatever it is, the trainer's thread raises it from check_health
            logger.error("no more groups will be leased: %s", error, exc_info=not isinstance(error, ClientError))
            self.condition = Condition(fatal=error)
        while not self._stopping.wait(AGAIN_S):
            self.renew()

    def turn(self) -> None:
        """One step: renew what is due, then put a row, or lease."""
        self.renew()
        if self._outbox:
            try:
                self._buffer.put(self._outbox[0], timeout=SLICE_S)
            except queue.Full:
                return
            self._outbox.popleft()
        elif self._buffer.wanted.wait(SLICE_S) and (lease := self._lease()) is not None:
            self._open(lease)

    # leasing

    def _lease(self) -> Lease | None:
        """A lease with groups, or None: nothing now. Raises what waiting cannot mend."""
        self._asking = self._asking or str(uuid.uuid4())
        try:
            lease = self._client.lease(**self._ask, request_id=self._asking)
        except Halted as halted:
            self._asking = None
            self.condition = Condition(halted=halted)
            self._stopping.wait(AGAIN_S)
            return None
        except PASSING as error:
            since = self.condition.since
            if self.condition.trouble is None:
                logger.warning("no lease for now, trying on: %s", error)
                since = self._clock()
            self.condition = Condition(trouble=error, since=since)
            self._stopping.wait(AGAIN_S)
            return None
        except Conflict as error:
            logger.warning("the lease of a call that was asked again has ended meanwhile: %s", error)
            self._asking = None
            self._stopping.wait(AGAIN_S)
            return None
        except ClientError:
            self._asking = None  # refused: there is no lease to look for
            raise
        self._asking = None
        exhausted = lease.status is LeaseStatus.EXHAUSTED
        self.condition = Condition(exhausted=exhausted)
        if exhausted:
            self._stopping.wait(AGAIN_S)  # a rewind may open groups again
        return lease if lease.groups else None

    def _open(self, lease: Lease) -> None:
        lease_id = lease.lease_id or ""
        if self._stopping.is_set():
            self._release(lease_id, [group.group_id for group in lease.groups])
            return
        try:
            deliveries = [self._delivery(group) for group in lease.groups]
        except UnfitSample:
            self._release(lease_id, [group.group_id for group in lease.groups])
            raise
        rows, too_old = self._buffer.take(
            lease_id, deliveries, renew_every_s=self._ask["lease_s"] / 2, now=self._clock()
        )
        self._outbox.extend(rows)
        if rows:
            self._buffer.wanted.clear()  # before they arrive: who finds the buffer empty after them wants more
        if too_old:
            self._release(lease_id, too_old)

    def _delivery(self, group: Group) -> Delivery:
        rows, skipped = to_samples(group, version_offset=self._offset, now=time.time())
        return Delivery(group_id=group.group_id, version=group.policy_version, rows=tuple(rows), skipped=skipped)

    def _release(self, lease_id: str, group_ids: list[str]) -> None:
        try:
            self._client.release(lease_id, group_ids)
        except ClientError as error:  # they come back when the lease runs out
            logger.warning("groups %s of lease %s were not given back: %s", ", ".join(group_ids), lease_id, error)

    # renewing

    def renew(self) -> None:
        """Renew what is due. A lease that is lost takes its rows out of the buffer."""
        for lease_id in self._buffer.renewals_due(self._clock()):
            try:
                self._client.renew(lease_id)
            except (Conflict, NotFound) as error:
                names = ", ".join(self._buffer.lose(lease_id))
                logger.warning("lease %s is lost, with the groups %s: %s", lease_id, names, error)
            except ClientError as error:
                logger.warning("lease %s could not be renewed yet: %s", lease_id, error)
                self._buffer.renewed(lease_id, now=self._clock(), again_in_s=AGAIN_S)
                return  # each try may cost seconds; the others are still due in the next turn
            else:
                self._buffer.renewed(lease_id, now=self._clock())
