"""Moving a run between stores, and looking into the one on PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from rollout_service.core.changes import Halt
from rollout_service.core.group import LeaseState
from rollout_service.core.model import TERMINAL, DropReason, GroupState, Prompt
from rollout_service.core.records import Batch, NewGroup, RunState
from rollout_service.core.shared import EngineWish, Replica
from rollout_service.core.streaks import Streak
from rollout_service.errors import ConfigError
from rollout_service.store import SqliteStore, Store, open_store, sqlite_admin, sqlite_file
from rollout_service.store.copying import copy_store
from rollout_service.store.postgres import PostgresStore
from rollout_service.store.postgres_admin import store_stats
from rollout_service.store.shared import Transaction
from tests.contract import store_samples as samples
from tests.contract.store_samples import MAX_STALENESS, ROWS, acked, failed, finished, lease, pending, scored, settled
from tests.contract.test_store_machine import SqliteStores
from tests.postgres_cluster import PASSWORD, cluster
from tests.postgres_pooler import running_pooler
from tests.store_audit import audit_postgres, audit_sqlite
from tests.warm import arun

S = GroupState


@pytest.fixture
async def database() -> AsyncIterator[str]:
    """Of a new and empty database."""
    async with cluster().database(schema=False) as url:
        yield url


@pytest.fixture
async def other_database() -> AsyncIterator[str]:
    async with cluster().database() as url:
        yield url


@pytest.fixture
def pooler_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pgbouncer-"))  # the server's user may not enter pytest's
    yield folder
    shutil.rmtree(folder)


def at(url: str) -> Store:
    return open_store(url, max_staleness=MAX_STALENESS)


def file(folder: Path, name: str = "a.db") -> str:
    return f"sqlite:///{folder / name}"


async def everything(url: str, seqs: range, lease_ids: tuple[str, ...]) -> list[Any]:
    """All a store says."""
    store = at(url)
    await store.open()
    try:
        return [
            await store.load(),
            await store.payloads(seqs),
            await store.list_groups((), after=0, limit=10**6),
            await store.find_prompts([(f"prompt-{seq}", 0) for seq in seqs]),
            await store.ended_since(0),
            [await store.lease(lease_id) for lease_id in lease_ids],
            [await store.lease_by_request(f"r{number}") for number in (1, 2)],
        ]
    finally:
        await store.close()


ENDED = {S.ACKED: 1, S.STALE: 1, S.DROPPED: 1, S.FAILED: 1}
LEASES = ("l1", "l2", "l3", "l4")


async def fill(store: Store) -> None:
    """A run with something of everything, as a service would have left it."""
    await store.open()
    await store.commit(scored(*range(1, 9)))
    odd = Prompt(
        prompt_id="nul \0 and \uf8ff",
        text="x" * 300_000,
        token_ids=array("i", [1, 2, 3]),
        columns={"big": 2**200, "lone": "\ud800"},
        num_generations=samples.N,
    )
    new = NewGroup(group=pending(9, prompt_id=odd.prompt_id), prompt=odd, digest=b"\0\xff")
    batch = Batch(new_groups={9: new, 10: samples.new_group(10), 11: samples.new_group(11)})
    batch.groups[10] = samples.generating(10, version=0)
    batch.rollouts = {(10, 1, 0): finished(0), (10, 1, 2): failed(2)}
    batch.groups[11] = pending(11, attempt=3, tries=2)
    await store.commit(batch)
    made = lease("l1", 1, 2, request_id="r1", consumer="rank\0 0")
    await store.commit(samples.leasing(made))
    over = lease("l2", 3, request_id="r2")
    await store.commit(samples.leasing(over))
    await store.commit(
        Batch(
            groups={3: acked(3, "l2", end_number=1), 4: settled(4, S.STALE, end_number=2)},
            leases={"l2": replace(over, state=LeaseState.ENDED)},
            forget_payloads={3, 4},
        )
    )
    await store.commit(Batch(checkpoints={"before": samples.checkpoint("before", 1, ends=2)}))
    stopped = pending(5, state=S.DROPPED, reason=DropReason.TOO_FEW_SURVIVORS, version=0, waiting=(), end_number=3)
    broken = pending(6, state=S.FAILED, error="broke \0 down", engine="e-0", version=0, end_number=4)
    await store.commit(Batch(groups={5: stopped, 6: broken}, forget_payloads={5, 6}))
    run = RunState(
        policy_version=2,
        paused=True,
        last_seq=11,
        read_position=7,
        prompts_fingerprint="file",
        ended=ENDED,
        ends=9,  # as after a rewind
    )
    await store.commit(Batch(run=run))


async def filled(url: str) -> str:
    store = at(url)
    await fill(store)
    await store.close()
    return url


async def test_a_run_moves_to_postgresql_and_back_and_every_store_says_the_same(tmp_path: Path, database: str) -> None:
    there, back = await filled(file(tmp_path)), file(tmp_path, "b.db")
    await copy_store(there, database)
    done = await copy_store(database, back)
    assert done.source == done.target
    assert done.source.rows == {
        "leases": 2, "groups": 11, "lease_groups": 3, "rollouts": 18, "scores": 4, "checkpoints": 1, "prompts": 9,
    }  # fmt: skip
    said = [await everything(url, range(1, 12), LEASES) for url in (there, database, back)]
    assert said[0] == said[1] == said[2]
    assert said[0][1][8].prompt.columns == {"big": 2**200, "lone": "\ud800"}
    assert said[0][0].run.ends == 9


async def test_a_copy_keeps_the_counters_and_goes_on_as_a_run_does(tmp_path: Path, database: str) -> None:
    await copy_store(await filled(file(tmp_path)), database)
    assert await audit_postgres(database, max_staleness=MAX_STALENESS) == []
    store = PostgresStore(database, max_staleness=MAX_STALENESS)
    await store.open()
    whole = (await store.overview()).whole
    assert {state: count for state, count in whole.counts.items() if count} == {
        S.PENDING: 2, S.GENERATING: 1, S.READY: 2, S.LEASED: 2, S.ACKED: 1, S.STALE: 1, S.DROPPED: 1, S.FAILED: 1,
    }  # fmt: skip

    async def end(transaction: Transaction) -> tuple[list[int], dict[int, int]]:
        claimable = [found.group.seq for found in await transaction.claimable(9, pending=True)]
        tokens = await transaction.tokens([7, 10])
        await transaction.write(Batch(groups={7: settled(7, S.STALE)}, forget_payloads={7}))
        return claimable, dict(tokens)

    assert await store.transact(end) == ([10, 11, 9], {7: 12, 10: 3})
    assert (await store.groups([7]))[7].end_number == 10
    # The rules of the schema are in force again.
    late = Batch(rollouts={(10, 9, 0): finished(0)})
    with pytest.raises(Exception, match="not of a row of the current attempt"):
        await store.transact(lambda transaction: transaction.write(late))
    await store.close()


async def test_a_copied_file_goes_on_as_a_run_does(tmp_path: Path, other_database: str) -> None:
    await filled(other_database)
    await copy_store(other_database, file(tmp_path))
    assert audit_sqlite(tmp_path / "a.db", max_staleness=MAX_STALENESS) == []
    with closing(sqlite_file.open_writer(tmp_path / "a.db", busy_s=1)) as copied:
        mine = copied.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY name").fetchall()
        assert copied.execute("PRAGMA foreign_key_check").fetchall() == []
    with closing(sqlite_file.open_writer(tmp_path / "new.db", busy_s=1)) as new:
        assert mine == new.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY name").fetchall()
    store = SqliteStore(tmp_path / "a.db", max_staleness=MAX_STALENESS)
    await store.open()
    await store.commit(Batch(rollouts={(10, 1, 1): finished(1)}))
    assert set((await store.payloads([10]))[0].rollouts) == {0, 1, 2}
    await store.close()


async def test_between_databases_what_only_replicas_know_moves_too_and_no_claim_does(
    database: str, other_database: str, tmp_path: Path
) -> None:
    await filled(other_database)
    store = PostgresStore(other_database, max_staleness=MAX_STALENESS)
    await store.open()
    halt = Halt(reason="failed_groups", group_id="g-6", engine=None, error="\0", since=1.5)

    async def halted(transaction: Transaction) -> None:
        await transaction.hold_run()
        await transaction.set_run(
            replace(transaction.run, halt=halt, streak=Streak(failed=2, unproductive=1), revision=40, returns=3)
        )
        await transaction.write(Batch(groups={10: samples.generating(10, version=0)}), owner="gone")

    await store.transact(halted, alone=True)
    await store.close()
    await copy_store(other_database, database)
    store = PostgresStore(database, max_staleness=MAX_STALENESS)
    await store.open()
    run = (await store.overview()).run
    assert (run.halt, run.streak, run.returns) == (halt, Streak(failed=2, unproductive=1), 3)
    assert run.revision > 0
    found = await store.transact(lambda transaction: transaction.groups([10]))
    assert (found[10].owner, found[10].claim) == (None, 0)
    await store.close()
    assert await audit_postgres(database) == []
    assert (await copy_store(database, file(tmp_path))).left_behind == (
        "the halt (failed_groups): a service on SQLite begins without one",
    )


async def test_what_was_asked_for_at_engines_is_said_to_be_left_behind_and_none_of_it_is_taken_over(
    database: str, other_database: str, tmp_path: Path
) -> None:
    await filled(other_database)
    store = PostgresStore(other_database, max_staleness=MAX_STALENESS)
    await store.open()
    for name, wanted in (("a", True), ("b", False)):
        await store.wish(EngineWish(engine_id=f"e-{name}", url=f"http://{name}:8000", wanted=wanted))
    await store.close()
    said = ("what was asked for by hand at 2 engines: add and remove them again",)
    assert (await copy_store(other_database, database)).left_behind == said
    assert (await copy_store(other_database, file(tmp_path))).left_behind == said
    store = PostgresStore(database, max_staleness=MAX_STALENESS)
    await store.open()
    assert list(await store.wishes()) == []
    await store.close()


async def test_a_database_in_which_somebody_asked_for_engines_is_no_new_one(database: str, tmp_path: Path) -> None:
    await filled(file(tmp_path))
    store = PostgresStore(database, max_staleness=MAX_STALENESS)
    await store.open()
    await store.wish(EngineWish(engine_id="e-a", url="http://a:8000", wanted=True))
    await store.close()
    with pytest.raises(ConfigError, match="is not empty"):
        await copy_store(file(tmp_path), database)


async def test_the_source_is_not_changed_by_a_byte_even_where_its_log_was_not_copied_back_yet(
    tmp_path: Path, database: str
) -> None:
    store = at(file(tmp_path))
    await fill(store)
    (tmp_path / "killed").mkdir()
    for name in ("a.db", "a.db-wal"):
        shutil.copyfile(tmp_path / name, tmp_path / "killed" / name)
    await store.close()
    before = {name: (tmp_path / "killed" / name).read_bytes() for name in ("a.db", "a.db-wal")}
    assert len(before["a.db-wal"]) > 0
    await copy_store(file(tmp_path / "killed"), database)
    assert {name: (tmp_path / "killed" / name).read_bytes() for name in before} == before
    assert await everything(database, range(1, 12), LEASES) == await everything(file(tmp_path), range(1, 12), LEASES)


async def test_a_file_is_copied_into_another_file(tmp_path: Path) -> None:
    there, back = await filled(file(tmp_path)), file(tmp_path, "b.db")
    await copy_store(there, back)
    assert await everything(back, range(1, 12), LEASES) == await everything(there, range(1, 12), LEASES)


async def test_a_run_is_copied_through_a_pooler_that_shares_sessions_out(tmp_path: Path, pooler_folder: Path) -> None:
    there, back = await filled(file(tmp_path)), file(tmp_path, "b.db")
    async with cluster().database(schema=False) as url:
        with running_pooler(cluster(), pooler_folder) as pooler:
            through = pooler.url(url)
            await copy_store(there, through)
            await copy_store(through, back)
        assert await everything(back, range(1, 12), LEASES) == await everything(there, range(1, 12), LEASES)


# refusals


async def test_a_file_of_another_schema_is_no_source(tmp_path: Path, database: str) -> None:
    for name, version, said in (
        ("old.db", 1, r"older version \(schema 1, .*`store compact` brings it up to date"),
        ("new.db", 99, r"newer version \(schema 99"),
    ):
        with closing(sqlite3.connect(tmp_path / name)) as writer:
            writer.executescript(sqlite_file.migrations()[0][1])
            writer.execute(f"PRAGMA application_id = {sqlite_file.APPLICATION_ID}")
            writer.execute(f"PRAGMA user_version = {version}")
        with pytest.raises(ConfigError, match=said):
            await copy_store(file(tmp_path, name), database)
    sqlite_admin.compact(tmp_path / "old.db")
    await copy_store(file(tmp_path, "old.db"), database)


async def test_a_database_of_another_schema_is_no_source(tmp_path: Path, other_database: str) -> None:
    connection = await asyncpg.connect(other_database)
    await connection.execute("INSERT INTO schema_migrations VALUES (99, 'later', 1, 0)")
    with pytest.raises(ConfigError, match=r"newer version \(schema 99"):
        await copy_store(other_database, file(tmp_path))
    with pytest.raises(ConfigError, match=r"newer version \(schema 99"):
        await copy_store(await filled(file(tmp_path, "b.db")), other_database)
    assert (await store_stats(PostgresStore(other_database, max_staleness=1))).schema == 99
    await connection.close()


async def test_a_file_in_use_is_no_source(tmp_path: Path, database: str) -> None:
    store = at(file(tmp_path))
    await fill(store)
    with pytest.raises(ConfigError, match="in use by another service"):
        await copy_store(file(tmp_path), database)
    await store.close()
    assert await loaded(database) == RunState()


async def test_a_database_with_a_replica_is_no_source_and_no_target(tmp_path: Path, other_database: str) -> None:
    store = PostgresStore(other_database, max_staleness=1)
    await store.open()
    await store.join(Replica(replica_id="1", name="rank-7", service="0", rules="r"), lease_s=50)
    with pytest.raises(ConfigError, match=r"replica rank-7 was alive 0 s ago; .* alive for \d\d s more"):
        await copy_store(other_database, file(tmp_path))
    with pytest.raises(ConfigError, match="replica rank-7"):
        await copy_store(await filled(file(tmp_path)), other_database)
    await store.leave("1")
    await store.close()
    await copy_store(file(tmp_path), other_database)


async def test_nobody_joins_while_a_copy_is_under_way(tmp_path: Path, other_database: str) -> None:
    store = PostgresStore(other_database, max_staleness=1, statement_timeout_s=2.0)
    await store.open()
    seen = []

    async def join() -> None:
        with pytest.raises(Exception, match="timeout") as refused:
            await store.join(Replica(replica_id="1", name="a", service="0", rules="r"), lease_s=9)
        seen.append(type(refused.value).__name__)
        seen.append(str((await store.load()).run.last_seq))

    joining: list[asyncio.Task[None]] = []

    def progress(doing: str, _: int) -> None:
        if not joining:
            joining.append(asyncio.create_task(join()))

    source = await filled(file(tmp_path))
    await copying_slowly(source, other_database, progress, joining)
    assert seen == ["StoreUnavailable", "0"]
    assert (await store.load()).run.last_seq == 11
    await store.close()


async def copying_slowly(source: str, target: str, progress: Any, until: list[asyncio.Task[None]]) -> None:
    """A copy that publishes when the first of `until` is over."""
    from rollout_service.store import postgres_rows

    whole = postgres_rows.PostgresTarget.publish

    async def publish(self: postgres_rows.PostgresTarget) -> None:
        await until[0]
        await whole(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postgres_rows.PostgresTarget, "publish", publish)
        await copy_store(source, target, progress=progress)


async def test_a_target_with_a_run_is_left_alone(tmp_path: Path, database: str) -> None:
    source = await filled(file(tmp_path))
    (tmp_path / "b").mkdir()
    await copy_store(source, database)
    before = await everything(database, range(1, 12), LEASES)
    with pytest.raises(ConfigError, match=r"is not empty: it has a run \(11 groups, version 2\)"):
        await copy_store(source, database)
    assert await everything(database, range(1, 12), LEASES) == before
    with pytest.raises(ConfigError, match="exists already"):
        await copy_store(database, source)
    with pytest.raises(ConfigError, match="the same store"):
        await copy_store(database, database)
    (tmp_path / "c.db-wal").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"c\.db-wal is left of a store that is gone"):
        await copy_store(database, file(tmp_path, "c.db"))


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("mysql://me:secret@host/a", "memory://", "SOURCE: 'mysql://…host/a' is no store"),
        ("memory://", "sqlite:///b.db", "SOURCE: memory:// keeps nothing"),
        ("sqlite:///nowhere.db", "sqlite:///b.db", "store nowhere.db does not exist"),
        ("sqlite:///", "sqlite:///b.db", "SOURCE: 'sqlite:///' names no file"),
        ("postgresql://me:secret@127.0.0.1:9/a", "sqlite:///b.db", "cannot connect to PostgreSQL at 127.0.0.1:9/a"),
    ],
)
async def test_what_is_no_store_is_refused_in_one_line(
    source: str, target: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        await copy_store(source, target)
    assert str(refused.value).startswith(said)
    assert "secret" not in str(refused.value)
    assert not (tmp_path / "b.db").exists()


async def test_an_empty_database_and_one_of_another_program_are_no_sources(tmp_path: Path, database: str) -> None:
    with pytest.raises(ConfigError, match="there is no run in this database"):
        await copy_store(database, file(tmp_path))
    connection = await asyncpg.connect(database)
    await connection.execute("CREATE TABLE groups (a int)")
    await connection.close()
    with pytest.raises(ConfigError, match="of another program"):
        await copy_store(await filled(file(tmp_path)), database)


async def test_a_run_that_contradicts_its_groups_is_not_copied(tmp_path: Path, database: str) -> None:
    store = at(await filled(file(tmp_path)))
    await store.open()
    await store.commit(Batch(run=replace((await store.load()).run, ended={**ENDED, S.ACKED: 2})))
    await store.close()
    with pytest.raises(ConfigError, match=r"a\.db is not sound: 2 groups are counted as acked, and 1 are"):
        await copy_store(file(tmp_path), database)
    assert await loaded(database) == RunState()


async def test_a_damaged_payload_stops_the_copy(tmp_path: Path, database: str) -> None:
    await filled(file(tmp_path))
    with closing(sqlite_file.open_writer(tmp_path / "a.db", busy_s=1)) as writer:
        writer.execute("UPDATE payloads SET payload = x'07' WHERE id = 1")
    with pytest.raises(ConfigError, match="a payload of group 1 cannot be read"):
        await copy_store(file(tmp_path), database)
    assert await loaded(database) == RunState()


async def test_what_is_read_back_must_be_what_was_written(tmp_path: Path, database: str) -> None:
    connection = await asyncpg.connect(await emptied(database))
    await connection.execute(
        "CREATE FUNCTION other() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN NEW.consumer := ''other''; RETURN NEW; END';"
        "CREATE TRIGGER other BEFORE INSERT ON leases FOR EACH ROW EXECUTE FUNCTION other()"
    )
    await connection.close()
    with pytest.raises(ConfigError, match="what was read back is not what was written"):
        await copy_store(await filled(file(tmp_path)), database)
    assert replace(await loaded(database), ends=0) == RunState()  # numbers may have gaps


async def emptied(url: str) -> str:
    """A database with the schema alone."""
    assert await loaded(url) == RunState()
    return url


async def loaded(url: str) -> RunState:
    store = at(url)
    await store.open()
    try:
        snapshot = await store.load()
        assert snapshot.groups == snapshot.leases == snapshot.checkpoints == ()
        return snapshot.run
    finally:
        await store.close()


# interrupted


KILLED = """
import asyncio, os, signal, sys
from rollout_service.store import copying, {module}
{patch}
asyncio.run(copying.copy_store(*sys.argv[1:]))
"""
BEFORE_PUBLISH = """
async def publish(self):
    os.kill(os.getpid(), signal.SIGKILL)
{module}.{target}.publish = publish
"""
BEFORE_RENAME = """
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""


