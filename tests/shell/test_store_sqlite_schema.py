"""The schema itself refuses an illegal state, whoever writes it; and its indexes are the ones that are used."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_service.core.records import Batch, RunState
from rollout_service.store import sqlite_file
from rollout_service.store import sqlite_queries as sql
from rollout_service.store.sqlite_write import BatchWriter
from tests.contract.store_samples import acked, dropped, finished, lease, leasing, new_group, scored


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """Group 1 is ready, 2 acked, 3 leased, 4 dropped, 5 pending."""
    connection = sqlite_file.open_writer(tmp_path / "a.db", busy_s=1)
    writer = BatchWriter(connection, max_staleness=2)
    acking = Batch(
        run=RunState(last_seq=5),
        groups={2: acked(2, "l"), 4: dropped(4)},
        new_groups={5: new_group(5)},
        rollouts={},
    )
    for batch in (scored(1, 2, 3, 4), leasing(lease("l", 2, 3, request_id="r")), acking):
        connection.execute("BEGIN")
        writer.write(batch)
        connection.execute("COMMIT")
    yield connection
    connection.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE groups SET state = 'lost' WHERE seq = 1",
        "UPDATE groups SET version = NULL WHERE seq = 1",
        "UPDATE groups SET version = -1 WHERE seq = 1",
        "UPDATE groups SET version = 0 WHERE seq = 5",
        "UPDATE groups SET version = 'new' WHERE seq = 1",
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
        "UPDATE groups SET state = 'ready', acked_by = NULL WHERE seq = 2",
        "UPDATE groups SET state = 'pending', acked_by = NULL, version = NULL WHERE seq = 2",
        "UPDATE groups SET prompt_id = 'other' WHERE seq = 1",
        "UPDATE groups SET num_generations = 5, rows = 'fffff' WHERE seq = 1",
        "UPDATE groups SET digest = x'00' WHERE seq = 1",
        "UPDATE groups SET seq = 9 WHERE seq = 1",
        "DELETE FROM groups WHERE seq = 5",
        "INSERT INTO groups (seq, prompt_id, epoch, digest, num_generations, state, attempt, tries, rows,"
        " payload_bytes, submitted_at, changed_at) VALUES (9, 'prompt-1', 0, x'00', 1, 'pending', 1, 1, 'w', 0, 0, 0)",
        "INSERT INTO rollouts VALUES (1, 2, 0, 1, 0, 999)",
        "INSERT INTO rollouts VALUES (1, 1, 0, 1, 0, 999)",
        "INSERT INTO rollouts VALUES (1, 1, 4, 1, 0, 999)",
        "INSERT INTO rollouts VALUES (99, 1, 0, 1, 0, 999)",
        "INSERT INTO rollouts VALUES (5, 1, 0, 2, 0, 999)",
        "UPDATE rollouts SET payload_id = 1",
        "INSERT INTO scores VALUES (1, 2, x'00')",
        "INSERT INTO prompts VALUES (99, x'00')",
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
        "UPDATE run SET acked = 6",
        "UPDATE run SET paused = 2",
        "INSERT INTO run (id) VALUES (2)",
    ],
)
def test_an_illegal_state_is_refused(statement: str, database: sqlite3.Connection) -> None:
    before = list(database.iterdump())
    with pytest.raises(sqlite3.IntegrityError):
        database.execute(statement)
    assert list(database.iterdump()) == before


def test_an_attempt_may_not_fall_and_an_ended_group_goes_on_in_a_new_one(database: sqlite3.Connection) -> None:
    reopen = (
        "UPDATE groups SET state = 'pending', acked_by = NULL, version = NULL, rows = 'wwww', end_number = NULL,"
        " attempt = ? WHERE seq = 2"
    )
    database.execute(reopen, (2,))
    with pytest.raises(sqlite3.IntegrityError, match="may not fall"):
        database.execute(reopen, (1,))


def test_a_removed_rollout_takes_its_payload_with_it(database: sqlite3.Connection) -> None:
    (before,) = database.execute("SELECT count(*) FROM payloads").fetchone()
    database.execute("DELETE FROM rollouts WHERE seq = 1")
    (after,) = database.execute("SELECT count(*) FROM payloads").fetchone()
    assert before - after == 4


def test_payloads_take_new_numbers_after_a_restart(database: sqlite3.Connection) -> None:
    (last,) = database.execute(sql.LAST_PAYLOAD_ID).fetchone()
    database.execute("BEGIN")
    BatchWriter(database, max_staleness=2).write(Batch(rollouts={(5, 1, 0): finished(0)}))
    database.execute("COMMIT")
    assert database.execute(sql.LAST_PAYLOAD_ID).fetchone() == (last + 1,)


@pytest.mark.parametrize(
    ("query", "parameters", "index"),
    [
        (sql.READ_OUTSTANDING, (), "groups_outstanding"),
        (sql.READ_OUTSTANDING_ROLLOUTS, (), "groups_outstanding"),
        (sql.LIST_OUTSTANDING, ("ready", 0, 1), "groups_outstanding"),
        (sql.LIST_ENDED, ("acked", 0, 1), "groups_ended"),
        (sql.READ_LIVE_LEASES, (), "leases_live"),
        (sql.FIND_PROMPT, ("a", 0), "sqlite_autoindex_groups_1"),
        (sql.READ_LEASE_BY_REQUEST, ("r",), "sqlite_autoindex_leases_2"),
        (sql.FORGET_FINISHED, (1,), "PRIMARY KEY"),
        (sql.READ_ENDED_SINCE, (1,), "groups_by_end"),
        (sql.FIND_HOLDER, ("l", 1, 1), "sqlite_autoindex_lease_groups"),
    ],
)
def test_what_runs_often_does_not_look_at_every_row(
    query: str, parameters: tuple[object, ...], index: str, database: sqlite3.Connection
) -> None:
    plan = [row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {query}", parameters)]
    assert any(index in step for step in plan), plan
    assert not [step for step in plan if step.startswith("SCAN") and "INDEX" not in step]
