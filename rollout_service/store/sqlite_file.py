"""The file of a SQLite store: who may use it, whether it is ours, and the connections to it.

What always holds: a file is looked at before it is opened for writing, and one that is no store of this version or an
older one is left exactly as it was. One process holds the lock of a store at a time; the operating system lets go of it
when that process dies, however it dies. A folder is never made: a typo in a path must not start an empty run.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from contextlib import closing, contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rollout_service.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

APPLICATION_ID: Final = 0x52534C31
"""Written into the file's header ("RSL1"): tells a store from any other SQLite file."""

PAGE_SIZE: Final = 16384
"""Payloads are kilobytes; larger pages keep them out of overflow chains (design 4.6)."""

CHECKPOINT_PAGES: Final = 1000
"""16 MiB of log before it is copied back into the file: small enough for a quick recovery, large enough to amortize."""

LOG_LIMIT_BYTES: Final = 64 * 1024 * 1024
"""What the log file may keep on disk after a burst (one huge batch, a reader that held a checkpoint back)."""

CACHE_KIB: Final = 32 * 1024
"""Page cache of the writing connection: the standings of about 100,000 groups."""

READER_CACHE_KIB: Final = 8 * 1024

BUSY_S: Final = 5.0
"""How long to wait for a foreign tool (sqlite3 shell, backup) that holds the file."""

CHECK_BUDGET_S: Final = 0.3
"""How long `open` looks for corruption. Small stores are checked whole, the first part of large ones."""

_HEADER_BYTES: Final = 100
_MAGIC: Final = b"SQLite format 3\0"


