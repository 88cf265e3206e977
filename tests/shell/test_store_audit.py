"""The audit finds each thing that must not be, and nothing in a sound store."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import asyncpg
import pytest

from rollout_service.store import SqliteStore
from rollout_service.store.postgres import PostgresStore
from tests import store_audit
from tests.contract.store_samples import MAX_STALENESS
from tests.postgres_cluster import cluster
from tests.shell.test_store_copy import fill
from tests.store_audit import audit_postgres, audit_sqlite

# Rule -> what breaks it. Groups: 1, 2 leased by l1; 3 acked under l2; 4 stale; 5 dropped; 6 failed; 7, 8 ready;
# 9, 11 pending; 10 generating. There is a checkpoint, which keeps the prompts of 5 and 6.
BREAKS = {
    "as many groups as were submitted": "UPDATE run SET last_seq = 12",
    "groups are numbered without a gap": "UPDATE groups SET seq = 12 WHERE seq = 11",
    "an acked group was in the lease that it was acked under": "UPDATE lease_groups SET attempt = 2 WHERE seq = 3",
    "a leased group is held by a live lease that was made with it": "UPDATE leases SET state = 'ended'",
    "only leased groups are held, and only acked ones acked": "UPDATE groups SET lease_id = 'l1' WHERE seq = 7",
    "a live lease holds something": "UPDATE leases SET state = 'live' WHERE lease_id = 'l2'",
    "a lease was made with a group": "DELETE FROM lease_groups WHERE lease_id = 'l2'",
    "a lease names no attempt that never was": "UPDATE lease_groups SET attempt = 2 WHERE seq = 1",
    "every group that ended has a number, and no other one does": "UPDATE groups SET end_number = NULL WHERE seq = 4",
    "end numbers are unique": "DROP INDEX groups_by_end; UPDATE groups SET end_number = 2 WHERE seq = 3",
    "an outstanding group has its prompt": "DELETE FROM prompts WHERE seq = 9",
    "a prompt that ended stays only for a checkpoint or a live lease": "DELETE FROM checkpoints",
    "finished rollouts of a group that ended stay only for a live lease": (
        "UPDATE rollouts SET seq = 4 WHERE seq = 10 AND ok = 1"
    ),
    "scores of a group that ended stay only for a live lease": "UPDATE scores SET seq = 4 WHERE seq = 7",
    "a rollout is of a row of the current attempt": "UPDATE rollouts SET attempt = 2 WHERE seq = 10",
    "a score is of the current attempt": "UPDATE scores SET attempt = 2 WHERE seq = 7",
    "a prompt is of a group": "UPDATE prompts SET seq = 99 WHERE seq = 6",
    "what is scored has every rollout": "DELETE FROM rollouts WHERE seq = 8 AND idx = 3",
    "what is ready has a score and what it says is finished": "UPDATE rollouts SET ok = 0 WHERE seq = 8 AND idx = 3",
    "nothing is of a version that was never posted": "UPDATE groups SET version = 3 WHERE seq = 8",
    "a checkpoint is of an end that was": "INSERT INTO checkpoints VALUES ('later', 2, 3, 1, 0)",
    "no lease was made with a group staler than 2": "UPDATE leases SET policy_version = 3 WHERE lease_id = 'l1'",
    "counters are what a count finds": "UPDATE run SET stale = 0",
    "ends are counted": "UPDATE run SET ends = 3",
    "every rollout has its payload, and every payload its rollout": "DELETE FROM payloads WHERE id = 3",
}
UNBREAKABLE = {
    # The keys of the tables forbid them, and they cannot be taken from a SQLite table.
    "identities are unique",
    "a request_id made one lease",
}


def test_every_rule_is_tried_here() -> None:
    rules = {*store_audit.RULES, *store_audit.SQLITE_RULES}
    assert rules - UNBREAKABLE == set(BREAKS) - {"no lease was made with a group staler than 2"}
    assert store_audit.POSTGRES_RULES.keys() - store_audit.SQLITE_RULES.keys() <= {*POSTGRES_BREAKS}


@pytest.fixture
async def sound(tmp_path: Path) -> Path:
    store = SqliteStore(tmp_path / "a.db", max_staleness=MAX_STALENESS)
    await fill(store)
    await store.close()
    assert audit_sqlite(store.path, max_staleness=MAX_STALENESS) == []
    return store.path


@pytest.mark.parametrize("rule", BREAKS)
async def test_a_broken_rule_is_told(rule: str, sound: Path) -> None:
    with closing(sqlite3.connect(sound)) as writer:
        writer.execute("PRAGMA ignore_check_constraints = ON")
        for (trigger,) in writer.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            writer.execute(f'DROP TRIGGER "{trigger}"')
        writer.executescript(BREAKS[rule])
    told = audit_sqlite(sound, max_staleness=MAX_STALENESS)
    assert [line for line in told if line.startswith(f"broken: {rule}: ")], told


POSTGRES_BREAKS = {
    "counters are what a count finds": "UPDATE tallies SET held_bytes = held_bytes + 1",
    "identity, of the counters alone": "UPDATE tallies SET acked = acked + 1",
    "ends are counted": "SELECT setval('group_ends', 3)",
    "only what is generated or scored has an owner, under a claim": "UPDATE groups SET owner = 'x' WHERE seq = 10",
    "an outstanding group knows the size of its prompt": "UPDATE groups SET prompt_bytes = 0 WHERE seq = 9",
    "an owner is a replica that is known": "UPDATE groups SET owner = 'x', claim = 1 WHERE seq = 10",
    "an acked group was in the lease that it was acked under": "UPDATE lease_groups SET attempt = 2 WHERE seq = 3",
}


async def test_a_broken_rule_is_told_of_a_database() -> None:
    for rule, statement in POSTGRES_BREAKS.items():
        async with cluster().database() as url:
            store = PostgresStore(url, max_staleness=MAX_STALENESS, pool_size=1)
            await fill(store)
            await store.close()
            assert await audit_postgres(url, max_staleness=MAX_STALENESS, at_rest=True) == []
            connection = await asyncpg.connect(url)
            await connection.execute("ALTER TABLE groups DISABLE TRIGGER USER")
            await connection.execute(statement)
            await connection.close()
            told = await audit_postgres(url, max_staleness=MAX_STALENESS, at_rest=True)
            assert [line for line in told if line.startswith(f"broken: {rule}: ")], told
