"""A SQLite store as rows, to move a run from it or into it.

What always holds: a store that is read is locked against its service and not a byte of its file is changed. A store
that is written is a file of another name until it is complete and on disk; then it takes its name at once. What an
interrupted copy left under the other name is removed by the next.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from rollout_service.core.model import GroupState
from rollout_service.core.records import Batch, RunState
from rollout_service.core.shared import SharedRun
from rollout_service.errors import ConfigError
from rollout_service.store import sqlite_file
from rollout_service.store import sqlite_queries as sql
from rollout_service.store.raw_rows import Row, Table, parts
from rollout_service.store.sqlite_write import BatchWriter

READ: Final[Mapping[Table, str]] = {
    Table.LEASES: """
        SELECT lease_id, request_id, consumer, max_groups, min_groups, lease_s, policy_version, created_at, expires_at,
            state FROM leases""",
    Table.GROUPS: """
        SELECT g.seq, g.prompt_id, g.epoch, g.digest, g.num_generations, g.state, g.attempt, g.tries, g.version, g.rows,
            g.payload_bytes, g.reason, g.error, g.engine, g.lease_id, g.acked_by, g.end_number, g.submitted_at,
            g.changed_at, p.payload
        FROM groups AS g LEFT JOIN prompts AS p ON p.seq = g.seq ORDER BY g.seq""",
    Table.LEASE_GROUPS: "SELECT lease_id, position, seq, attempt FROM lease_groups",
    Table.ROLLOUTS: """
        SELECT r.seq, r.attempt, r.idx, r.ok, r.payload_bytes, p.payload
        FROM rollouts AS r LEFT JOIN payloads AS p ON p.id = r.payload_id ORDER BY r.seq, r.attempt, r.idx""",
    Table.SCORES: "SELECT seq, attempt, payload FROM scores",
    Table.CHECKPOINTS: "SELECT name, number, policy_version, ends, created_at FROM checkpoints",
}

WRITE: Final[Mapping[Table, str]] = {
    Table.LEASES: sql.INSERT_LEASE,
    Table.GROUPS: """
        INSERT INTO groups (seq, prompt_id, epoch, digest, num_generations, state, attempt, tries, version, rows,
            payload_bytes, reason, error, engine, lease_id, acked_by, end_number, submitted_at, changed_at)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
    Table.LEASE_GROUPS: sql.INSERT_LEASE_GROUP,
    Table.ROLLOUTS: sql.INSERT_ROLLOUT,
    Table.SCORES: "INSERT INTO scores (seq, attempt, payload) VALUES (?, ?, ?)",
    Table.CHECKPOINTS: sql.INSERT_CHECKPOINT,
}

_ENDED: Final = (GroupState.ACKED, GroupState.STALE, GroupState.DROPPED, GroupState.FAILED)
"""In the order of READ_RUN."""

_BESIDE: Final = ("", "-wal", "-shm", "-journal")


