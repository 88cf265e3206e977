"""Transactions and signals on a real PostgreSQL, and what becomes of them when something happens to it."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from rollout_service.errors import ConfigError, StoreUnavailable
from rollout_service.store import postgres_server
from rollout_service.store.postgres_connections import ATTEMPTS, Connections
from tests.postgres_cluster import PASSWORD, UNSYNCED, USER, Cluster, cluster
from tests.postgres_pooler import running_pooler
from tests.tcp_proxy import Faults, Proxy

WAIT_S = 30.0
CLOSED_S = 1.0
OPEN: list[Connections] = []
PASSED = Faults(drop=0.0, cut=0.0, delay=0.0)
DROPPED = Faults(drop=1.0)


class Undo(Exception):
    """Raised by work that wants its transaction undone."""


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with cluster().database(schema=False) as url:
        await prepare(url)
        yield url


@pytest.fixture(scope="module")
def own() -> Iterator[Cluster]:
    """A server to be maltreated, with the password asked for."""
    made = Cluster({**UNSYNCED, "max_connections": "40"}, auth="scram-sha-256")
    made.start()
    yield made
    made.close()


@pytest.fixture
async def own_url(own: Cluster) -> AsyncIterator[str]:
    async with own.database(schema=False) as url:
        await prepare(url)
        yield url


async def prepare(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute("CREATE TABLE things (name text PRIMARY KEY, size int NOT NULL)")
    await connection.close()


@asynccontextmanager
async def opened(url: str, *, pool_size: int = 4, statement_timeout_s: float = 10.0) -> AsyncIterator[Connections]:
    """Leaves no task behind, and ends within a second."""
    connections = Connections(url, pool_size=pool_size, statement_timeout_s=statement_timeout_s)
    before = asyncio.all_tasks()
    await connections.open()
    OPEN.append(connections)
    try:
        yield connections
    finally:
        OPEN.remove(connections)
        began = time.monotonic()
        await connections.close()
        assert time.monotonic() - began < CLOSED_S
        await connections.close()
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert OPEN or not left, left  # of the last one: those of others are no leak


@pytest.fixture
async def connections(url: str) -> AsyncIterator[Connections]:
    async with opened(url) as connections:
        yield connections


def add(name: str, size: int = 1) -> Callable[[Any], Awaitable[None]]:
    async def work(connection: Any) -> None:
        await connection.execute("INSERT INTO things VALUES ($1, $2)", name, size)

    return work


async def names(connection: Any) -> list[str]:
    return [row["name"] for row in await connection.fetch("SELECT name FROM things ORDER BY name")]


async def pid(connection: Any) -> int:
    found = await connection.fetchval("SELECT pg_backend_pid()")
    assert isinstance(found, int)
    return found


async def ask(url: str, statement: str, *arguments: object) -> Any:
    """Outside of everything that is tested."""
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(statement, *arguments)
    finally:
        await connection.close()


async def sessions(url: str) -> int:
    """Of the service, at the database."""
    found = await ask(
        url,
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = $1",
        "rollout-service",
    )
    return int(found)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await holds():
            await asyncio.sleep(0.01)  # between two looks


async def works(connections: Connections, name: str, *, reserved: bool = False) -> None:
    """Comes back by itself within the time."""

    async def again() -> bool:
        try:
            await connections.run(add(name), reserved=reserved)
        except StoreUnavailable as exc:
            assert_shown(exc)
            return False
        return True

    await until(again)
    assert name in await connections.look(names)


def assert_shown(error: BaseException) -> None:
    """One line, and no password."""
    assert "\n" not in str(error)
    assert PASSWORD not in str(error)
    assert "PostgreSQL at 127.0.0.1" in str(error), str(error)


# --- transactions


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

        async def slowly(connection: Any) -> int:
            await connection.execute("SELECT pg_sleep(0.01)")
            return await pid(connection)

        pids = await asyncio.gather(*(connections.run(slowly) for _ in range(30)))
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


# --- collisions


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


# --- too long


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

    async def late(connection: Any) -> None:
        await add("late")(connection)
        inside.set()
        await asyncio.sleep(1.2)  # longer than the server allows
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


async def test_who_takes_no_answer_loses_its_lock_too(url: str) -> None:
    """A process that is stopped while the server writes to it: no statement's time runs, and nothing is idle."""
    begun = asyncio.Event()

    async def stopped(connection: Any) -> None:
        transport = connection._transport
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, transport.pause_reading)
        loop.call_later(0.05, begun.set)
        await connection.fetch("SELECT pg_sleep(0.1), repeat('x', 1000000) FROM generate_series(1, 60)", timeout=60)

    async with opened(url, statement_timeout_s=10) as others, opened(url, statement_timeout_s=1) as connections:
        task = asyncio.create_task(connections.run(stopped, first="SELECT pg_advisory_xact_lock(7)"))
        await begun.wait()
        await others.run(names, first="SELECT pg_advisory_xact_lock(7)")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_where_all_connections_stay_busy_that_is_told_and_the_reserved_one_is_free(url: str) -> None:
    async with opened(url, pool_size=2, statement_timeout_s=1.0) as connections:
        hang = "SELECT pg_sleep(0.4)"

        async def long(connection: Any) -> None:
            for _ in range(4):
                await connection.execute(hang)

        busy = [asyncio.create_task(connections.run(long)) for _ in range(2)]
        await asyncio.sleep(0)
        refused = asyncio.create_task(connections.run(names))
        assert await connections.run(names, reserved=True) == []
        with pytest.raises(StoreUnavailable, match="all 2 connections were busy"):
            await refused
        await asyncio.gather(*busy)
        assert await connections.run(names) == []