class StoreLock:
    """Exclusive use of one store, by a lock on a file beside it."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + "-lock")
        self._store = path
        self._fd: int | None = None

    def acquire(self) -> None:
        """Raises ConfigError where another process (or another store object) uses the file."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            raise ConfigError(f"store {self._store}: cannot write {self._path}: {exc.strerror}") from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            by = f" (process {holder})" if holder else ""
            raise ConfigError(f"store {self._store} is in use by another service{by}") from exc
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """The lock file stays: removing it would let two processes lock two files of one name."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def check_path(path: Path) -> bool:
    """Whether there is a store to open; False: an empty one is to be made. Raises ConfigError where neither can be."""
    folder = path.parent
    if not folder.is_dir():
        raise ConfigError(f"store {path}: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"store {path}: the folder {folder} is not writable")
    if not path.exists():
        return False
    if not path.is_file():
        raise ConfigError(f"store {path} is not a file")
    if not os.access(path, os.R_OK | os.W_OK):
        raise ConfigError(f"store {path} is not readable and writable by this user")
    return path.stat().st_size > 0


def check_header(path: Path, newest: int) -> None:
    """Refuse, by reading alone, what is no store or was written by a newer version than schema `newest`."""
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
        raise ConfigError(f"store {path} is not a SQLite database")
    version, application = int.from_bytes(header[60:64], "big"), int.from_bytes(header[68:72], "big")
    log = log_path(path)
    if log.exists() and log.stat().st_size > 0:  # killed before its header reached the file: the log knows better
        with config_errors(path), closing(_connect(path, "ro")) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (application,) = connection.execute("PRAGMA application_id").fetchone()
    elif path.stat().st_size < int.from_bytes(header[28:32], "big") * int.from_bytes(header[16:18], "big"):
        raise ConfigError(f"store {path} is corrupt: the file is shorter than its header says")
    if application == 0 and version == 0 and _is_empty(path):
        return  # killed while it was being made
    if application != APPLICATION_ID:
        raise ConfigError(f"store {path} is a SQLite database of another program (application id {application:#x})")
    _check_version(path, version, newest)


def open_writer(path: Path, *, busy_s: float) -> sqlite3.Connection:
    """The one writing connection, migrated. To be used in the calling thread only. Raises ConfigError."""
    with config_errors(path):
        connection = _connect(path, "rwc", busy_s=busy_s)
        try:
            _prepare(connection, path)
            _migrate(connection, path)
            _look_for_corruption(connection, path)
        except BaseException:
            connection.close()
            raise
        return connection


def open_reader(path: Path, *, busy_s: float) -> sqlite3.Connection:
    """A connection that cannot write. It may be handed from thread to thread."""
    connection = _connect(path, "ro", busy_s=busy_s, check_same_thread=False)
    connection.execute("PRAGMA query_only = ON")
    connection.execute(f"PRAGMA cache_size = -{READER_CACHE_KIB}")
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


def log_path(path: Path) -> Path:
    """Where SQLite keeps the write-ahead log of the store `path`."""
    return path.with_name(path.name + "-wal")


def migrations() -> list[tuple[int, str]]:
    """(number, script) of every migration, ascending from 1 without a gap."""
    folder = resources.files("rollout_service.store") / "migrations" / "sqlite"
    found = sorted((int(file.name.split("_")[0]), file.read_text("utf-8")) for file in folder.iterdir())
    if [number for number, _ in found] != list(range(1, len(found) + 1)):
        raise AssertionError("migrations are numbered 1, 2, 3, ...")
    return found


def newest_version() -> int:
    return len(migrations())


def _connect(path: Path, mode: str, *, busy_s: float = BUSY_S, check_same_thread: bool = True) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=busy_s,
        isolation_level=None,  # transactions are begun and ended by hand
        check_same_thread=check_same_thread,
        cached_statements=256,  # every statement of the store stays compiled
    )


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    run = connection.execute
    run(f"PRAGMA page_size = {PAGE_SIZE}")  # of a new file; an old one keeps its own
    (mode,) = run("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise ConfigError(f"store {path}: this file system cannot hold a write-ahead log (journal mode {mode})")
    run("PRAGMA synchronous = FULL")
    run("PRAGMA foreign_keys = ON")
    run("PRAGMA secure_delete = OFF")  # some builds overwrite removed payloads with zeros: twice the writing
    run(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    run(f"PRAGMA journal_size_limit = {LOG_LIMIT_BYTES}")
    run(f"PRAGMA cache_size = -{CACHE_KIB}")
    run("PRAGMA temp_store = MEMORY")


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Each migration is one transaction together with its number, so that a kill leaves a version or the next one."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    known = migrations()
    _check_version(path, version, len(known))
    missing = known[version:]
    for number, script in missing:
        try:
            connection.executescript(
                f"BEGIN IMMEDIATE;\n{script}\nPRAGMA application_id = {APPLICATION_ID};\n"
                f"PRAGMA user_version = {number};\nCOMMIT;"
            )
        except BaseException:
            with suppress(sqlite3.Error):  # the script's own error is the one to report
                connection.execute("ROLLBACK")
            raise
    if missing:  # the header on disk tells the version without the log
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _look_for_corruption(connection: sqlite3.Connection, path: Path) -> None:
    until = time.monotonic() + CHECK_BUDGET_S
    connection.set_progress_handler(lambda: time.monotonic() > until, 10_000)
    try:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError as exc:
        if exc.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        found = "ok"
    finally:
        connection.set_progress_handler(None, 0)
    if found != "ok":
        raise ConfigError(f"store {path} is corrupt: {' '.join(found.split())}")


def _check_version(path: Path, found: int, newest: int) -> None:
    if found > newest:
        raise ConfigError(f"store {path} was written by a newer version (schema {found}; this one knows {newest})")


def _is_empty(path: Path) -> bool:
    with config_errors(path), closing(_connect(path, "ro")) as connection:
        return connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone() is None


@contextmanager
def config_errors(path: Path, doing: str = "opened") -> Iterator[None]:
    """What SQLite says while a store is opened (or otherwise worked on), as a refusal that names the file."""
    try:
        yield
    except sqlite3.Error as exc:
        code = getattr(exc, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise ConfigError(f"store {path} is corrupt: {exc}") from exc
        raise ConfigError(f"store {path} cannot be {doing}: {exc}") from exc
