"""The schema itself refuses an illegal state, whoever writes it; its indexes are the ones that are used; and a database
becomes one of ours, or is left as it was."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, TypeAlias

import asyncpg
import pytest

from rollout_service.core.model import GroupState
from rollout_service.core.records import Batch, RunState
from rollout_service.core.shared import Replica
from rollout_service.errors import ConfigError, StoreUnavailable
from rollout_service.store import open_shared_store, open_store, postgres_schema
from rollout_service.store import postgres_queries as sql
from rollout_service.store.postgres import PostgresStore, shown
from rollout_service.store.postgres_connections import Connections
from tests.contract.store_samples import (
    acked,
    dropped,
    finished,
    generating,
    lease,
    leasing,
    new_group,
    pending,
    prompt,
    ready,
    scored,
    submitted,
)
from tests.postgres_cluster import PASSWORD, cluster

Database: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
TABLES = (
    "run", "groups", "tallies", "replicas", "batches", "prompts", "rollouts", "scores", "leases", "lease_groups",
    "checkpoints", "engines",
)  # fmt: skip


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with cluster().database() as url:
        yield url


@pytest.fixture
async def empty() -> AsyncIterator[str]:
    """A database without a schema."""
    async with cluster().database(schema=False) as url:
        yield url


@pytest.fixture
async def store(url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(url, max_staleness=2, pool_size=2)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def database(url: str, store: PostgresStore) -> AsyncIterator[Database]:
    """Group 1 is ready, 2 acked, 3 leased, 4 dropped, 5 pending, 6 generating for replica a."""
    await store.commit(scored(1, 2, 3, 4))
    await store.commit(leasing(lease("l", 2, 3, request_id="r")))
    await store.commit(
        Batch(
            run=RunState(last_seq=6, ends=2),
            groups={2: acked(2, "l", end_number=1), 4: dropped(4, end_number=2)},
            new_groups={5: new_group(5), 6: new_group(6)},
        )
    )
    await store.transact(lambda transaction: transaction.write(Batch(groups={6: generating(6)}), owner="a"))
    connection = await asyncpg.connect(url)
    yield connection
    await connection.close()


async def content(database: Database) -> list[Any]:
    return [await database.fetch(f"SELECT * FROM {table} AS t ORDER BY t::text") for table in TABLES]  # noqa: S608


LEASE = "INSERT INTO leases VALUES ({}, NULL, {}, {}, 1, 0, 0, 0, '{}')"


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE groups SET state = 'lost' WHERE seq = 1",
        "UPDATE groups SET version = NULL WHERE seq = 1",
        "UPDATE groups SET version = -1 WHERE seq = 1",
        "UPDATE groups SET version = 0 WHERE seq = 5",
        "UPDATE groups SET lease_id = 'l' WHERE seq = 1",
        "UPDATE groups SET lease_id = NULL WHERE seq = 3",
        "UPDATE groups SET lease_id = 'nobody' WHERE seq = 3",
        "UPDATE groups SET acked_by = NULL WHERE seq = 2",
        "UPDATE groups SET acked_by = 'l' WHERE seq = 1",
        "UPDATE groups SET reason = NULL WHERE seq = 4",
        "UPDATE groups SET reason = 'bored' WHERE seq = 4",
        "UPDATE groups SET reason = 'cancelled' WHERE seq = 1",
        "UPDATE groups SET attempt = 0, tries = 0 WHERE seq = 1",
        "UPDATE groups SET tries = 2 WHERE seq = 1",
        "UPDATE groups SET rows = 'ff' WHERE seq = 1",
        "UPDATE groups SET rows = 'fffq' WHERE seq = 1",
        "UPDATE groups SET rows = 'wfff' WHERE seq = 1",
        "UPDATE groups SET payload_bytes = -1 WHERE seq = 1",
        "UPDATE groups SET state = 'ready', acked_by = NULL, end_number = NULL WHERE seq = 2",
        "UPDATE groups SET state = 'pending', acked_by = NULL, end_number = NULL, version = NULL WHERE seq = 2",
        "UPDATE groups SET prompt_id = 'other' WHERE seq = 1",
        "UPDATE groups SET num_generations = 5, rows = 'fffff' WHERE seq = 1",
        "UPDATE groups SET digest = '' WHERE seq = 1",
        "UPDATE groups SET prompt_bytes = 1 WHERE seq = 1",
        "UPDATE groups SET seq = 9 WHERE seq = 1",
        "UPDATE groups SET owner = 'a' WHERE seq = 1",
        "UPDATE groups SET owner = 'a' WHERE seq = 5",
        "UPDATE groups SET claim = 0 WHERE seq = 6",
        "DELETE FROM groups WHERE seq = 5",
        "TRUNCATE groups CASCADE",
        "INSERT INTO groups (seq, prompt_id, epoch, digest, num_generations, prompt_bytes, state, attempt, tries, rows,"
        " payload_bytes, submitted_at, changed_at)"
        " VALUES (9, 'prompt-1', 0, '', 1, 0, 'pending', 1, 1, 'w', 0, 0, 0)",
        "INSERT INTO rollouts VALUES (1, 2, 0, true, 0, 0, '')",
        "INSERT INTO rollouts VALUES (1, 1, 0, true, 0, 0, '')",
        "INSERT INTO rollouts VALUES (1, 1, 4, true, 0, 0, '')",
        "INSERT INTO rollouts VALUES (99, 1, 0, true, 0, 0, '')",
        "INSERT INTO rollouts VALUES (5, 1, 0, true, 0, 0, ''), (5, 2, 0, true, 0, 0, '')",
        "UPDATE rollouts SET payload = ''",
        "INSERT INTO scores VALUES (1, 2, '')",
        "INSERT INTO prompts VALUES (99, '')",
        "INSERT INTO leases VALUES ('m', 'r', NULL, 1, 1, 1, 0, 0, 0, 'live')",
        "INSERT INTO leases VALUES ('l', NULL, NULL, 1, 1, 1, 0, 0, 0, 'live')",
        "INSERT INTO leases VALUES ('m', NULL, NULL, 1, 2, 1, 0, 0, 0, 'live')",
        "INSERT INTO leases VALUES ('m', NULL, NULL, 1, 1, 1, 0, 0, 0, 'lost')",
        "INSERT INTO lease_groups VALUES ('l', 2, 3, 1)",
        "INSERT INTO lease_groups VALUES ('l', 2, 99, 1)",
        "INSERT INTO lease_groups VALUES ('m', 0, 1, 1)",
        "UPDATE groups SET end_number = 1 WHERE seq = 1",
        "UPDATE groups SET end_number = 0 WHERE seq = 2",
        "UPDATE groups SET end_number = 7 WHERE seq IN (2, 4)",
        "INSERT INTO checkpoints VALUES ('a', 0, 0, 0, 0)",
        "INSERT INTO checkpoints VALUES ('a', 1, 0, 0, 0), ('b', 1, 0, 0, 0)",
        "UPDATE run SET policy_version = -1",
        "UPDATE run SET policy_version = NULL",
        "INSERT INTO run (id) VALUES (2)",
    ],
)
async def test_an_illegal_state_is_refused(statement: str, database: Database) -> None:
    before = await content(database)
    with pytest.raises(asyncpg.IntegrityConstraintViolationError):
        await database.execute(statement)
    assert await content(database) == before


async def test_a_checkpoint_is_never_moved(database: Database) -> None:
    await database.execute("INSERT INTO checkpoints VALUES ('a', 1, 0, 0, 0)")
    with pytest.raises(asyncpg.IntegrityConstraintViolationError, match="never moved"):
        await database.execute("UPDATE checkpoints SET ends = 1")


async def test_an_attempt_may_not_fall_and_an_ended_group_goes_on_in_a_new_one(database: Database) -> None:
    reopen = (
        "UPDATE groups SET state = 'pending', acked_by = NULL, version = NULL, rows = 'wwww', end_number = NULL,"
        " attempt = $1 WHERE seq = 2"
    )
    await database.execute(reopen, 2)
    with pytest.raises(asyncpg.IntegrityConstraintViolationError, match="may not fall"):
        await database.execute(reopen, 1)


async def test_counters_follow_whoever_moves_a_group(store: PostgresStore, database: Database) -> None:
    before = (await store.overview()).whole
    await database.execute("UPDATE groups SET state = 'stale', owner = NULL WHERE seq IN (1, 6)")
    after = (await store.overview()).whole
    assert after.counts == {
        **before.counts,
        GroupState.READY: before.counts[GroupState.READY] - 1,
        GroupState.GENERATING: before.counts[GroupState.GENERATING] - 1,
        GroupState.STALE: before.counts[GroupState.STALE] + 2,
    }
    assert before.held_bytes == 4 * finished(0).payload_bytes
    assert after.held_bytes == 0
    assert before.prompt_bytes > after.prompt_bytes > 0


async def test_transactions_that_count_at_the_same_time_do_not_wait(url: str, database: Database) -> None:
    other = await asyncpg.connect(url)
    try:
        async with database.transaction():
            await database.execute("UPDATE groups SET state = 'stale' WHERE seq = 1")
            await asyncio.wait_for(other.execute("UPDATE groups SET state = 'stale', owner = NULL WHERE seq = 6"), 10)
    finally:
        await other.close()
    assert await database.fetchval("SELECT sum(stale) FROM tallies") == 2
    assert await database.fetchval("SELECT count(*) FROM tallies") == 2


async def test_any_text_an_id_or_an_error_may_be_is_kept(store: PostgresStore) -> None:
    for seq, text in enumerate(("nul \0 inside", "\uf8ff", "\uf8ff0\uf8ffe\0\uf8ff", "\0", "😀" * 512), start=1):
        group = pending(seq, prompt_id=text, error=text, engine=text)
        await store.commit(Batch(new_groups={seq: replace(new_group(seq), group=group)}))
        assert await store.groups([seq]) == {seq: group}
        assert (await store.find_prompts([(text, 0)]))[text, 0].seq == seq


QUERIES = {
    "READ_OUTSTANDING": ((), "groups_outstanding"),
    "READ_OLDEST": ((), "groups_outstanding"),
    "LIST_GROUPS": ((["acked", "ready"], 0, 1), "groups_ended"),
    "LIST_ANY": ((0, 1), "groups_pkey"),
    "FIND_PROMPTS": ((["a"], [0]), "groups_prompt_id_epoch_key"),
    "READ_ENDED_SINCE": ((1,), "groups_by_end"),
    "LOCK_GROUPS": (([1, 2],), "groups_pkey"),
    "CLAIMS_OF": (("a",), "groups_owned"),
    "LOCK_CLAIMABLE": ((8, True), "groups_pending"),
    "LOCK_READY": ((8, 1), "groups_ready"),
    "LOCK_OUTDATED": ((1,), "groups_ready"),
    "LOCK_OPENED": ((), "groups_outstanding"),
    "LOCK_OWNED": (("a",), "groups_owned"),
    "LOCK_FORFEIT": ((["a"],), "groups_owned"),
    "READ_PROMPTS": (([1],), "prompts_pkey"),
    "READ_PAYLOADS": (([1], [1]), "rollouts_pkey"),
    "SUM_TOKENS": (([1],), "rollouts_pkey"),
    "FORGET": (([1], [1]), "rollouts_pkey"),
    "READ_LEASE_BY_REQUEST": (("r",), "leases_request_id_key"),
    "READ_LIVE_LEASES": ((), "leases_live"),
    "LOCK_LEASES_DUE": ((1.0, 8), "leases_live"),
    "COUNT_LIVE_LEASES": ((), "leases_live"),
    "FIND_BAD_HOLDS": (([1], ["l"], ["l"], 2), "lease_groups_lease_id_seq_key"),
    "FIND_PACED": ((True,), "leases_by_version"),
    "UPDATE_GROUPS": ((*([1] if at in (0, 2, 3) else [None] for at in range(14)), "a", True), "groups_pkey"),
}


@pytest.mark.parametrize("name", QUERIES)
async def test_what_runs_often_does_not_look_at_every_row(name: str, database: Database) -> None:
    parameters, index = QUERIES[name]
    async with database.transaction():
        await database.execute(sql.PLAN)
        await database.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        rows = await database.fetch(f"EXPLAIN {getattr(sql, name)}", *parameters)
    plan = [row[0] for row in rows]
    assert index == "groups_by_end" or not any("groups_by_end" in step for step in plan), plan
    assert any(index in step for step in plan), plan
    # The run's one row and the checkpoints are all there are of their kind.
    assert not [step for step in plan if "Seq Scan" in step and "on run" not in step and "on checkpoints" not in step]


# --- whose a database is


async def test_an_empty_database_gets_the_schema_once(empty: str) -> None:
    stores = [PostgresStore(empty, max_staleness=2, pool_size=1) for _ in range(3)]
    await asyncio.gather(*(store.open() for store in stores))
    await stores[0].commit(submitted(1))
    assert (await stores[2].load()).groups == (pending(1),)
    await asyncio.gather(*(store.close() for store in stores))
    connection = await asyncpg.connect(empty)
    applied = await connection.fetch("SELECT version, name, works_with FROM schema_migrations ORDER BY version")
    await connection.close()
    known = postgres_schema.migrations()
    assert [tuple(row) for row in applied] == [(one.version, one.name, one.works_with) for one in known]


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ("CREATE TABLE groups (id bigint)", "groups"),
        ("CREATE VIEW leases AS SELECT 1", "leases"),
        ("CREATE TABLE schema_migrations (version text)", "schema_migrations"),
    ],
)
async def test_a_database_of_another_program_is_left_as_it_was(tables: str, named: str, empty: str) -> None:
    connection = await asyncpg.connect(empty)
    try:
        await connection.execute(tables)
        with pytest.raises(ConfigError, match=f"another program.*{named}") as refused:
            await PostgresStore(empty, max_staleness=2, pool_size=1).open()
        assert PASSWORD not in str(refused.value)
        relations = (
            "SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'v')"
        )
        assert await connection.fetchval(relations) == 1
    finally:
        await connection.close()


async def test_a_database_may_hold_other_tables_and_other_schemas(empty: str) -> None:
    connection = await asyncpg.connect(empty)
    try:
        await connection.execute("CREATE TABLE something (id bigint)")
        await connection.execute("CREATE SCHEMA elsewhere; CREATE TABLE elsewhere.groups (id bigint)")
    finally:
        await connection.close()
    store = PostgresStore(empty, max_staleness=2, pool_size=1)
    await store.open()
    await store.commit(submitted(1))
    await store.close()


async def test_a_user_who_may_not_make_tables_is_told_so(empty: str) -> None:
    name = f"guest_{empty.rpartition('_')[2]}"
    await cluster().execute(f"CREATE ROLE {name} LOGIN")
    try:
        with pytest.raises(ConfigError, match="may not make tables"):
            await PostgresStore(empty.replace("rollout:", f"{name}:"), max_staleness=2, pool_size=1).open()
    finally:
        await cluster().execute(f"DROP ROLE {name}")


def migration(version: int, works_with: int, script: str) -> postgres_schema.Migration:
    return postgres_schema.Migration(version=version, name="later", works_with=works_with, script=script)


async def migrated(url: str, *more: postgres_schema.Migration, statement_timeout_s: float = 10.0) -> None:
    connections = Connections(url, pool_size=1, statement_timeout_s=statement_timeout_s)
    await connections.open()
    try:
        await postgres_schema.migrate(connections, "x", [*postgres_schema.migrations(), *more])
    finally:
        await connections.close()


NEWER = len(postgres_schema.migrations()) + 1


async def test_beside_a_newer_schema_that_works_with_it_a_service_goes_on(url: str, store: PostgresStore) -> None:
    """What it has prepared before is still of use, and so is what it starts with."""

    async def everything(first: int) -> None:
        replica = Replica(replica_id="a", name="a", service="1", rules="r")
        await store.join(replica, lease_s=60)
        await store.commit(scored(first, first + 1))
        await store.transact(lambda tx: tx.write(leasing(lease(f"l{first}", first)), owner="a"))
        await store.transact(lambda tx: tx.set_run(replace(tx.run, revision=first)), alone=True)
        assert await store.transact(lambda tx: tx.once("a", first))
        assert await store.beat(replica, lease_s=60)
        assert [seen.replica for seen in (await store.overview()).replicas] == [replica]
        assert (await store.load()).groups[-1] == ready(first + 1)
        assert len(await store.payloads([first, first + 1])) == 2
        assert (await store.lease(f"l{first}")) == lease(f"l{first}", first)

    await everything(1)
    await migrated(url, migration(NEWER, 1, ";".join(f"ALTER TABLE {table} ADD COLUMN later text" for table in TABLES)))
    await everything(3)
    await store.close()
    await store.open()
    await everything(5)


async def test_a_newer_schema_that_does_not_work_with_a_service_is_refused(url: str, store: PostgresStore) -> None:
    await store.close()
    await migrated(url, migration(NEWER, NEWER, "SELECT 1"), migration(NEWER + 1, 1, "SELECT 1"))
    with pytest.raises(ConfigError, match=f"newer version.*schema {NEWER + 1}.*{NEWER} and newer"):
        await store.open()


async def test_a_migration_may_take_longer_than_a_statement(url: str) -> None:
    await migrated(url, migration(NEWER, 1, "SELECT pg_sleep(0.3)"), statement_timeout_s=0.1)
    connection = await asyncpg.connect(url)
    assert await connection.fetchval("SELECT max(version) FROM schema_migrations") == NEWER
    await connection.close()


async def test_a_migration_that_fails_leaves_the_version_before(url: str, store: PostgresStore) -> None:
    await store.commit(submitted(1))
    with pytest.raises(ConfigError, match=f"cannot be migrated to schema {NEWER}"):
        await migrated(url, migration(NEWER, 1, "CREATE TABLE half (id bigint); SELECT nothing_like_it()"))
    connection = await asyncpg.connect(url)
    assert await connection.fetchval("SELECT max(version) FROM schema_migrations") == NEWER - 1
    assert await connection.fetchval("SELECT to_regclass('half')") is None
    await connection.close()
    assert (await store.load()).groups == (pending(1),)


# --- the door


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_a_url_of_postgresql_names_this_store(scheme: str) -> None:
    url = f"{scheme}://me:secret@db.example:5432/runs"
    for store in (open_store(url, max_staleness=1), open_shared_store(url, max_staleness=1, pool_size=2)):
        assert isinstance(store, PostgresStore)
        assert store.url == url
        assert store.name == f"{scheme}://db.example:5432/runs"


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("postgresql://me:word@a,b:5433/runs?target_session_attrs=read-write", "postgresql://a,b:5433/runs"),
        ("postgresql:///runs?host=/var/run&password=word", "postgresql:///runs"),
        ("postgresql://me:wo/rd@host/runs", "postgresql://…"),
        ("postgresql://me:wo?rd@host/runs", "postgresql://…"),
        ("postgresql://host/runs?password=wo@rd", "postgresql://…"),
        ("postgresql://me:wo@rd@host/runs", "postgresql://…"),
    ],
)
def test_no_password_is_shown(url: str, name: str) -> None:
    assert shown(url) == name


def test_an_unknown_url_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError, match=r"mysql://…host/runs.*postgresql://") as refused:
        open_store("mysql://me:secret@host/runs", max_staleness=1)
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be shared"):
        open_shared_store("sqlite:///a.db", max_staleness=1)


def test_without_its_package_the_store_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(ConfigError, match=r"rollout-service\[postgres\]"):
        open_store("postgresql://host/runs", max_staleness=1)


async def test_a_store_that_is_closed_is_unavailable_and_says_which(store: PostgresStore) -> None:
    await store.close()
    with pytest.raises(StoreUnavailable, match=r"postgresql://127\.0\.0\.1.*not open") as refused:
        await store.prompts([1])
    assert PASSWORD not in str(refused.value)
    assert prompt(1).prompt_id == "prompt-1"
