"""The writing thread: durable before it is answered, commits grouped, failures undone, large reads beside it."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollout_service.core.model import GroupState
from rollout_service.core.records import Batch, RunState
from rollout_service.errors import StoreUnavailable
from rollout_service.store import SqliteStore
from tests.contract.store_samples import (
    MAX_STALENESS,
    ROWS,
    finished,
    generating,
    new_group,
    pending,
    scored,
    settled,
    submitted,
)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "a.db", max_staleness=MAX_STALENESS)
    await store.open()
    yield store
    await store.close()


async def pragma(store: SqliteStore, name: str) -> object:
    """As the writing connection has it."""
    return (await store._read(lambda connection: connection.execute(f"PRAGMA {name}").fetchone()))[0]


class Held:
    """Keeps the writing thread busy, so that what is asked for meanwhile waits together."""

    def __init__(self, store: SqliteStore) -> None:
        self._store, self._free = store, threading.Event()

    async def __aenter__(self) -> None:
        begun = threading.Event()

        def hold(_: sqlite3.Connection) -> None:
            begun.set()
            self._free.wait(30)

        self._task = asyncio.create_task(self._store._read(hold))
        await asyncio.to_thread(begun.wait, 30)

    async def __aexit__(self, *_: object) -> None:
        self._free.set()
        await self._task


# --- durability


async def test_the_writer_syncs_every_commit(store: SqliteStore) -> None:
    wanted = {
        "journal_mode": "wal",
        "synchronous": 2,  # FULL
        "page_size": 16384,
        "foreign_keys": 1,
        "secure_delete": 0,
        "temp_store": 2,  # memory
        "wal_autocheckpoint": 1000,
        "journal_size_limit": 64 * 1024 * 1024,
        "ignore_check_constraints": 0,
    }
    assert {name: await pragma(store, name) for name in wanted} == wanted


async def test_nothing_runs_on_the_event_loops_thread(store: SqliteStore) -> None:
    def name(_: sqlite3.Connection) -> str:
        return threading.current_thread().name

    assert await store._read(name) == "store-writer"
    assert await store._read_much(name) == "store-reader"


async def test_the_reading_connection_cannot_write(store: SqliteStore) -> None:
    with pytest.raises(StoreUnavailable, match="readonly"):
        await store._read_much(lambda connection: connection.execute("DELETE FROM prompts"))
    await store.commit(submitted(1))
    assert len(await store.payloads([1])) == 1


# --- group commit


async def test_commits_that_wait_together_are_one_transaction_in_their_order(store: SqliteStore) -> None:
    said: list[str] = []
    await store.commit(submitted(1))
    await store._read(lambda connection: connection.set_trace_callback(said.append))
    order: list[int] = []

    async def change(step: int) -> None:
        await store.commit(Batch(groups={1: pending(1, error=f"step {step}")}))
        order.append(step)

    async with Held(store):
        asked = [asyncio.create_task(change(step)) for step in range(20)]
        await asyncio.sleep(0)
        assert order == []
    await asyncio.gather(*asked)
    await store._read(lambda connection: connection.set_trace_callback(None))
    assert order == list(range(20))
    assert said.count("BEGIN IMMEDIATE") == said.count("COMMIT") == 1
    assert (await store.groups([1]))[1].error == "step 19"


async def test_a_read_between_two_commits_keeps_them_apart(store: SqliteStore) -> None:
    await store.commit(submitted(1))
    async with Held(store):
        asked = [
            asyncio.create_task(store.commit(Batch(groups={1: pending(1, error="first")}))),
            asyncio.create_task(store.groups([1])),
            asyncio.create_task(store.commit(Batch(groups={1: pending(1, error="second")}))),
        ]
        await asyncio.sleep(0)
    _, seen, _ = await asyncio.gather(*asked)
    assert seen[1].error == "first"  # type: ignore[index]  # the second answer is a mapping


async def test_one_bad_batch_undoes_all_that_were_committed_with_it(store: SqliteStore) -> None:
    await store.commit(submitted(1))
    async with Held(store):
        asked = [asyncio.create_task(store.commit(submitted(seq))) for seq in (2, 1, 3)]
        await asyncio.sleep(0)
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 3
    assert [group.seq for group in (await store.load()).groups] == [1]
    await store.commit(submitted(2))


# --- large reads


async def test_commits_do_not_wait_for_a_large_read_and_it_does_not_see_them(store: SqliteStore) -> None:
    await store.commit(scored(1))
    free = threading.Event()

    def slow(connection: sqlite3.Connection) -> int:
        free.wait(30)
        return int(connection.execute("SELECT count(*) FROM rollouts").fetchone()[0])

    reads = [asyncio.create_task(store._read_much(slow)) for _ in range(3)]
    await asyncio.sleep(0)
    await store.commit(Batch(groups={1: settled(1, GroupState.STALE)}, forget_payloads={1}))
    assert not any(read.done() for read in reads)
    free.set()
    assert await asyncio.gather(*reads) == [len(ROWS)] * 3
    assert (await store.payloads([1]))[0].rollouts == {}


async def test_more_large_reads_than_readers_are_all_answered(store: SqliteStore) -> None:
    await store.commit(scored(1, 2))
    answers = await asyncio.gather(*(store.payloads([1, 2]) for _ in range(40)))
    assert all(len(answer) == 2 for answer in answers)


async def test_closing_waits_for_a_large_read(store: SqliteStore) -> None:
    await store.commit(scored(1))
    read = asyncio.create_task(store.payloads([1]))
    await asyncio.sleep(0)
    await store.close()
    assert len(await read) == 1


# --- a medium that fails


async def test_a_full_disk_undoes_the_commit_and_the_next_one_works_when_there_is_space(store: SqliteStore) -> None:
    await store.commit(submitted(1))
    used = await pragma(store, "page_count")
    await pragma(store, f"max_page_count = {used}")
    before = await store.load()
    large = submitted(*range(2, 500))
    with pytest.raises(StoreUnavailable, match="database or disk is full") as caught:
        await store.commit(large)
    assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
    assert await store.load() == before
    with pytest.raises(StoreUnavailable, match="full"):
        await store.commit(large)
    await pragma(store, "max_page_count = 1000000")
    await store.load()
    await store.commit(large)
    assert len((await store.load()).groups) == 499


async def fill(store: SqliteStore) -> int:
    """Groups that were committed before one was refused for want of space."""
    for seq in range(1, 10_000):
        outcome = (await asyncio.gather(store.commit(submitted(seq)), return_exceptions=True))[0]
        if outcome is not None:
            assert isinstance(outcome, StoreUnavailable)
            assert "full" in str(outcome) or "I/O" in str(outcome)
            return seq - 1
    raise AssertionError("the disk was never full")


async def test_a_file_system_without_space_loses_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    try:
        store = SqliteStore(disk / "a.db", max_staleness=MAX_STALENESS)
        await store.open()
        ballast = disk / "ballast"
        ballast.write_bytes(b"x" * 1_000_000)
        kept = await fill(store)
        assert len((await store.load()).groups) == kept > 0
        ballast.unlink()
        await store.commit(submitted(kept + 1))
        await store.close()
        await store.open()
        assert len((await store.load()).groups) == kept + 1
        await store.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


async def test_a_lock_of_a_foreign_tool_makes_the_store_unavailable_and_it_recovers(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db", max_staleness=MAX_STALENESS, busy_s=0.05)
    await store.open()
    tool = sqlite3.connect(store.path, isolation_level=None)
    tool.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="database is locked"):
        await store.commit(submitted(1))
    tool.execute("ROLLBACK")
    tool.close()
    await store.load()
    await store.commit(submitted(1))
    await store.close()


async def test_a_value_that_cannot_be_written_is_refused_and_does_not_end_the_thread(store: SqliteStore) -> None:
    bad = new_group(1)
    bad.prompt.columns["answer"] = object()  # type: ignore[index]  # what no caller should do
    with pytest.raises(StoreUnavailable, match="object is no JSON value"):
        await store.commit(Batch(run=RunState(last_seq=1), new_groups={1: bad}))
    await store.load()
    await store.commit(submitted(1))


async def test_words_for_people_need_not_be_valid_unicode(store: SqliteStore) -> None:
    await store.commit(submitted(1))
    await store.commit(Batch(groups={1: pending(1, error="broken \ud800 text")}))
    assert (await store.groups([1]))[1].error == "broken ? text"


async def test_giving_up_while_it_opens_lets_go_of_the_file(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "b.db", max_staleness=MAX_STALENESS)
    opening = asyncio.create_task(store.open())
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    writers = [thread for thread in threading.enumerate() if thread.name == "store-writer"]
    await asyncio.to_thread(lambda: [thread.join(30) for thread in writers])
    await store.open()
    await store.close()


# --- size


async def test_ten_thousand_outstanding_groups_are_loaded_without_their_payloads(
    store: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    many = 10_000
    for first in range(1, many + 1, 1000):
        seqs = range(first, first + 1000)
        batch = submitted(*seqs)
        batch.groups = {seq: generating(seq) for seq in seqs}
        batch.rollouts = {(seq, 1, row): finished(row) for seq in seqs for row in ROWS}
        await store.commit(batch)
    await store.close()
    began = time.perf_counter()
    await store.open()
    opened = time.perf_counter()
    groups = (await store.load()).groups
    took = time.perf_counter() - opened
    assert len(groups) == many
    assert all(group.finished == frozenset(ROWS) and not group.waiting for group in groups)
    with capsys.disabled():
        print(f"\n{many} groups, {many * len(ROWS)} rollouts: opened in {opened - began:.2f} s, loaded in {took:.2f} s")