# --- cancellation


@pytest.mark.parametrize("where", ["in a statement", "between statements", "waiting for a lock"])
async def test_a_cancelled_transaction_is_undone_at_once(url: str, where: str) -> None:
    lock = "SELECT pg_advisory_xact_lock(7)"
    inside = asyncio.Event()

    async def work(connection: Any) -> None:
        await add("cancelled")(connection)
        inside.set()
        if where == "in a statement":
            await connection.execute("SELECT pg_sleep(60)")
        elif where == "waiting for a lock":
            await connection.execute("SELECT pg_advisory_xact_lock(8)")
        await asyncio.Event().wait()

    holder = await asyncpg.connect(url)
    await holder.execute("SELECT pg_advisory_lock(8)")
    async with opened(url, pool_size=1) as connections, opened(url, pool_size=1) as others:
        for _ in range(3):
            inside.clear()
            task = asyncio.create_task(connections.run(work, first=lock))
            await inside.wait()
            await asyncio.sleep(0.01)  # into the statement
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            began = time.monotonic()
            await others.run(names, first=lock)
            assert time.monotonic() - began < 3.0  # and not until its time is over
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
            await asyncio.sleep(0.0002 * step)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        found = await connections.look(names)
        halves = {name.partition("-")[0] for name in found}
        assert len(found) == 2 * len(halves)
        await asyncio.gather(*(connections.run(pid) for _ in range(4)))  # every place is free

        async def few() -> bool:
            return await sessions(url) <= 4

        await until(few)


# --- trouble


@pytest.mark.parametrize("at_once", [False, True], ids=["restarted", "crashed"])
async def test_a_server_that_was_restarted_is_used_again(own: Cluster, own_url: str, at_once: bool) -> None:
    async with opened(own_url) as connections:
        await asyncio.gather(*(connections.run(add(f"{n}")) for n in range(4)))
        await asyncio.to_thread(own.stop, at_once=at_once)
        for _ in range(3):
            with pytest.raises(StoreUnavailable) as told:
                await connections.run(add("down"))
            assert_shown(told.value)
        assert not connections.pushes
        with pytest.raises(StoreUnavailable):
            await connections.run(add("down"), reserved=True)
        with pytest.raises(StoreUnavailable):
            await connections.look(names)
        await asyncio.to_thread(own.start)
        await works(connections, "up again")
        await until(pushing(connections))
        assert await connections.look(names) == ["0", "1", "2", "3", "up again"]


