"""Kills the service from inside at a named point of a commit, without a hook in production code.

What always holds: a point is met only while a lease lives, a rollout is in flight and, before a commit, the
transaction is open with everything written; the report of the kill is on disk before the kill; nothing runs after it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

from rollout_service import app, run, store
from rollout_service.core.group import LeaseState
from rollout_service.core.model import FinishedRollout, GroupState
from rollout_service.core.records import Batch
from rollout_service.store import sqlite_file, sqlite_thread
from rollout_service.store.sqlite import SqliteStore
from rollout_service.store.sqlite_write import BatchWriter

S = GroupState


class Moment(StrEnum):
    """When, around a commit."""

    BEFORE = "before"
    """Everything is written, the transaction is open."""
    AFTER = "after"
    """It is committed, and nobody has been told."""
    TOLD = "told"
    """Its effects have left, and no caller has been answered."""


class Kind(StrEnum):
    """What a batch contains."""

    SUBMITTED = "submitted"
    """New prompts."""
    OPENED = "opened"
    """The first dispatch of an attempt."""
    SETTLED = "settled"
    """A finished rollout."""
    SCORED = "scored"
    """A score."""
    LEASED = "leased"
    """A lease is made."""
    ACKED = "acked"
    """Groups are acked."""
    RELEASED = "released"
    """Groups come back from a lease before its time is over."""
    EXPIRED = "expired"
    """A lease's time is over."""
    BUMPED = "bumped"
    """A higher policy version."""
    PAUSED = "paused"
    """A pause begins or ends."""
    STALE = "stale"
    """A group ends stale."""
    AGAIN = "again"
    """The rest of a group is pending for another attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The `nth` batch of the process that contains `kind` and finds a live lease and a rollout in flight."""

    kind: Kind
    moment: Moment
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.moment}-{self.kind}-{self.nth}"


def order(point: Point) -> tuple[str, Any]:
    """For `Lives.begin`: the life is to end at `point`."""
    return "tests.durability.crashing:obey", asdict(point)


def obey(given: dict[str, Any]) -> None:
    """In the new life."""
    point = Point(kind=Kind(given["kind"]), moment=Moment(given["moment"]), nth=given["nth"])
    install(point, report_of(Path.cwd()))


def report_of(directory: Path) -> Path:
    """Where a life that ends at its point says so."""
    return directory / "crash.json"


def install(point: Point, report: Path) -> None:
    """Have this process end at `point`; call it before the service is made."""
    watch = _Watch(point, report)

    class Parts(app.Parts):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            watch.parts = self

    class Writer(BatchWriter):
        def write(self, batch: Batch) -> None:
            super().write(batch)
            watch.written.append(batch)

    class Store(SqliteStore):
        async def commit(self, batch: Batch) -> None:
            await super().commit(batch)
            if watch.met and point.moment is Moment.TOLD:
                asyncio.get_running_loop().call_soon(watch.die)  # effects run before the loop's next callback

    opened, open_store = sqlite_file.open_writer, store.open_store

    def open_writer(path: Path, *, busy_s: float) -> Any:
        return _Connection(opened(path, busy_s=busy_s), watch)

    def make_store(*args: Any, **kwargs: Any) -> Any:
        made = open_store(*args, **kwargs)
        made.__class__ = Store
        return made

    # Replaced in this process alone, under the names by which they are found there.
    setattr(app, "Parts", Parts)  # noqa: B010  # a class is no variable to mypy
    setattr(run, "open_store", make_store)  # noqa: B010  # imported there, not exported
    setattr(sqlite_thread, "BatchWriter", Writer)  # noqa: B010  # as above
    sqlite_file.open_writer = open_writer


class _Connection:
    """The writing connection; its COMMIT passes the watch."""

    def __init__(self, connection: sqlite3.Connection, watch: _Watch) -> None:
        self._connection, self._watch = connection, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
        if statement != "COMMIT":
            return self._connection.execute(statement, *parameters)
        self._watch.before_commit(self._connection)
        done = self._connection.execute(statement)
        self._watch.after_commit(self._connection)
        return done


class _Watch:
    def __init__(self, point: Point, report: Path) -> None:
        self.point, self.report = point, report
        self.parts: app.Parts
        self.written: list[Batch] = []
        self.met = False
        self._left = point.nth
        self._facts: dict[str, Any] = {}
        self._version: int | None = None
        self._paused: bool | None = None

    def before_commit(self, connection: sqlite3.Connection) -> None:
        kinds = {kind for batch in self.written for kind in self._kinds(batch)}
        made = sum(len(_made(batch)) for batch in self.written)
        self.written = []
        if self.point.kind not in kinds or self.met:
            return
        (leases,) = connection.execute("SELECT count(*) FROM leases WHERE state = 'live'").fetchone()
        in_flight = len(self.parts.orchestrator.writer.work._rollouts)
        if leases - made < 1 or in_flight < 1:
            return
        self._left -= 1
        if self._left:
            return
        self.met = True
        self._facts = {"kinds": sorted(kinds), "leases": leases - made, "in_flight": in_flight}
        if self.point.moment is Moment.BEFORE:
            self._facts["transaction"] = connection.in_transaction
            self.die()

    def after_commit(self, connection: sqlite3.Connection) -> None:
        if self.met:
            self._facts["transaction"] = connection.in_transaction
            if self.point.moment is Moment.AFTER:
                self.die()

    def die(self) -> NoReturn:
        self.report.write_text(json.dumps({"point": str(self.point), **self._facts}))
        os.kill(os.getpid(), signal.SIGKILL)
        while True:  # in case the signal takes its time: this thread does nothing any more
            time.sleep(1)

    def _kinds(self, batch: Batch) -> Iterator[Kind]:
        states = {group.state for group in batch.groups.values()}
        if batch.new_groups:
            yield Kind.SUBMITTED
        if S.GENERATING in states:
            yield Kind.OPENED
        if any(isinstance(rollout, FinishedRollout) for rollout in batch.rollouts.values()):
            yield Kind.SETTLED
        if batch.scores:
            yield Kind.SCORED
        if _made(batch):
            yield Kind.LEASED
        if S.ACKED in states:
            yield Kind.ACKED
        yield from _returns(batch)
        if S.STALE in states:
            yield Kind.STALE
        if any(group.state is S.PENDING and group.attempt > 1 for group in batch.groups.values()):
            yield Kind.AGAIN
        run = batch.run
        if run is not None:
            if self._version is not None and run.policy_version > self._version:
                yield Kind.BUMPED
            if self._paused is not None and run.paused is not self._paused:
                yield Kind.PAUSED
            self._version, self._paused = run.policy_version, run.paused


def _made(batch: Batch) -> set[str]:
    """Leases that are made by this batch."""
    held = {group.lease_id for group in batch.groups.values() if group.state is S.LEASED}
    return {lease.lease_id for lease in batch.leases.values() if lease.state is LeaseState.LIVE} & held


def _returns(batch: Batch) -> Iterator[Kind]:
    for lease in batch.leases.values():
        members = [batch.groups[seq] for seq, _ in lease.groups if seq in batch.groups]
        if lease.state is LeaseState.ENDED and any(group.state is not S.ACKED for group in members):
            yield Kind.EXPIRED if lease.expires_at <= time.time() else Kind.RELEASED
