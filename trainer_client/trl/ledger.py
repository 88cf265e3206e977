"""What became of every group this worker holds: leased → left (all its rows are TRL's) → acked. Pure.

What always holds:

- A group is due for its ack only when every row of it has left the buffer, and the trainer has used them as far as
  `ahead` tells (see `due`). A group without rows is due at once.
- A group of which TRL has no row yet can be dropped whole; one that TRL has begun stays until it is due.
- Deliveries are told apart by lease: the same group, leased again, is another entry.
- What a lost lease held is forgotten, but for groups TRL has begun: those count as complete, for their ack may still
  be accepted (the service has them ready again in the same attempt).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Key = tuple[str, str]
"""Lease id, group id."""


@dataclass(kw_only=True, slots=True)
class _Held:
    version: int
    total: int
    """Rows to leave the buffer."""
    left: int = 0
    last: int = 0
    """Place of the last row among all that have left, counted from 1."""


@dataclass(kw_only=True, slots=True)
class _Lease:
    every_s: float
    renew_at: float


class Ledger:
    """Not thread-safe; its owner locks."""

    def __init__(self) -> None:
        self._held: dict[Key, _Held] = {}
        self._leases: dict[str, _Lease] = {}
        self._left = 0

    # leases

    def opened(self, lease_id: str, *, renew_every_s: float, now: float) -> None:
        """A lease to keep alive while any of its groups is held."""
        self._leases[lease_id] = _Lease(every_s=renew_every_s, renew_at=now + renew_every_s)

    def renewals_due(self, now: float) -> list[str]:
        """Leases to renew now. Those that hold nothing any more are forgotten."""
        in_use = {lease_id for lease_id, _ in self._held}
        self._leases = {lease_id: lease for lease_id, lease in self._leases.items() if lease_id in in_use}
        return [lease_id for lease_id, lease in self._leases.items() if lease.renew_at <= now]

    def renewed(self, lease_id: str, *, now: float, again_in_s: float | None = None) -> None:
        """Renewed (None), or to be tried again in so many seconds."""
        if (lease := self._leases.get(lease_id)) is not None:
            lease.renew_at = now + (lease.every_s if again_in_s is None else again_in_s)

    def lost(self, lease_id: str) -> list[str]:
        """The lease is no longer ours; returns the groups that were still held under it."""
        self._leases.pop(lease_id, None)
        keys = [key for key in self._held if key[0] == lease_id]
        for key in keys:
            if self._held[key].left:
                self._held[key].total = self._held[key].left
            else:
                del self._held[key]
        return [group_id for _, group_id in keys]

    # groups

    def take(self, key: Key, *, version: int, rows: int) -> None:
        """A group of a lease, of which `rows` rows will be put into the buffer."""
        self._held[key] = _Held(version=version, total=rows)

    def holds(self, key: Key) -> bool:
        """Whether more rows of this delivery may enter the buffer."""
        held = self._held.get(key)
        return held is not None and held.left < held.total

    def left(self, key: Key) -> None:
        """One row went to the trainer."""
        self._left += 1
        held = self._held[key]
        held.left += 1
        held.last = self._left

    def due(self, ahead: int) -> dict[str, list[str]]:
        """Lease -> groups to ack, if the last `ahead` rows that left are fetched but not trained yet."""
        trained = self._left - ahead
        return _by_lease(
            k for k, held in self._held.items() if held.left == held.total and held.last <= max(trained, 0)
        )

    def too_old(self, version: int, max_staleness: int) -> list[Key]:
        """Groups that are stale at `version` and of which TRL has no row."""
        return [k for k, held in self._held.items() if not held.left and version - held.version > max_staleness]

    def forget(self, keys: Iterable[Key]) -> None:
        """They were acked or given back."""
        for key in keys:
            self._held.pop(key, None)

    def spent(self) -> int:
        """Groups held of which every row is TRL's."""
        return sum(held.left == held.total for held in self._held.values())

    def held(self) -> dict[str, list[str]]:
        """Lease -> every group neither acked nor given back."""
        return _by_lease(self._held)


def _by_lease(keys: Iterable[Key]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for lease_id, group_id in keys:
        found.setdefault(lease_id, []).append(group_id)
    return found
