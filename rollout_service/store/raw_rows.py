"""Rows of a run as every durable store can give and take them, so that a run can be moved.

What always holds: a row here is the same whatever store it came from: the columns in this order, text as the service
gave it, payloads as they were packed. What belongs to replicas that live (owners, claims, revision) is not in it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Protocol, TypeVar

import msgspec

from rollout_service.core.model import TERMINAL, GroupState
from rollout_service.core.shared import SharedRun
from rollout_service.store.standing import run_as_kept

T = TypeVar("T")
Row = tuple[Any, ...]

PART_BYTES: Final = 4 * 1024 * 1024
"""Rows are moved in parts of about so many bytes of payload: bounds the memory of a copy."""

PART_ROWS: Final = 500


class Table(StrEnum):
    """In an order in which no row names one that comes later. Members' docstrings are their columns."""

    LEASES = "leases"
    """lease_id, request_id, consumer, max_groups, min_groups, lease_s, policy_version, created_at, expires_at, state"""
    GROUPS = "groups"
    """seq, prompt_id, epoch, digest, num_generations, state, attempt, tries, version, rows, payload_bytes, reason,
    error, engine, lease_id, acked_by, end_number, submitted_at, changed_at, and the prompt or None"""
    LEASE_GROUPS = "lease_groups"
    """lease_id, position, seq, attempt"""
    ROLLOUTS = "rollouts"
    """seq, attempt, idx, ok, payload_bytes, payload"""
    SCORES = "scores"
    """seq, attempt, payload"""
    CHECKPOINTS = "checkpoints"
    """name, number, policy_version, ends, created_at"""


PAYLOADS: Final = frozenset({Table.GROUPS, Table.ROLLOUTS, Table.SCORES})
"""Their last column is a payload."""

_STATE, _END_NUMBER = 5, 16
"""Columns of GROUPS."""


class Source(Protocol):
    """A store that nobody changes meanwhile. Everything raises ConfigError."""

    async def run(self) -> SharedRun:
        """The run's row, `revision` and `taken` left out."""

    def rows(self, table: Table) -> AsyncIterator[Sequence[Row]]:
        """All of them in parts, in any order."""

    async def engines(self) -> int:
        """Engines that were added or removed by hand: only replicas keep that."""


class Target(Source, Protocol):
    """A new store, of which nothing is seen by others before `publish`; as a source it shows what was written."""

    async def write(self, table: Table, rows: Sequence[Row]) -> None:
        """Tables come in the order of `Table`."""

    async def complete(self, run: SharedRun) -> SharedRun:
        """Everything was written: write the run's row, and what follows from the rows. What of `run` it can keep."""

    async def publish(self) -> None:
        """From now on it is a store, durably."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What is in a store, by reading every row of it."""

    run: SharedRun
    rows: Mapping[str, int]
    """By table, and `prompts`."""
    groups: Mapping[GroupState, int]
    """By state, counted; those that are not zero."""
    last_end: int
    """The highest end number a group has."""
    payload_bytes: int
    digest: str
    """Of every row of every table, in any order."""

    def flaw(self) -> str | None:
        """How the run contradicts its groups, if it does."""
        run, groups = self.run.run, sum(self.groups.values())
        if run.last_seq != groups:
            return f"{run.last_seq} groups were submitted, and there are {groups}"
        for state in TERMINAL:
            if run.ended.get(state, 0) != self.groups.get(state, 0):
                return f"{run.ended.get(state, 0)} groups are counted as {state}, and {self.groups.get(state, 0)} are"
        if self.last_end > run.ends:
            return f"{run.ends} ends were counted, and a group has end {self.last_end}"
        return None


class Contents:
    """Adds up what passes by."""

    def __init__(self) -> None:
        self._rows: Counter[str] = Counter()
        self._groups: Counter[str] = Counter()
        self._last_end = 0
        self._payload_bytes = 0
        self._digest = 0
        self._encode = msgspec.msgpack.Encoder().encode

    def add(self, table: Table, rows: Sequence[Row]) -> None:
        self._rows[table.value] += len(rows)
        for row in rows:
            packed = self._encode((table.value, row))
            # A sum, so that two stores may give their rows in different orders.
            self._digest += int.from_bytes(hashlib.sha256(packed).digest(), "big")
        if table in PAYLOADS:
            self._payload_bytes += sum(map(payload_size, rows))
        if table is Table.GROUPS:
            self._rows["prompts"] += sum(row[-1] is not None for row in rows)
            self._groups.update(row[_STATE] for row in rows)
            self._last_end = max(self._last_end, *(row[_END_NUMBER] or 0 for row in rows))

    def content(self, run: SharedRun) -> Content:
        return Content(
            run=replace(run, run=run_as_kept(run.run)),
            rows={name: self._rows[name] for name in (*Table, "prompts")},
            groups={state: self._groups[state] for state in GroupState if self._groups[state]},
            last_end=self._last_end,
            payload_bytes=self._payload_bytes,
            digest=f"{self._digest % 2**256:064x}",
        )


def payload_size(row: Row) -> int:
    """Bytes of the payload in a row of a table in PAYLOADS."""
    return 0 if row[-1] is None else len(row[-1])


def parts(table: Table, rows: Iterable[Row]) -> Iterator[list[Row]]:
    """`rows` in stretches that are small enough to hold."""
    return stretches(rows, payload_size if table in PAYLOADS else lambda _: 0)


def stretches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Of PART_BYTES or one item more, and of PART_ROWS at most."""
    stretch: list[T] = []
    total = 0
    for item in items:
        stretch.append(item)
        total += size(item)
        if total >= PART_BYTES or len(stretch) >= PART_ROWS:
            yield stretch
            stretch, total = [], 0
    if stretch:
        yield stretch