def pushing(connections: Connections) -> Callable[[], Awaitable[bool]]:
    async def pushes() -> bool:
        return connections.pushes

    return pushes


async def test_a_restart_between_two_calls_is_not_noticed(own: Cluster, own_url: str) -> None:
    async with opened(own_url) as connections:
        await asyncio.gather(*(connections.run(add(f"{n}")) for n in range(4)))
        own.stop()
        own.start()  # nothing of it was seen by the event loop yet
        await asyncio.gather(*(connections.run(add(f"again-{n}")) for n in range(4)))


async def test_a_connection_cut_in_a_transaction_undoes_it(url: str) -> None:
    async with through_proxy(url) as (proxy, proxied), opened(proxied) as connections:

        async def cut(connection: Any) -> None:
            await add("cut")(connection)
            proxy.faults = DROPPED
            await names(connection)

        with pytest.raises(StoreUnavailable) as told:
            await connections.run(cut)
        assert_shown(told.value)
        assert "may have taken effect" not in str(told.value)
        proxy.faults = PASSED
        await works(connections, "after")
        assert await connections.look(names) == ["after"]


async def test_a_connection_cut_in_the_commit_is_told_as_a_doubt(url: str) -> None:
    async with through_proxy(url) as (proxy, proxied), opened(proxied) as connections:

        async def cut(connection: Any) -> None:
            await add("doubtful")(connection)
            proxy.faults = DROPPED

        with pytest.raises(StoreUnavailable, match="may have taken effect") as told:
            await connections.run(cut)
        assert_shown(told.value)
        proxy.faults = PASSED
        await works(connections, "after")
        assert await connections.look(names) == ["after", "doubtful"]


@asynccontextmanager
async def through_proxy(url: str) -> AsyncIterator[tuple[Proxy, str]]:
    port = url.rpartition(":")[2].partition("/")[0]
    async with Proxy(f"http://127.0.0.1:{port}", random.Random(7), PASSED) as proxy:
        yield proxy, url.replace(f":{port}/", f":{proxy.url.rpartition(':')[2]}/")


@contextmanager
def stopped(server: Cluster) -> Iterator[None]:
    """Every process of the server stands still: what is sent to it is taken, and nothing comes back."""
    parent = server.pid()
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    pids = [parent, *map(int, children)]
    for each in pids:
        os.kill(each, signal.SIGSTOP)
    try:
        yield
    finally:
        for each in pids:
            os.kill(each, signal.SIGCONT)


async def test_a_server_that_hangs_is_given_up_after_a_time(
    own: Cluster, own_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_server, "CONNECT_S", 0.5)
    monkeypatch.setattr(postgres_server, "ANSWER_S", 0.3)
    async with opened(own_url, pool_size=2, statement_timeout_s=0.4) as connections:
        await asyncio.gather(connections.run(names), connections.run(names))
        with stopped(own):
            began = time.monotonic()
            told = await asyncio.gather(*(connections.run(add("hung")) for _ in range(6)), return_exceptions=True)
            assert [type(each) for each in told] == [StoreUnavailable] * 6
            assert time.monotonic() - began < 5
            reserved = asyncio.create_task(connections.run(add("cancelled"), reserved=True))
            await asyncio.sleep(0.01)  # into its first statement
            reserved.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reserved
        await works(connections, "up again")
        await works(connections, "reserved", reserved=True)
        assert "hung" not in await connections.look(names)


async def test_closing_takes_no_second_even_where_the_server_hangs(own: Cluster, own_url: str) -> None:
    connections = Connections(own_url, pool_size=3, statement_timeout_s=10)
    await connections.open()
    await asyncio.gather(*(connections.run(names) for _ in range(3)))
    with stopped(own):
        hung = [asyncio.create_task(connections.run(add("hung"))) for _ in range(5)]
        connections.notify_soon("ready")
        await asyncio.sleep(0.05)  # all of them have asked
        began = time.monotonic()
        await connections.close()
        assert time.monotonic() - began < CLOSED_S
        told = await asyncio.gather(*hung, return_exceptions=True)
        assert [type(each) for each in told] == [StoreUnavailable] * 5
        assert len(asyncio.all_tasks()) == 1