def copy_and_die(source: str, target: str, module: str, patch: str) -> None:
    code = KILLED.format(module=module, patch=patch)
    done = subprocess.run([sys.executable, "-c", code, source, target], timeout=60, check=False, env=environment())
    assert done.returncode == -signal.SIGKILL


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "NO_COLOR": "1"}


async def test_a_copy_killed_at_its_end_leaves_an_empty_database_and_the_next_one_succeeds(
    tmp_path: Path, database: str
) -> None:
    source = await filled(file(tmp_path))
    patch = BEFORE_PUBLISH.format(module="postgres_rows", target="PostgresTarget")
    await asyncio.to_thread(copy_and_die, source, database, "postgres_rows", patch)
    assert replace(await loaded(database), ends=0) == RunState()  # numbers may have gaps
    await copy_store(source, database)
    assert await everything(database, range(1, 12), LEASES) == await everything(source, range(1, 12), LEASES)


async def test_a_copy_killed_before_the_file_has_its_name_leaves_no_store_and_the_next_one_succeeds(
    tmp_path: Path, other_database: str
) -> None:
    await filled(other_database)
    target = file(tmp_path)
    await asyncio.to_thread(copy_and_die, other_database, target, "sqlite_rows", BEFORE_RENAME)
    assert not (tmp_path / "a.db").exists()
    assert (tmp_path / "a.db.copying").exists()
    await copy_store(other_database, target)
    assert not list(tmp_path.glob("*copying*"))
    assert await everything(target, range(1, 12), LEASES) == await everything(other_database, range(1, 12), LEASES)


