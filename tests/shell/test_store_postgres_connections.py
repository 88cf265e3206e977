"""Transactions on a real PostgreSQL: what they leave behind, when they collide, take too long or are cancelled."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from rollout_service.errors import StoreUnavailable
from rollout_service.store.postgres_connections import ATTEMPTS, Connections
from tests.postgres_things import add, ask, assert_shown, doing, names, opened, pid, sessions, until


class Undo(Exception):
    """Raised by work that wants its transaction undone."""


# transactions


async def test_what_run_returned_from_is_committed_and_what_it_raised_is_undone(connections: Connections) -> None:
    async def returns(connection: Any) -> str:
        await add("kept")(connection)
        return "result"

    async def raises(connection: Any) -> None:
        await add("undone")(connection)
        raise Undo

    assert await connections.run(returns) == "result"
    with pytest.raises(Undo):
        await connections.run(raises)
    assert await connections.look(names) == ["kept"]


async def test_what_comes_first_is_in_the_transaction(connections: Connections) -> None:
    async def locked(connection: Any) -> bool:
        return bool(
            await connection.fetchval(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
            )
        )

    assert await connections.run(locked, first="SELECT pg_advisory_xact_lock(7)")
    assert not await connections.run(locked)


async def test_limits_hold_in_transactions_and_leave_nothing_behind(url: str) -> None:
    settings = (
        "statement_timeout",
        "lock_timeout",
        "idle_in_transaction_session_timeout",
        "tcp_user_timeout",
        "synchronous_commit",
    )

    async def shown(connection: Any) -> list[str]:
        return [await connection.fetchval("SELECT current_setting($1)", name) for name in settings]

    async with opened(url, statement_timeout_s=8) as connections:
        assert await connections.run(shown) == ["8s", "8s", "4s", "8000", "on"]  # the server's own is off
        assert await connections.run(shown, sync=False) == ["8s", "8s", "4s", "8000", "off"]
        assert (await connections.look(shown))[:4] == ["8s", "8s", "4s", "8000"]

        async def after(connection: Any) -> list[str]:
            await connection.execute("COMMIT")
            return await shown(connection)

        assert await connections.run(after) == ["0", "0", "0", "0", "off"]


async def test_a_look_sees_one_moment_and_changes_nothing(connections: Connections) -> None:
    async def twice(connection: Any) -> tuple[list[str], list[str]]:
        before = await names(connection)
        await connections.run(add("meanwhile"))
        return before, await names(connection)

    assert await connections.look(twice) == ([], [])
    assert await connections.look(names) == ["meanwhile"]
    with pytest.raises(StoreUnavailable):
        await connections.look(add("by a look"))


async def test_connections_are_used_again_and_never_more_than_allowed(url: str) -> None:
    async with opened(url, pool_size=3) as connections:
        three = asyncio.Barrier(3)

        async def together(connection: Any) -> int:
            await three.wait()  # as many as there may be are at work
            return await pid(connection)

        pids = await asyncio.gather(*(connections.run(together) for _ in range(30)))
        assert len(set(pids)) == 3
        reserved = {await connections.run(pid, reserved=True) for _ in range(3)}
        assert len(reserved) == 1
        assert not reserved & set(pids)
        assert await sessions(url) == 5  # with the one that listens

    async def gone() -> bool:
        return await sessions(url) == 0

    await until(gone)


async def test_without_being_open_nothing_runs(url: str) -> None:
    connections = Connections(url, pool_size=1, statement_timeout_s=1)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="not open"):
            await connections.run(names)
        connections.notify_soon("ready")
        assert not connections.pushes
        await connections.open()
        with pytest.raises(RuntimeError):
            await connections.open()
        await connections.run(names)
        await connections.close()  # and once more from the start


async def test_an_error_of_a_file_is_passed_on(connections: Connections, tmp_path: Path) -> None:
    async def read(connection: Any) -> str:
        await add("undone")(connection)
        return (tmp_path / "prompts.jsonl").read_text()

    with pytest.raises(FileNotFoundError):
        await connections.run(read)
    assert await connections.look(names) == []


# collisions


async def test_a_unique_violation_runs_the_work_again(connections: Connections) -> None:
    both = asyncio.Barrier(2)
    ran = 0

    async def once(connection: Any) -> int:
        nonlocal ran
        ran += 1
        if await connection.fetchval("SELECT count(*) FROM things"):
            return 0
        await both.wait()  # each has found nothing
        await add("same")(connection)
        return 1

    added = await asyncio.gather(connections.run(once), connections.run(once))
    assert (sorted(added), ran) == ([0, 1], 3)


async def test_a_deadlock_runs_the_work_again(url: str) -> None:
    await ask(url, "INSERT INTO things VALUES ('a', 0), ('b', 0)")
    both = asyncio.Barrier(2)
    ran = 0

    async def in_order(first: str, second: str, connection: Any) -> None:
        nonlocal ran
        ran += 1
        update = "UPDATE things SET size = size + 1 WHERE name = $1"
        await connection.execute("SET LOCAL deadlock_timeout = 20")
        await connection.execute(update, first)
        if ran <= 2:
            await both.wait()  # each holds what the other asks for next
        await connection.execute(update, second)

    async with opened(url) as connections:
        await asyncio.gather(
            connections.run(lambda connection: in_order("a", "b", connection)),
            connections.run(lambda connection: in_order("b", "a", connection)),
        )
    assert await ask(url, "SELECT sum(size) FROM things") == 4
    assert ran >= 3  # on a busy machine each may be the other's victim


async def test_a_collision_that_does_not_end_is_told(url: str) -> None:
    await ask(url, "INSERT INTO things VALUES ('taken', 0)")
    ran = 0

    async def collide(connection: Any) -> None:
        nonlocal ran
        ran += 1
        await add("taken")(connection)

    async with opened(url) as connections:
        with pytest.raises(StoreUnavailable, match="things_pkey") as told:
            await connections.run(collide)
        assert ran == ATTEMPTS
        assert_shown(told.value)


async def test_a_migration_beside_us_runs_the_work_again(url: str) -> None:
    async def everything(connection: Any) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in await connection.fetch("SELECT * FROM things")]

    async with opened(url, pool_size=1) as connections:
        await connections.run(add("a"))
        assert await connections.run(everything) == [("a", 1)]
        await ask(url, "ALTER TABLE things ADD COLUMN colour text DEFAULT 'red'")
        assert await connections.run(everything) == [("a", 1, "red")]
        await ask(url, "ALTER TABLE things ADD COLUMN weight int DEFAULT 3")
        assert await connections.look(everything) == [("a", 1, "red", 3)]


async def test_an_error_that_work_keeps_to_itself_is_no_commit(connections: Connections) -> None:
    async def swallow(connection: Any) -> str:
        await add("lost")(connection)
        try:
            await connection.execute("SELECT 1/0")
        except asyncpg.PostgresError:
            return "fine"
        return "no error?"

    with pytest.raises(StoreUnavailable):
        await connections.run(swallow)
    assert await connections.look(names) == []


async def test_what_the_database_refuses_is_told_in_one_line(connections: Connections) -> None:
    async def nonsense(connection: Any) -> None:
        await connection.execute("INSERT INTO things\nVALUES (NULL,\n$1)", 1)

    with pytest.raises(StoreUnavailable, match="null value") as told:
        await connections.run(nonsense)
    assert_shown(told.value)
    with pytest.raises(StoreUnavailable):
        await connections.run(add("b", "no number"))  # type: ignore[arg-type]  # the driver refuses it


# too long


async def test_a_statement_that_takes_too_long_is_told_and_the_connection_kept(url: str) -> None:
    async with opened(url, pool_size=1, statement_timeout_s=0.2) as connections:
        before = await connections.run(pid)
        with pytest.raises(StoreUnavailable, match="statement timeout") as told:
            await connections.run(lambda connection: connection.execute("SELECT pg_sleep(30)"))
        assert_shown(told.value)
        assert await connections.run(pid) == before


async def test_a_lock_that_is_waited_for_too_long_is_told(url: str) -> None:
    lock = "SELECT pg_advisory_xact_lock(7)"
    holder = await asyncpg.connect(url)
    async with opened(url, statement_timeout_s=0.2) as connections:
        async with holder.transaction():
            await holder.execute(lock)
            with pytest.raises(StoreUnavailable, match="timeout"):
                await connections.run(names, first=lock)
        await connections.run(names, first=lock)
    await holder.close()


async def test_who_hangs_in_a_transaction_loses_its_lock_before_those_who_wait_give_up(url: str) -> None:
    lock = "SELECT pg_advisory_xact_lock(7)"
    inside = asyncio.Event()

    async def hang(connection: Any) -> None:
        await add("hung")(connection)
        inside.set()
        await asyncio.Event().wait()

    observer = await asyncpg.connect(url)

    async def late(connection: Any) -> None:
        await add("late")(connection)
        mine = connection.get_server_pid()

        async def put_out() -> bool:
            return await doing(observer, mine) == ("gone", "")

        await until(put_out)
        await names(connection)

    async with opened(url, statement_timeout_s=2) as connections, opened(url, statement_timeout_s=2) as others:
        hung = asyncio.create_task(connections.run(hang, first=lock))
        await inside.wait()
        await others.run(add("waited"), first=lock)
        hung.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hung
        with pytest.raises(StoreUnavailable):
            await connections.run(late, first=lock)
        assert await connections.look(names) == ["waited"]
    await observer.close()


async def test_who_takes_no_answer_loses_its_lock_too(url: str) -> None:
    """A process that is stopped while the server writes to it: no statement's time runs, and nothing is idle."""
    begun = asyncio.Event()
    observer = await asyncpg.connect(url)

    async def stopped(connection: Any) -> None:
        mine = connection.get_server_pid()

        async def answering() -> bool:
            return await doing(observer, mine) == ("active", "PgSleep")

        async def stop() -> None:
            await until(answering)
            connection._transport.pause_reading()
            begun.set()

        stopping = asyncio.create_task(stop())
        await connection.fetch("SELECT pg_sleep(0.1), repeat('x', 1000000) FROM generate_series(1, 60)", timeout=60)
        await stopping

    async with opened(url, statement_timeout_s=10) as others, opened(url, statement_timeout_s=1) as connections:
        task = asyncio.create_task(connections.run(stopped, first="SELECT pg_advisory_xact_lock(7)"))
        await begun.wait()
        await others.run(names, first="SELECT pg_advisory_xact_lock(7)")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await observer.close()