async def test_closing_lets_a_transaction_on_its_way_end(url: str) -> None:
    connections = Connections(url, pool_size=1, statement_timeout_s=10)
    await connections.open()
    inside = asyncio.Event()

    async def work(connection: Any) -> None:
        await connection.execute("SELECT pg_sleep(0.02)")
        inside.set()
        await add("ended")(connection)

    task = asyncio.create_task(connections.run(work))
    await inside.wait()
    await connections.close()
    await task
    assert await ask(url, "SELECT count(*) FROM things") == 1


async def test_a_server_without_room_is_told_and_used_again(connections: Connections) -> None:
    async def full(connection: Any) -> None:
        await add("full")(connection)
        await connection.execute("SET LOCAL temp_file_limit = '64kB'; SET LOCAL work_mem = '64kB'")
        await connection.fetch("SELECT x FROM generate_series(1, 100000) x ORDER BY md5(x::text)")

    with pytest.raises(StoreUnavailable, match="temp_file_limit") as told:
        await connections.run(full)
    assert_shown(told.value)
    await connections.run(add("room"))
    assert await connections.look(names) == ["room"]


async def test_a_server_that_takes_no_more_connections_is_told_and_those_there_are_work(url: str) -> None:
    await ask(url, "DROP ROLE IF EXISTS limited")
    await ask(url, "CREATE ROLE limited LOGIN CONNECTION LIMIT 2")
    await ask(url, "GRANT ALL ON things TO limited")
    async with opened(
        url.replace(f"{USER}:{PASSWORD}", "limited"), pool_size=3
    ) as connections:  # one listens, one works
        inside, leave = asyncio.Event(), asyncio.Event()

        async def hold(connection: Any) -> None:
            inside.set()
            await leave.wait()

        held = asyncio.create_task(connections.run(hold))
        await inside.wait()
        with pytest.raises(StoreUnavailable, match="too many connections"):
            await connections.run(add("refused"))
        leave.set()
        await held
        await connections.run(add("taken"))
    await ask(url, "DROP OWNED BY limited")

    async def dropped() -> bool:
        await ask(url, "DROP ROLE limited")
        return True

    await until(dropped)


async def test_a_primary_that_became_read_only_is_told_and_used_again_when_it_is_one(
    own: Cluster, own_url: str
) -> None:
    async with opened(own_url) as connections:
        await connections.run(names)
        await read_only(own_url, on=True)
        try:
            with pytest.raises(StoreUnavailable) as told:
                await connections.run(add("read only"))
            assert_shown(told.value)
        finally:
            await read_only(own_url, on=False)
        await works(connections, "writable")
        await until(pushing(connections))


async def test_once_a_server_was_read_only_no_connection_of_before_is_used_again(url: str) -> None:
    async with opened(url, pool_size=3) as connections:
        inside, leave = asyncio.Event(), asyncio.Event()
        refused = False

        async def busy(connection: Any) -> int:
            inside.set()
            await leave.wait()
            return await pid(connection)

        async def read_only_once(connection: Any) -> int:
            nonlocal refused
            if not refused:
                refused = True
                await connection.execute("SET TRANSACTION READ ONLY")
            await add("written")(connection)
            return await pid(connection)

        before = {await connections.run(pid)}
        task = asyncio.create_task(connections.run(busy))
        await inside.wait()
        after = {await connections.run(read_only_once)}
        leave.set()
        before.add(await task)  # what it did counts, but it was its last transaction
        after |= set(await asyncio.gather(*(connections.run(pid) for _ in range(6))))
        assert not before & after


