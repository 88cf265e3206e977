"""Who may use a store file, and what is refused without a byte of it being changed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_service.errors import ConfigError, StoreUnavailable
from rollout_service.store import SqliteStore, open_store
from rollout_service.store.memory import MemoryStore
from rollout_service.store.sqlite_file import APPLICATION_ID, newest_version
from tests.contract.store_samples import MAX_STALENESS, scored, submitted


def store_at(path: Path) -> SqliteStore:
    return SqliteStore(path, max_staleness=MAX_STALENESS)


async def made(path: Path) -> None:
    store = store_at(path)
    await store.open()
    await store.commit(scored(1, 2))
    await store.close()


async def refused(path: Path, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        await store_at(path).open()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


# --- one service at a time


async def test_a_store_in_use_is_refused_and_the_user_keeps_it(tmp_path: Path) -> None:
    first = store_at(tmp_path / "a.db")
    await first.open()
    await refused(tmp_path / "a.db", rf"is in use by another service \(process {os.getpid()}\)")
    await first.commit(submitted(1))
    await first.close()
    await made(tmp_path / "b.db")
    second = store_at(tmp_path / "a.db")
    await second.open()
    assert len((await second.load()).groups) == 1
    await second.close()


CHILD = """
import asyncio, sys
from pathlib import Path
from rollout_service.store import SqliteStore
from tests.contract.store_samples import submitted

async def main():
    store = SqliteStore(Path(sys.argv[1]), max_staleness=2)
    await store.open()
    first = int(sys.argv[2])
    print("open", flush=True)
    for seq in range(first, first + 100_000):
        await store.commit(submitted(seq))
        print(seq, flush=True)

asyncio.run(main())
"""


async def test_a_killed_service_leaves_all_it_acknowledged_and_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    acknowledged = 0
    for wanted in (1, 7, 40):  # kills after that many commits, each on the store the last one left
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), str(acknowledged + 1)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        await refused(path, "in use")
        for _ in range(wanted):
            acknowledged = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        said = child.stdout.read().split()
        child.stdout.close()
        child.wait()
        acknowledged = int(said[-1]) if said and said[-1] else acknowledged
        store = store_at(path)
        await store.open()
        found = [group.seq for group in (await store.load()).groups]
        await store.close()
        assert found[:acknowledged] == list(range(1, acknowledged + 1))
        assert len(found) in (acknowledged, acknowledged + 1)  # one more may be durable and not yet said
        acknowledged = len(found)


# --- what is not ours


async def test_a_store_of_a_newer_version_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    await made(path)
    with sqlite3.connect(path) as newer:
        newer.execute(f"PRAGMA user_version = {newest_version() + 1}")
    newer.close()
    (tmp_path / "a.db-lock").unlink()
    before = contents(tmp_path)
    await refused(path, f"was written by a newer version .schema {newest_version() + 1}; this one knows")
    assert contents(tmp_path) == before


async def test_a_newer_version_that_was_killed_before_its_header_was_written_is_seen_in_the_log(
    tmp_path: Path,
) -> None:
    path, copy = tmp_path / "a.db", tmp_path / "copy.db"
    await made(path)
    newer = sqlite3.connect(path)
    newer.execute(f"PRAGMA user_version = {newest_version() + 1}")
    for suffix in ("", "-wal"):
        Path(f"{copy}{suffix}").write_bytes(Path(f"{path}{suffix}").read_bytes())
    newer.close()
    before = copy.read_bytes(), Path(f"{copy}-wal").read_bytes()
    await refused(copy, "was written by a newer version")
    assert (copy.read_bytes(), Path(f"{copy}-wal").read_bytes()) == before


def _garbage(path: Path) -> None:
    path.write_bytes(b"prompts and rollouts\n" * 1000)


def _short(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0")


def _other_program(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE theirs (x)")
    other.close()


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (_garbage, "is not a SQLite database"),
        (_short, "is not a SQLite database"),
        (_other_program, "is a SQLite database of another program"),
        (Path.mkdir, "is not a file"),
    ],
)
async def test_what_is_no_store_is_refused_and_stays_as_it_is(
    make: Callable[[Path], None], what: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.db"
    make(path)
    before = contents(tmp_path)
    await refused(path, what)
    assert contents(tmp_path) == before


async def test_a_missing_folder_is_refused_and_not_made(tmp_path: Path) -> None:
    await refused(tmp_path / "typo" / "a.db", "the folder .* does not exist")
    assert list(tmp_path.iterdir()) == []


UNPRIVILEGED = """
import asyncio, os, sys
from pathlib import Path
from rollout_service.errors import ConfigError
from rollout_service.store import SqliteStore

