"""Looking into a SQLite store and making its file smaller, without the service.

What always holds: `stats` only reads, and may be asked while a service uses the store; `compact` needs the store for
itself and is refused otherwise. Both refuse, as opening would, what is no store of a known version.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rollout_service.errors import ConfigError
from rollout_service.store import sqlite_file
from rollout_service.store import sqlite_queries as sql


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreStats:
    """What is in a store file."""

    schema: int
    """Number of the newest migration in it."""
    file_bytes: int
    log_bytes: int
    """The write-ahead log beside it."""
    free_bytes: int
    """Of the file: pages of removed payloads, used again before the file grows; `compact` gives them back."""
    payload_bytes: int
    """Prompts, rollouts and scores."""
    rows: Mapping[str, int]
    """By table."""
    groups: Mapping[str, int]
    """Groups by state, counted."""
    policy_version: int
    submitted: int

    @property
    def outstanding(self) -> int:
        return sum(self.groups.get(state, 0) for state in ("pending", "generating", "scoring", "ready", "leased"))


def store_stats(path: Path) -> StoreStats:
    """Raises ConfigError where `path` is no store this version can read."""
    _check(path)
    with (
        sqlite_file.config_errors(path, "read"),
        closing(sqlite_file.open_reader(path, busy_s=sqlite_file.BUSY_S)) as reader,
    ):
        reader.execute("BEGIN")  # one view for all of it

        def number(query: str) -> int:
            return int(reader.execute(query).fetchone()[0])

        return StoreStats(
            schema=number("PRAGMA user_version"),
            file_bytes=path.stat().st_size,
            log_bytes=_log_bytes(path),
            free_bytes=number("PRAGMA freelist_count") * number("PRAGMA page_size"),
            payload_bytes=number(sql.SUM_PAYLOADS),
            rows=dict(reader.execute(sql.COUNT_ROWS).fetchall()),
            groups=dict(reader.execute(sql.COUNT_GROUPS).fetchall()),
            policy_version=number(sql.READ_POLICY_VERSION),
            submitted=number(sql.READ_SUBMITTED),
        )


def compact(path: Path) -> tuple[int, int]:
    """Rewrite the file without its free pages; (bytes before, bytes after), the log counted.

    Needs as much free space again as the store has. Raises ConfigError where the store is in use, is no store, or the
    disk is full; the store is then as it was.
    """
    _check(path)
    before = path.stat().st_size + _log_bytes(path)
    lock = sqlite_file.StoreLock(path)
    lock.acquire()
    try:
        with (
            sqlite_file.config_errors(path, "compacted"),
            closing(sqlite_file.open_writer(path, busy_s=sqlite_file.BUSY_S)) as writer,
        ):
            writer.execute("VACUUM")
            writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        lock.release()
    return before, path.stat().st_size + _log_bytes(path)


def _check(path: Path) -> None:
    if not sqlite_file.check_path(path):
        raise ConfigError(f"store {path} does not exist")
    sqlite_file.check_header(path, sqlite_file.newest_version())


def _log_bytes(path: Path) -> int:
    log = sqlite_file.log_path(path)
    return log.stat().st_size if log.exists() else 0