async def test_after_a_failover_the_new_primary_is_found_among_the_hosts(own: Cluster, own_url: str, url: str) -> None:
    old, new = (each.partition("@")[2].partition("/")[0] for each in (own_url, url))
    await ask(url, f"CREATE ROLE failed_over SUPERUSER LOGIN PASSWORD '{PASSWORD}'")
    await ask(own_url, f"CREATE ROLE failed_over SUPERUSER LOGIN PASSWORD '{PASSWORD}'")
    name = own_url.rpartition("/")[2]
    await ask(url, f"CREATE DATABASE failover_{name}")
    await ask(own_url, f"CREATE DATABASE failover_{name}")
    both = f"postgresql://failed_over:{PASSWORD}@{old},{new}/failover_{name}"
    urls = [f"postgresql://failed_over:{PASSWORD}@{host}/failover_{name}" for host in (old, new)]
    for each in urls:
        await prepare(each)
    heard: list[str] = []
    async with opened(both) as connections:
        connections.watch(heard.append)
        await connections.run(add("on the old one"))
        await read_only(own_url, on=True)
        try:
            await connections.run(add("on the new one"))  # it is not even noticed
            assert await connections.look(names) == ["on the new one"]

            async def heard_it() -> bool:  # as soon as it listens there
                await ask(urls[1], "SELECT pg_notify('rollout_service', 'run')")
                return "run" in heard

            await until(heard_it)
        finally:
            await read_only(own_url, on=False)
    for each in (url, own_url):
        await ask(each, f"DROP DATABASE failover_{name} WITH (FORCE)")
        await ask(each, "DROP ROLE failed_over")


async def read_only(url: str, *, on: bool) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute("SET default_transaction_read_only = off")
    await connection.execute(f"ALTER SYSTEM SET default_transaction_read_only = {'on' if on else 'off'}")
    await connection.execute("SELECT pg_reload_conf()")
    await connection.close()

    async def so() -> bool:
        return bool(await ask(url, "SHOW default_transaction_read_only") == ("on" if on else "off"))

    await until(so)


async def test_hosts_that_are_gone_or_silent_keep_nobody_from_the_others(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_server, "CONNECT_S", 1.0)
    login, _, place = url.rpartition("@")
    host, _, database = place.partition("/")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        gone = socket.create_server(("127.0.0.1", 0))
        ports = [gone.getsockname()[1], silent.getsockname()[1]]
        gone.close()
        others = ",".join(f"127.0.0.1:{port}" for port in ports)
        async with opened(f"{login}@{others},{host}/{database}") as connections:
            began = time.monotonic()
            await asyncio.gather(*(connections.run(add(f"{n}")) for n in range(4)))
            assert time.monotonic() - began < 1.0  # the one that answered is asked first from then on
        with pytest.raises(ConfigError) as told:
            await Connections(f"{login}@{others}/{database}", pool_size=1, statement_timeout_s=1).open()
        assert_shown(told.value)
        assert "refused" in str(told.value) or "Connect call failed" in str(told.value)
        assert "no answer in time" in str(told.value)


# --- at the start


async def test_a_wrong_password_is_a_fault_of_the_configuration_at_the_start_and_trouble_later(
    own: Cluster, own_url: str
) -> None:
    wrong = Connections(own_url.replace(PASSWORD, "wrong-and-secret"), pool_size=1, statement_timeout_s=1)
    with pytest.raises(ConfigError, match="password authentication failed") as told:
        await wrong.open()
    assert "wrong-and-secret" not in str(told.value)
    assert_shown(told.value)
    await ask(own_url, f"CREATE ROLE changing LOGIN PASSWORD '{PASSWORD}'")
    await ask(own_url, "GRANT ALL ON things TO changing")
    async with opened(own_url.replace(USER, "changing", 1), pool_size=2) as connections:
        await connections.run(names)
        await ask(own_url, "ALTER ROLE changing PASSWORD 'another'")
        await ask(own_url, "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = 'changing'")

        async def refused() -> bool:
            try:
                await connections.run(names)
            except StoreUnavailable as exc:
                assert_shown(exc)
                return "password authentication failed" in str(exc)
            return False

        await until(refused)
        await ask(own_url, f"ALTER ROLE changing PASSWORD '{PASSWORD}'")
        await works(connections, "again")
    await ask(own_url, "DROP OWNED BY changing")
    await ask(own_url, "DROP ROLE changing")