# any history


class Copies(SqliteStores):
    """A random history whose store is copied to PostgreSQL and back at its end."""

    def teardown(self) -> None:
        try:
            if self.standings:
                self.copy()
        finally:
            super().teardown()

    def copy(self) -> None:
        self.batch = Batch()
        groups = self.wait(self.other.list_groups((), after=0, limit=99))
        counts = {state: sum(group.state is state for group in groups) for state in TERMINAL}
        run = RunState(policy_version=self.version, last_seq=len(groups), ended=counts, ends=0)
        self.wait(self.other.load())  # a commit that failed is over
        self.wait(self.other.commit(Batch(run=run)))
        self.wait(self.other.close())
        there, back = f"sqlite:///{self.other.path}", f"sqlite:///{self.folder / 'back.db'}"
        self.wait(self.moved(there, back))

    async def moved(self, there: str, back: str) -> None:
        async with cluster().database() as database:
            await copy_store(there, database)
            await copy_store(database, back)
            said = [await everything(url, range(1, 7), LEASES) for url in (there, database, back)]
        assert said[0] == said[1] == said[2]


def test_any_history_copied_there_and_back_loads_equal() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Copies,
        settings=settings(
            phases=[Phase.reuse, Phase.generate, Phase.shrink],
            max_examples=12,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


# bounds


async def test_memory_of_a_copy_does_not_grow_with_the_run(tmp_path: Path, other_database: str) -> None:
    """36 MB and 108 MB of payloads, by turns there and back: the larger one may take 16 MB more at its peak."""
    peaks = []
    for number, groups in enumerate((12, 36)):
        store = at(file(tmp_path, f"{number}.db"))
        await store.open()
        for seq in range(1, groups + 1):
            batch = scored(seq)
            batch.rollouts = {(seq, 1, row): finished(row, "x" * 250_000) for row in ROWS}
            await store.commit(batch)
        await store.close()
        async with cluster().database() as url:
            for urls in ((file(tmp_path, f"{number}.db"), url), (url, file(tmp_path, f"back-{number}.db"))):
                peaks.append(await asyncio.to_thread(peak_of_copy, *urls))
    assert peaks[2] - peaks[0] < 16_000_000
    assert peaks[3] - peaks[1] < 16_000_000


def peak_of_copy(source: str, target: str) -> int:
    code = (
        "import asyncio, re, sys\nfrom rollout_service.store.copying import copy_store\n"
        "asyncio.run(copy_store(*sys.argv[1:]))\n"
        # Not getrusage: its peak is that of the process that started this one, where that was larger.
        "print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, source, target],
        timeout=100, check=True, capture_output=True, text=True, env=environment(),
    )  # fmt: skip
    return int(done.stdout) * 1024


# the command line


async def test_the_command_shows_both_sides_and_no_password(tmp_path: Path, database: str) -> None:
    await filled(file(tmp_path))
    done = await arun("store", "copy", "sqlite:///a.db", database, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["source", "target"] in lines
    assert ["groups", "submitted", "11", "11"] in lines
    assert ["leased", "2", "2"] in lines
    assert lines[-1][0] == "copied:"
    again = await arun("store", "copy", "sqlite:///a.db", database, cwd=tmp_path)
    wrong = await arun("store", "copy", "sqlite:///a.db", "sqlite:///b.db", database, cwd=tmp_path)
    for refused in (again, wrong):
        assert refused.returncode == 2
        assert refused.stderr.startswith("rollout-service: error: ")
        assert refused.stderr.count("\n") == 1
    for shown in (done, again, wrong):
        assert PASSWORD not in shown.stdout + shown.stderr


async def test_stats_of_a_database_count_what_is_there_and_who_is_at_work(database: str) -> None:
    await filled(database)
    store = PostgresStore(database, max_staleness=MAX_STALENESS)
    with pytest.raises(ConfigError, match="cannot connect"):
        await store_stats(PostgresStore("postgresql://127.0.0.1:9/a", max_staleness=1))
    await store.open()
    await store.join(Replica(replica_id="1", name="rank-7", service="0.1", rules="r", slots=5), lease_s=50)
    await store.transact(lambda transaction: transaction.write(Batch(groups={10: samples.generating(10)}), owner="1"))
    stats = await store_stats(store)
    await store.close()
    assert stats.groups == {
        "pending": 2, "generating": 1, "ready": 2, "leased": 2, "acked": 1, "stale": 1, "dropped": 1, "failed": 1,
    }  # fmt: skip
    assert (stats.outstanding, stats.submitted, stats.policy_version, stats.schema) == (7, 11, 2, 1)
    assert stats.rows == {"groups": 11, "prompts": 9, "rollouts": 18, "scores": 4, "leases": 2, "lease_groups": 3}
    assert 300_000 < stats.payload_bytes < 400_000
    assert stats.database_bytes > sum(table.bytes for table in stats.tables.values()) > stats.payload_bytes
    (replica,) = stats.replicas
    assert (replica.name, replica.alive, replica.claims, replica.slots) == ("rank-7", True, 1, 5)


async def test_the_commands_look_into_a_database_and_say_that_it_needs_no_compacting(
    tmp_path: Path, database: str
) -> None:
    await filled(database)
    (tmp_path / "rollout.toml").write_text(
        '[[engines]]\nurl = "http://127.0.0.1:9"\n[groups]\nnum_generations = 4\n[[rewards]]\nname = "a"\n'
        f'function = "a:a"\n[store]\nurl = "{database}"\n'
    )
    done = await arun("store", "stats", "--config", "rollout.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["submitted"], said["outstanding"], said["replicas"]) == (11, 7, [])
    assert said["tables"]["groups"]["dead_rows"] >= 0
    compacted = await arun("store", "compact", "--config", "rollout.toml", cwd=tmp_path)
    assert compacted.returncode == 0
    assert "autovacuum" in compacted.stdout
    assert PASSWORD not in done.stdout + compacted.stdout