async def test_where_all_connections_stay_busy_that_is_told_and_the_reserved_one_is_free(url: str) -> None:
    async with opened(url, pool_size=2, statement_timeout_s=1.0) as connections:
        both, leave = asyncio.Barrier(3), asyncio.Event()

        async def long(connection: Any) -> None:
            await both.wait()
            while not leave.is_set():
                await connection.execute("SELECT pg_sleep(0.05)")  # who does nothing is put out of its transaction

        busy = [asyncio.create_task(connections.run(long)) for _ in range(2)]
        await both.wait()
        refused = asyncio.create_task(connections.run(names))
        assert await connections.run(names, reserved=True) == []
        with pytest.raises(StoreUnavailable, match="all 2 connections were busy"):
            await refused
        leave.set()
        await asyncio.gather(*busy)
        assert await connections.run(names) == []


# cancellation


@pytest.mark.parametrize(
    ("where", "seen"),
    [
        ("in a statement", ("active", "PgSleep")),
        ("between statements", ("idle in transaction", "ClientRead")),
        ("waiting for a lock", ("active", "advisory")),
    ],
)
async def test_a_cancelled_transaction_is_undone_at_once(url: str, where: str, seen: tuple[str, str]) -> None:
    lock = "SELECT pg_advisory_xact_lock(7)"
    working: list[int] = []

    async def work(connection: Any) -> None:
        await add("cancelled")(connection)
        working.append(connection.get_server_pid())
        if where == "in a statement":
            await connection.execute("SELECT pg_sleep(60)")
        elif where == "waiting for a lock":
            await connection.execute("SELECT pg_advisory_xact_lock(8)")
        await asyncio.Event().wait()

    holder = await asyncpg.connect(url)
    await holder.execute("SELECT pg_advisory_lock(8)")

    async def there() -> bool:
        return bool(working) and await doing(holder, working[0]) == seen

    async with opened(url, pool_size=1) as connections, opened(url, pool_size=1) as others:
        for _ in range(3):
            working.clear()
            task = asyncio.create_task(connections.run(work, first=lock))
            await until(there)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            began = time.monotonic()
            await others.run(names, first=lock)
            assert time.monotonic() - began < 4.0  # and not once the server puts it out, after 5 s
            assert await connections.run(names) == []
        assert await sessions(url) <= 6
    await holder.close()


async def test_cancelled_at_any_moment_nothing_is_half_done_and_nothing_leaks(url: str) -> None:
    async with opened(url, pool_size=2) as connections:
        for step in range(60):

            async def pair(connection: Any, step: int = step) -> None:
                await add(f"{step}-a")(connection)
                await add(f"{step}-b")(connection)

            task = asyncio.create_task(connections.run(pair))
            await asyncio.sleep(0.0002 * step)  # the moment itself, not a wait for anything
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        found = await connections.look(names)
        halves = {name.partition("-")[0] for name in found}
        assert len(found) == 2 * len(halves)
        await asyncio.gather(*(connections.run(pid) for _ in range(4)))  # every place is free

        async def few() -> bool:
            return await sessions(url) <= 4

        await until(few)