if os.getuid() == 0:
    os.setuid(65534)
try:
    asyncio.run(SqliteStore(Path(sys.argv[1]), max_staleness=2).open())
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("folder_mode", "file_mode", "what"),
    [(0o555, 0o666, "is not writable"), (0o777, 0o444, "is not readable and writable by this user")],
)
async def test_a_store_that_may_not_be_written_is_refused(
    folder_mode: int, file_mode: int, what: str, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    path = folder / "a.db"
    await made(path)
    path.chmod(file_mode)
    folder.chmod(folder_mode)
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)  # so that another user gets as far as the folder
    ended = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    folder.chmod(0o755)
    assert what in ended.stdout
    assert str(path) in ended.stdout


# --- what is broken


async def test_a_shortened_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    await made(path)
    os.truncate(path, path.stat().st_size - 16384)
    await refused(path, "is corrupt")


async def test_an_overwritten_page_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    await made(path)
    pages = path.stat().st_size // 16384
    with path.open("r+b") as file:
        for page in range(1, pages):
            file.seek(page * 16384)
            file.write(b"\xff" * 4096)
    await refused(path, "is corrupt|cannot be opened")


async def test_a_file_that_breaks_while_it_is_used_makes_the_store_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    await made(path)
    store = store_at(path)
    await store.open()
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.seek(16384)
        file.write(b"\xff" * (size - 16384))
    await store._read(lambda connection: connection.execute("PRAGMA shrink_memory"))
    with pytest.raises(StoreUnavailable, match=str(path)):
        await store.payloads([1, 2])
    with pytest.raises(StoreUnavailable, match=str(path)):
        await store.commit(scored(3))
    await store.close()


# --- what is made


@pytest.mark.parametrize("leftover", ["nothing", "an empty file", "a header without tables"])
async def test_a_new_store_is_made_and_one_that_was_killed_at_birth_is_finished(leftover: str, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    if leftover == "an empty file":
        path.touch()
    if leftover == "a header without tables":
        unborn = sqlite3.connect(path)
        unborn.execute("PRAGMA journal_mode = WAL")
        unborn.close()
        assert path.stat().st_size > 0
    await made(path)
    header = path.read_bytes()[:100]
    assert int.from_bytes(header[68:72], "big") == APPLICATION_ID
    assert int.from_bytes(header[60:64], "big") == newest_version()


async def test_a_store_of_the_first_schema_is_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout_service.store import sqlite_file

    path = tmp_path / "a.db"
    first = sqlite_file.migrations()[:1]
    with monkeypatch.context() as patch:
        patch.setattr(sqlite_file, "migrations", lambda: first)
        sqlite_file.open_writer(path, busy_s=1).close()
    assert int.from_bytes(path.read_bytes()[60:64], "big") == 1
    await made(path)
    assert int.from_bytes(path.read_bytes()[60:64], "big") == newest_version()


async def test_a_migration_that_fails_leaves_the_version_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollout_service.store import sqlite_file

    path = tmp_path / "a.db"
    await made(path)
    broken = [*sqlite_file.migrations(), (newest_version() + 1, "CREATE TABLE half (x); CREATE TABLE half (x);")]
    with monkeypatch.context() as patch:
        patch.setattr(sqlite_file, "migrations", lambda: broken)
        await refused(path, "table half already exists")
    store = store_at(path)
    await store.open()
    assert len((await store.load()).groups) == 2
    await store.close()


async def test_opening_twice_is_a_fault_of_the_caller(tmp_path: Path) -> None:
    store = store_at(tmp_path / "a.db")
    await store.open()
    with pytest.raises(RuntimeError, match="is open"):
        await store.open()
    await store.close()


# --- the door


async def test_urls_name_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    relative = open_store("sqlite:///runs.db", max_staleness=1)
    absolute = open_store(f"sqlite:///{tmp_path}/runs.db", max_staleness=1)
    assert isinstance(relative, SqliteStore)
    assert isinstance(absolute, SqliteStore)
    assert (relative.path.absolute(), absolute.path) == (tmp_path / "runs.db", tmp_path / "runs.db")
    assert isinstance(open_store("memory://", max_staleness=1), MemoryStore)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    ["", "sqlite://", "sqlite:///", "sqlite:///data/", "sqlite:///a.db?mode=ro", "sqlite:a.db", "mysql://x", "a.db"],
)
def test_other_urls_are_refused_with_the_field(url: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.url"):
        open_store(url, max_staleness=1)
