"""Ordered collections of group numbers, with removal in the middle, for the scheduler.

What always holds: a member is in a queue once; iteration order depends on the members alone, never on hashing.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator


class SeqQueue:
    """Group numbers, lowest first. `add` and `discard` are O(log n) and O(1); removed ones leave the heap lazily."""

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, seq: int) -> bool:
        return seq in self._members

    def add(self, seq: int) -> None:
        if seq not in self._members:
            self._members.add(seq)
            heapq.heappush(self._heap, seq)

    def discard(self, seq: int) -> None:
        self._members.discard(seq)
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._members):
            self._heap = sorted(self._members)

    def first(self) -> int | None:
        """The lowest member; None when empty."""
        while self._heap:
            seq = self._heap[0]
            if seq in self._members:
                # a number that left and came back stands twice; the second is skipped when it turns up
                return seq
            heapq.heappop(self._heap)
        return None


class ReadyQueue:
    """Ready groups in delivery order: oldest policy version first, then submission order."""

    def __init__(self) -> None:
        self._order: list[tuple[int, int]] = []
        self._bytes: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return (seq for _, seq in self._order)

    def add(self, seq: int, *, version: int, payload_bytes: int) -> None:
        insort(self._order, (version, seq))
        self._bytes[seq] = (version, payload_bytes)

    def discard(self, seq: int) -> None:
        entry = self._bytes.pop(seq, None)
        if entry is not None:
            self._order.remove((entry[0], seq))

    def take(self, *, max_groups: int, max_bytes: int) -> list[int]:
        """The next numbers to deliver, not removed: at most `max_groups`, at most `max_bytes` but never below one."""
        taken: list[int] = []
        total = 0
        for _, seq in self._order[:max_groups]:
            total += self._bytes[seq][1]
            if taken and total > max_bytes:
                break
            taken.append(seq)
        return taken