@pytest.mark.parametrize(
    "broken",
    [
        "postgresql://user:se/cret@127.0.0.1/db",
        "postgresql://user:se@cret@127.0.0.1/db",
        "postgresql://user:se#cret@127.0.0.1/db",
        "postgresql://user:se?cret@127.0.0.1/db",
        "postgresql://user:se[cret@127.0.0.1/db",
        "postgresql://user:secret@127.0.0.1:port/db",
        "postgresql://user:secret@127.0.0.1:1/db",
        "postgresql://user:secret@[::1/db",
        "postgresql://user:secret@127.0.0.1:1,127.0.0.1:1/db",
        "postgresql://127.0.0.1:1/db?password=secret",
        "postgresql://user:secret@127.0.0.1:1/db?sslmode=secret",
        "postgresql://user:secret@127.0.0.1:1/db?nonsense",
        "postgresql://user:secret@no-such-host.invalid/db",
        "mysql://user:secret@127.0.0.1/db",
    ],
)
async def test_a_url_that_leads_nowhere_is_told_in_one_line_without_its_password(broken: str) -> None:
    with pytest.raises(ConfigError) as told:
        await Connections(broken, pool_size=1, statement_timeout_s=1).open()
    for part in ("secret", "cret", "se/", "se@", "\n"):
        assert part not in str(told.value).replace("percent-encoded", "")
    assert str(told.value).startswith("store.url: ")


@pytest.mark.parametrize("url", ["postgresql://user:pa%2Fss@host/db", "postgresql://host/db?password=pa/ss"])
def test_an_error_that_repeats_the_password_is_told_by_its_name(url: str) -> None:
    server = postgres_server.Server(url, statement_timeout_s=1)
    assert server.told(ValueError("no pa/ss here")) == "PostgreSQL at host/db: ValueError"
    assert server.told(ValueError("two\nlines")).endswith(": two lines")


async def test_a_server_that_is_not_there_at_the_start_leaves_nothing_behind(own: Cluster, own_url: str) -> None:
    own.stop()
    connections = Connections(own_url, pool_size=2, statement_timeout_s=1)
    try:
        with pytest.raises(ConfigError) as told:
            await connections.open()
        assert_shown(told.value)
        assert len(asyncio.all_tasks()) == 1
    finally:
        own.start()
    await connections.open()
    await connections.run(names)
    await connections.close()


async def test_a_socket_in_a_folder_is_reached(url: str) -> None:
    server = cluster()
    plain = f"postgresql:///{url.rpartition('/')[2]}?host={server.folder}&port={server.port}&user={USER}"
    async with opened(plain) as connections:
        await connections.run(add("by socket"))
        assert await connections.look(names) == ["by socket"]
        assert connections.pushes


# --- signals


class Heard:
    def __init__(self, connections: Connections) -> None:
        self.payloads: list[str] = []
        self.missed = 0
        connections.watch(self.payloads.append, self._miss)

    def _miss(self) -> None:
        self.missed += 1

    async def until(self, *payloads: str) -> None:
        async def heard() -> bool:
            return set(payloads) <= set(self.payloads)

        await until(heard)


async def test_notifications_reach_others_and_ones_own_watcher_once_and_at_once(url: str) -> None:
    async with opened(url) as here, opened(url) as there:
        own, other = Heard(here), Heard(there)
        assert here.pushes
        assert there.pushes
        here.notify_soon("ready")
        assert own.payloads == []  # not within the call
        await asyncio.sleep(0)
        assert own.payloads == ["ready"]
        await other.until("ready")
        there.notify_soon("it's \\ 'odd'; ü")
        await own.until("it's \\ 'odd'; ü")
        await other.until("it's \\ 'odd'; ü")
        assert own.payloads == ["ready", "it's \\ 'odd'; ü"]  # its own came back, and was not told twice
        assert other.payloads == own.payloads


async def test_many_notifications_of_one_moment_are_sent_together(url: str) -> None:
    async with opened(url) as here, opened(url) as there:
        other = Heard(there)
        for _ in range(50):
            here.notify_soon("ready")
            here.notify_soon("pending")
        await other.until("ready", "pending")
        assert sorted(other.payloads) == ["pending", "ready"]


