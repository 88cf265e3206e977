"""The queue TRL drains, and beside it the ledger of the groups its rows belong to.

What always holds:

- Queue and ledger change together under one lock, the queue's own `mutex`. Nothing is waited for while it is held but
  the queue's conditions; no HTTP call is made under it.
- A row enters only while the ledger holds its group, so what was given back or lost can never be trained.
- The ledger knows of a row's departure in the same instant in which the trainer gets it.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trainer_client.trl.ledger import Key, Ledger
from trainer_client.trl.samples import RolloutSample


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What is put; `get` gives its sample only."""

    key: Key
    sample: RolloutSample


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """A leased group made ready for the buffer."""

    group_id: str
    version: int
    """The service's policy version."""
    rows: tuple[RolloutSample, ...]
    skipped: int
    """Samples without a token to train."""


class RolloutBuffer(queue.Queue[Any]):
    """`queue.Queue` of at most `maxsize` rows (0: no bound) for the trainer's `get`; the rest is the worker's."""

    def __init__(self, maxsize: int) -> None:
        self._ledger = Ledger()
        self._version = 0
        self._max_staleness = 0
        self._skipped = 0
        self._delivered = 0
        self.wanted = threading.Event()
        """Set when the trainer found the buffer empty; whoever fetches more clears it first."""
        super().__init__(maxsize)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next sample, for the trainer."""
        if self.empty():
            self.wanted.set()
        return super().get(block, timeout)

    # hooks of queue.Queue, called with the mutex held

    def _init(self, maxsize: int) -> None:
        self.queue: deque[Row] = deque()

    def _qsize(self) -> int:
        return len(self.queue)

    def _put(self, item: Row) -> None:
        if self._ledger.holds(item.key):
            self.queue.append(item)
            self._delivered += 1

    def _get(self) -> RolloutSample:
        row = self.queue.popleft()
        self._ledger.left(row.key)
        return row.sample

    # for the feeder

    def take(
        self, lease_id: str, deliveries: Iterable[Delivery], *, renew_every_s: float, now: float
    ) -> tuple[list[Row], list[str]]:
        """Hold these groups; returns their rows, to be put, and the groups that are too old, to be given back."""
        rows: list[Row] = []
        too_old: list[str] = []
        with self.mutex:
            self._ledger.opened(lease_id, renew_every_s=renew_every_s, now=now)
            for delivery in deliveries:
                if self._version - delivery.version > self._max_staleness:
                    too_old.append(delivery.group_id)
                    continue
                key = (lease_id, delivery.group_id)
                self._ledger.take(key, version=delivery.version, rows=len(delivery.rows))
                self._skipped += delivery.skipped
                rows += [Row(key=key, sample=sample) for sample in delivery.rows]
        return rows, too_old

    def renewals_due(self, now: float) -> list[str]:
        """Leases to renew now."""
        with self.mutex:
            return self._ledger.renewals_due(now)

    def renewed(self, lease_id: str, *, now: float, again_in_s: float | None = None) -> None:
        """As the ledger's."""
        with self.mutex:
            self._ledger.renewed(lease_id, now=now, again_in_s=again_in_s)

    def lose(self, lease_id: str) -> list[str]:
        """Take out what is left of a lost lease; returns its groups."""
        with self.mutex:
            lost = self._ledger.lost(lease_id)
            self._sweep()
            return lost

    # for the trainer's thread

    def acks_due(self, ahead: int) -> dict[str, list[str]]:
        """Lease -> groups that are trained."""
        with self.mutex:
            return self._ledger.due(ahead)

    def forget(self, lease_id: str, group_ids: Iterable[str]) -> None:
        """They were acked, or are somebody else's."""
        with self.mutex:
            self._ledger.forget((lease_id, group_id) for group_id in group_ids)

    def settle(self, max_staleness: int) -> None:
        """The bound on staleness, once it is known."""
        with self.mutex:
            self._max_staleness = max_staleness

    def advance(self, version: int) -> dict[str, list[str]]:
        """A new policy version. Takes out what it makes stale, but for groups TRL has begun; lease -> those groups."""
        with self.mutex:
            self._version = version
            keys = self._ledger.too_old(version, self._max_staleness)
            self._ledger.forget(keys)
            self._sweep()
        found: dict[str, list[str]] = {}
        for lease_id, group_id in keys:
            found.setdefault(lease_id, []).append(group_id)
        return found

    def spent(self) -> int:
        """Groups neither acked nor given back of which every row is TRL's."""
        with self.mutex:
            return self._ledger.spent()

    def empty_out(self) -> dict[str, list[str]]:
        """Forget everything; lease -> groups to give back."""
        with self.mutex:
            held = self._ledger.held()
            self._ledger = Ledger()
            self._sweep()
            return held

    def counts(self) -> tuple[int, int]:
        """Rows put so far, and samples left out so far."""
        with self.mutex:
            return self._delivered, self._skipped

    def _sweep(self) -> None:
        """With the mutex held: drop rows of groups that are not held, and let whoever waits for room know."""
        self.queue = deque(row for row in self.queue if self._ledger.holds(row.key))
        self.not_full.notify_all()
