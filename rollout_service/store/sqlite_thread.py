"""The threads of a SQLite store: one that writes, one that answers large reads. The event loop only waits for them.

What always holds: jobs take effect in the order they were put, reads included. Commits that wait together share one
transaction (one sync) and are answered together: after it is durable, or all with the error that undid it. After a
failed commit every further one is refused until a snapshot was loaded, because it was made from a state that never was.

A large read must not hold up the commits behind it, and must not see them either. So the writer, when the read's turn
comes, only begins a read transaction on a connection of its own, which pins what is visible, and hands that over.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rollout_service.core.records import Batch
from rollout_service.errors import StoreUnavailable
from rollout_service.store import sqlite_file, sqlite_read
from rollout_service.store import sqlite_queries as sql
from rollout_service.store.sqlite_write import BatchWriter, Refused

GROUP_COMMIT_LIMIT: Final = 64
"""Batches in one transaction at most: bounds what one failure undoes and how long the first of them waits."""

READERS: Final = 3
"""Large reads begun and not answered yet; beyond that a read waits, and the commits behind it."""

Read = Callable[[sqlite3.Connection], Any]


@dataclass(frozen=True, slots=True)
class Open:
    future: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class Commit:
    batch: Batch
    future: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class Load:
    future: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class SmallRead:
    read: Read
    future: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class LargeRead:
    read: Read
    future: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class Close:
    future: asyncio.Future[Any]


Job = Open | Commit | Load | SmallRead | LargeRead | Close
Answer = tuple[asyncio.Future[Any], Any, BaseException | None]


class SqliteThreads:
    """Takes jobs; resolves their futures on the loop that made them. Everything below `put` runs in the threads."""

    def __init__(self, path: Path, *, max_staleness: int, busy_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._path = path
        self._max_staleness = max_staleness
        self._busy_s = busy_s
        self._loop = loop
        self._lock = sqlite_file.StoreLock(path)
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._pinned: queue.SimpleQueue[tuple[LargeRead, sqlite3.Connection] | None] = queue.SimpleQueue()
        self._idle: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        self._readers: list[sqlite3.Connection] = []
        self._failure: str | None = None
        """Why commits are refused until the next load."""
        # Daemons: a process that ends without `close` must not hang; what was acknowledged is on disk already.
        self._writer = threading.Thread(target=self._write, name="store-writer", daemon=True)
        self._reader = threading.Thread(target=self._read, name="store-reader", daemon=True)

    def start(self) -> None:
        self._writer.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def join(self) -> None:
        """To be called after the future of `Close` (or of a failed `Open`): the thread has nothing left to do."""
        self._writer.join()

    # --- the writing thread

    def _write(self) -> None:
        opening = self._jobs.get()
        try:
            connection = self._open()
            writer = BatchWriter(connection, max_staleness=self._max_staleness)
        except BaseException as exc:  # whatever it is, `open` raises it
            self._lock.release()
            self._answer([(opening.future, None, exc)])
            return
        self._reader.start()
        self._answer([(opening.future, None, None)])
        waiting: Job | None = None
        while True:  # no job may end the thread by an error: those behind it would wait for ever
            job = waiting or self._jobs.get()
            waiting = None
            match job:
                case Commit():
                    commits, waiting = self._together(job)
                    self._commit(connection, writer, commits)
                case Load():
                    self._load(connection, job)
                case SmallRead():
                    self._answer([self._run(connection, job)])
                case LargeRead():
                    self._pin(job)
                case Close():
                    self._answer([self._close(connection, job)])
                    return
                case Open():
                    raise AssertionError("opened twice")

    def _open(self) -> sqlite3.Connection:
        exists = sqlite_file.check_path(self._path)
        if exists:  # before the lock too: a file that is not ours gets no lock beside it
            sqlite_file.check_header(self._path, sqlite_file.newest_version())
        self._lock.acquire()
        return sqlite_file.open_writer(self._path, busy_s=self._busy_s)

    def _close(self, connection: sqlite3.Connection, job: Close) -> Answer:
        self._pinned.put(None)
        self._reader.join()  # finishes the reads it was handed; bounded by them
        try:
            for reader in self._readers:
                reader.close()
            connection.close()  # the last one: copies the log into the file
        except sqlite3.Error as exc:
            return job.future, None, self._unreadable(exc)
        finally:
            self._lock.release()
        return job.future, None, None

    def _together(self, first: Commit) -> tuple[list[Commit], Job | None]:
        """`first` and the commits that already wait right behind it; and the other job met, if one was."""
        commits = [first]
        while len(commits) < GROUP_COMMIT_LIMIT:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if not isinstance(job, Commit):
                return commits, job
            commits.append(job)
        return commits, None

    def _commit(self, connection: sqlite3.Connection, writer: BatchWriter, commits: Sequence[Commit]) -> None:
        error: StoreUnavailable | None = None
        if self._failure is not None:
            error = StoreUnavailable(f"{self._failure}; nothing is committed until the store was loaded again")
        else:
            try:
                connection.execute("BEGIN IMMEDIATE")
                for commit in commits:
                    writer.write(commit.batch)
                connection.execute("COMMIT")
            except Exception as exc:  # a full disk and a bug of the caller alike: all of it is undone
                error = self._undo(connection, exc)
        self._answer([(commit.future, None, error) for commit in commits])

    def _undo(self, connection: sqlite3.Connection, exc: Exception) -> StoreUnavailable:
        if connection.in_transaction:
            with suppress(sqlite3.Error):  # SQLite has undone it itself where it says there is nothing to undo
                connection.execute("ROLLBACK")
        self._failure = (
            f"the store refused a batch: {exc}" if isinstance(exc, Refused) else f"cannot commit to {self._path}: {exc}"
        )
        error = StoreUnavailable(self._failure)
        error.__cause__ = exc
        return error

    def _load(self, connection: sqlite3.Connection, job: Load) -> None:
        answer = self._run(connection, SmallRead(sqlite_read.snapshot, job.future))
        if answer[2] is None:
            self._failure = None
        self._answer([answer])

    def _run(self, connection: sqlite3.Connection, job: SmallRead | LargeRead) -> Answer:
        try:
            return job.future, job.read(connection), None
        except Exception as exc:
            return job.future, None, self._unreadable(exc)

    def _unreadable(self, exc: Exception) -> StoreUnavailable:
        error = StoreUnavailable(f"cannot read {self._path}: {exc}")
        error.__cause__ = exc
        return error

    def _pin(self, job: LargeRead) -> None:
        try:
            connection = self._idle_reader()
        except sqlite3.Error as exc:
            self._answer([(job.future, None, self._unreadable(exc))])
            return
        try:
            connection.execute("BEGIN")
            connection.execute(sql.READ_POLICY_VERSION).fetchone()  # the first read is what fixes the view
        except sqlite3.Error as exc:
            self._readers.remove(connection)  # another one takes its place
            connection.close()
            self._answer([(job.future, None, self._unreadable(exc))])
            return
        self._pinned.put((job, connection))

    def _idle_reader(self) -> sqlite3.Connection:
        if self._idle.empty() and len(self._readers) < READERS:
            self._readers.append(sqlite_file.open_reader(self._path, busy_s=self._busy_s))
            return self._readers[-1]
        return self._idle.get()

    # --- the reading thread

    def _read(self) -> None:
        while (pinned := self._pinned.get()) is not None:
            job, connection = pinned
            answer = self._run(connection, job)
            with suppress(sqlite3.Error):  # a broken connection shows at its next BEGIN
                connection.execute("COMMIT")
            self._idle.put(connection)
            self._answer([answer])

    # --- both

    def _answer(self, answers: Sequence[Answer]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(_resolve, answers)


def _resolve(answers: Sequence[Answer]) -> None:
    for future, result, error in answers:
        if future.done():  # whoever waited was cancelled; the job took effect all the same
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