class SqliteSource:
    """Reads through `connection`. Use `source`."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection, self._path = connection, path

    async def run(self) -> SharedRun:
        with sqlite_file.config_errors(self._path, "read"):
            row = self._connection.execute(sql.READ_RUN).fetchone()
        return SharedRun(
            run=RunState(
                policy_version=row[0],
                paused=bool(row[1]),
                final=bool(row[2]),
                last_seq=row[3],
                read_position=row[4],
                prompts_fingerprint=row[5],
                ended=dict(zip(_ENDED, row[7:], strict=True)),
                ends=row[6],
            )
        )

    async def engines(self) -> int:
        return 0

    async def rows(self, table: Table) -> AsyncIterator[Sequence[Row]]:
        with sqlite_file.config_errors(self._path, "read"):
            found: Iterator[Row] = iter(self._connection.execute(READ[table]))
            if table is Table.ROLLOUTS:
                found = (self._rollout(row) for row in found)
            for part in parts(table, found):
                yield part

    def _rollout(self, row: Row) -> Row:
        seq, attempt, index, ok, size, payload = row
        if payload is None:
            raise ConfigError(f"store {self._path} is corrupt: rollout {index} of group {seq} has lost its content")
        return seq, attempt, index, bool(ok), size, payload


class SqliteTarget(SqliteSource):
    """Writes the new file `path` that will be `name`. Use `target`."""

    def __init__(self, connection: sqlite3.Connection, path: Path, name: Path) -> None:
        super().__init__(connection, path)
        self._name = name
        self._payloads = 0
        self._triggers = [row[0] for row in connection.execute("SELECT sql FROM sqlite_schema WHERE type = 'trigger'")]
        # They judge steps of a run, of which these rows are the outcome: the failed rollouts of a group that ended are
        # of no row that is generated. Keys, references and checks judge the rows as ever.
        for (trigger,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            connection.execute(f'DROP TRIGGER "{trigger}"')
        # Nobody looks before it is whole; `publish` syncs it.
        connection.execute("PRAGMA synchronous = OFF")

    async def write(self, table: Table, rows: Sequence[Row]) -> None:
        many = self._connection.executemany
        with sqlite_file.config_errors(self._name, "written"):
            self._connection.execute("BEGIN")
            if table is Table.GROUPS:
                many(WRITE[table], [row[:-1] for row in rows])
                many(sql.INSERT_PROMPT, [(row[0], row[-1]) for row in rows if row[-1] is not None])
            elif table is Table.ROLLOUTS:
                ids = range(self._payloads + 1, self._payloads + 1 + len(rows))
                many(WRITE[table], [(*row[:-1], payload_id) for payload_id, row in zip(ids, rows, strict=True)])
                many(sql.INSERT_PAYLOAD, [(payload_id, row[-1]) for payload_id, row in zip(ids, rows, strict=True)])
                self._payloads += len(rows)
            else:
                many(WRITE[table], rows)
            self._connection.execute("COMMIT")

    async def complete(self, run: SharedRun) -> SharedRun:
        with sqlite_file.config_errors(self._name, "written"):
            self._connection.execute("BEGIN")
            BatchWriter(self._connection, max_staleness=0).write(Batch(run=run.run))
            for trigger in self._triggers:
                self._connection.execute(trigger)
            self._connection.execute("COMMIT")
        return SharedRun(run=run.run)

    async def publish(self) -> None:
        with sqlite_file.config_errors(self._name, "written"):
            (busy, *_) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self._connection.close()
        if busy:
            raise ConfigError(f"store {self._name} cannot be written: somebody reads {self._path}")
        try:
            _sync(self._path)
            os.replace(self._path, self._name)
            _sync(self._name.parent)
        except OSError as exc:
            raise ConfigError(f"store {self._name} cannot be written: {exc.strerror}") from exc


@contextmanager
def source(path: Path) -> Iterator[SqliteSource]:
    """Raises ConfigError where `path` is no store of this version, is in use, or is corrupt."""
    if not sqlite_file.check_path(path):
        raise ConfigError(f"store {path} does not exist")
    newest = sqlite_file.newest_version()
    sqlite_file.check_header(path, newest)
    lock = sqlite_file.StoreLock(path)
    lock.acquire()
    try:
        with (
            sqlite_file.config_errors(path, "read"),
            closing(sqlite_file.open_reader(path, busy_s=sqlite_file.BUSY_S)) as connection,
        ):
            connection.execute("BEGIN")  # one view, should some other tool write
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version < newest:
                raise ConfigError(
                    f"store {path} is of an older version (schema {version}, this one's is {newest}); `store compact`"
                    " brings it up to date"
                )
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise ConfigError(f"store {path} is corrupt: {' '.join(found.split())}")
            yield SqliteSource(connection, path)
    finally:
        lock.release()


@contextmanager
def target(path: Path) -> Iterator[SqliteTarget]:
    """Raises ConfigError where there is something at `path` already, or nothing can be made there."""
    if sqlite_file.check_path(path):
        raise ConfigError(f"store {path} exists already; a run is copied into a new file")
    for suffix in _BESIDE[1:]:  # SQLite would take it for the new file's own
        if _beside(path, suffix).exists():
            raise ConfigError(f"{_beside(path, suffix)} is left of a store that is gone; move it away")
    unfinished = path.with_name(f"{path.name}.copying")
    lock = sqlite_file.StoreLock(path)
    lock.acquire()
    try:
        _remove(unfinished)
        try:
            with (
                sqlite_file.config_errors(path, "written"),
                closing(sqlite_file.open_writer(unfinished, busy_s=sqlite_file.BUSY_S)) as connection,
            ):
                yield SqliteTarget(connection, unfinished, path)
        finally:
            _remove(unfinished)
    finally:
        lock.release()


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _remove(path: Path) -> None:
    for suffix in _BESIDE:
        _beside(path, suffix).unlink(missing_ok=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