async def test_a_notification_of_a_transaction_is_heard_by_both(url: str) -> None:
    async with opened(url) as here, opened(url) as there:
        own, other = Heard(here), Heard(there)
        await here.run(lambda connection: connection.execute("SELECT pg_notify('rollout_service', 'run')"))
        await own.until("run")
        await other.until("run")


async def test_what_was_to_be_told_is_told_before_closing(url: str) -> None:
    async with opened(url) as there:
        other = Heard(there)
        async with opened(url) as here:
            here.notify_soon("leaving")
            await asyncio.sleep(0)
            here.notify_soon("ready")
        await other.until("leaving", "ready")


async def test_a_listener_that_was_cut_listens_again_and_says_what_it_may_have_missed(url: str) -> None:
    async with opened(url) as here, opened(url) as there:
        own, _ = Heard(here), Heard(there)
        await there.run(names)
        await ask(
            url,
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )

        async def cut() -> bool:
            return not here.pushes or own.missed > 0

        await until(cut)
        await until(pushing(here))
        assert own.missed == 1
        there.notify_soon("ready")
        await own.until("ready")


# --- behind a pooler


@pytest.fixture
def pooler_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pgbouncer-"))  # the server's user may not enter pytest's
    yield folder
    shutil.rmtree(folder)


async def test_behind_a_pooler_in_transaction_mode_transactions_work_and_signals_do_not(
    url: str, pooler_folder: Path
) -> None:
    with running_pooler(cluster(), pooler_folder) as pooler, capture_logs() as logs:
        async with opened(pooler.url(url), pool_size=6) as here, opened(pooler.url(url), pool_size=6) as there:
            assert [said["event"] for said in logs].count("signals_do_not_arrive") == 2
            assert not here.pushes
            own, other = Heard(here), Heard(there)

            async def several(n: int, connection: Any) -> int:
                await add(f"{n}", n)(connection)
                assert await connection.fetchval("SELECT size FROM things WHERE name = $1", f"{n}") == n
                assert await connection.fetchval("SHOW statement_timeout") == "10s"
                return await pid(connection)

            pids = await asyncio.gather(
                *((here, there)[n % 2].run(lambda connection, n=n: several(n, connection)) for n in range(40))
            )
            assert len(set(pids)) <= 2  # fewer servers than clients: they changed them between transactions
            assert len(await here.look(names)) == 40
            with pytest.raises(StoreUnavailable):
                await here.run(lambda connection: connection.execute("SELECT 1/0"))
            here.notify_soon("ready")
            await own.until("ready")
            assert other.payloads == []
            settings = await ask(pooler.url(url), "SELECT current_setting('statement_timeout')")
            assert settings == "0"  # nothing stays at the server's sessions


async def test_behind_a_pooler_that_is_restarted_things_go_on(url: str, pooler_folder: Path) -> None:
    with running_pooler(cluster(), pooler_folder) as pooler:
        async with opened(pooler.url(url)) as connections:
            await asyncio.gather(*(connections.run(add(f"{n}")) for n in range(4)))
            pooler.stop()
            with pytest.raises(StoreUnavailable):
                await connections.run(add("down"))
            pooler.start()
            await works(connections, "up again")


async def test_behind_a_pooler_whose_server_is_restarted_things_go_on(
    own: Cluster, own_url: str, pooler_folder: Path
) -> None:
    with running_pooler(own, pooler_folder) as pooler:
        async with opened(pooler.url(own_url)) as connections:
            await asyncio.gather(*(connections.run(add(f"{n}")) for n in range(4)))
            await asyncio.to_thread(own.stop)
            with pytest.raises(StoreUnavailable):
                await connections.run(add("down"))
            await asyncio.to_thread(own.start)
            await works(connections, "up again")


async def test_behind_a_pooler_in_session_mode_signals_arrive(url: str, pooler_folder: Path) -> None:
    with running_pooler(cluster(), pooler_folder, mode="session", size=20) as pooler:
        async with opened(pooler.url(url)) as here, opened(url) as there:
            own = Heard(here)
            assert here.pushes
            there.notify_soon("ready")
            await own.until("ready")
