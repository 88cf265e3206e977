"""Kills a replica from inside right before or after a commit of a named kind, without a hook in production code.

What always holds: before a commit everything of the transaction is written and it is open; after it nobody has been
told. The report is on disk before the kill, and nothing runs after it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

from rollout_service.core.group import LeaseState
from rollout_service.core.model import FinishedRollout, GroupState
from rollout_service.core.records import Batch
from rollout_service.core.shared import SharedRun
from rollout_service.store import postgres
from rollout_service.store.postgres_connections import Connections
from rollout_service.store.postgres_transaction import PostgresTransaction


class Moment(StrEnum):
    """When, around a commit."""

    BEFORE = "before"
    """Everything is written, the transaction is open."""
    AFTER = "after"
    """It is committed, and nobody has been told."""


class Kind(StrEnum):
    """What a transaction did."""

    CLAIMED = "claimed"
    """Groups belong to this replica now."""
    SETTLED = "settled"
    """A finished rollout of a group of its own."""
    SCORED = "scored"
    """A score of one."""
    LEASED = "leased"
    """A lease is made."""
    ACKED = "acked"
    """Groups are acked."""
    RELEASED = "released"
    """Groups came back from a lease, by a call or because its time is over."""
    BUMPED = "bumped"
    """A higher policy version."""
    SUBMITTED = "submitted"
    """New prompts."""
    MARKED = "marked"
    """A checkpoint."""
    TAKEN = "taken"
    """The claims of a dead replica are taken from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The `nth` commit of that kind in a life."""

    kind: Kind
    moment: Moment
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.moment}-{self.kind}-{self.nth}"


def order(point: Point) -> tuple[str, Any]:
    """For `Lives.begin`: the life is to end at `point`."""
    return "tests.replicas_chaos.crashing:obey", asdict(point)


def report_of(directory: Path) -> Path:
    """Where a life that ended at its point says so."""
    return directory / "crash.json"


def obey(given: dict[str, Any]) -> None:
    """In the new life."""
    point = Point(kind=Kind(given["kind"]), moment=Moment(given["moment"]), nth=given["nth"])
    watch = _Watch(point, report_of(Path.cwd()))
    commit = Connections._commit

    class Transaction(PostgresTransaction):
        own = False
        """Of the groups this replica works for."""

        async def once(self, replica_id: str, number: int) -> bool:
            self.own = True
            return await super().once(replica_id, number)

        async def write(self, batch: Batch, *, owner: str | None = None) -> Any:
            watch.done[self._connection] |= set(_kinds(batch, own=self.own, claiming=owner is not None))
            return await super().write(batch, owner=owner)

        async def set_run(self, run: SharedRun) -> None:
            if run.run.policy_version > self.run.run.policy_version:
                watch.done[self._connection].add(Kind.BUMPED)
            await super().set_run(run)

    async def watched_commit(self: Connections, connection: Any, statement: str) -> None:
        kinds = watch.done.pop(connection, set())
        if point.kind is Kind.TAKEN and await _took(connection):
            kinds.add(Kind.TAKEN)
        if watch.meets(kinds) and point.moment is Moment.BEFORE:
            watch.die(transaction=connection.is_in_transaction())
        await commit(self, connection, statement)
        if watch.met:
            watch.die(transaction=connection.is_in_transaction())

    # Replaced in this process alone.
    setattr(postgres, "PostgresTransaction", Transaction)  # noqa: B010  # a class is no variable to mypy
    setattr(Connections, "_commit", watched_commit)  # noqa: B010  # as above


async def _took(connection: Any) -> bool:
    """Whether this very transaction wrote the run's row and forgot a replica: only `expel` does both."""
    query = "SELECT txid_current_if_assigned()::text = xmin::text AS mine, taken FROM run WHERE id = 1"
    try:
        row = await connection.fetchrow(query)
    except Exception:  # a transaction that reads only has no number; whatever this is, the commit tells
        return False
    seen, _Watch.taken = _Watch.taken, row["taken"]
    return bool(row["mine"]) and row["taken"] > seen


class _Watch:
    taken = 0

    def __init__(self, point: Point, report: Path) -> None:
        self.point, self.report = point, report
        self.done: defaultdict[Any, set[Kind]] = defaultdict(set)
        """What the open transaction of each connection did."""
        self.met = False
        self._left = point.nth

    def meets(self, kinds: set[Kind]) -> bool:
        if self.point.kind in kinds:
            self._left -= 1
            self.met = self._left == 0
        return self.met

    def die(self, *, transaction: bool) -> NoReturn:
        self.report.write_text(json.dumps({"point": str(self.point), "transaction": transaction}))
        os.kill(os.getpid(), signal.SIGKILL)
        while True:  # in case the signal takes its time: nothing else runs here any more
            time.sleep(1)


def _kinds(batch: Batch, *, own: bool, claiming: bool) -> Iterator[Kind]:
    states = {group.state for group in batch.groups.values()}
    if claiming and not own:
        yield Kind.CLAIMED
    if own and any(isinstance(rollout, FinishedRollout) for rollout in batch.rollouts.values()):
        yield Kind.SETTLED
    if own and batch.scores:
        yield Kind.SCORED
    if GroupState.LEASED in states and any(lease.state is LeaseState.LIVE for lease in batch.leases.values()):
        yield Kind.LEASED
    if GroupState.ACKED in states:
        yield Kind.ACKED
    if not own and GroupState.READY in states:
        yield Kind.RELEASED
    if batch.new_groups:
        yield Kind.SUBMITTED
    if batch.checkpoints:
        yield Kind.MARKED
