"""A table on a real PostgreSQL, the connections under test to it, and what may befall the server and the way to it.

What always holds: `opened` connections leave no task behind and close within their time; whatever is refused is told in
one line without the password.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import asyncpg

from rollout_service.errors import StoreUnavailable
from rollout_service.store.postgres_connections import Connections
from tests.postgres_cluster import PASSWORD, Cluster
from tests.tcp_proxy import Faults, Proxy

WAIT_S = 30.0
CLOSED_S = 1.0
OPEN: list[Connections] = []
PASSED = Faults(drop=0.0, cut=0.0, delay=0.0)
DROPPED = Faults(drop=1.0)


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


async def doing(connection: asyncpg.Connection, pid: int) -> tuple[str, str]:
    """State and wait of the session `pid`, which is at the server of `connection`."""
    row = await connection.fetchrow("SELECT state, wait_event FROM pg_stat_activity WHERE pid = $1", pid)
    return ("gone", "") if row is None else (row["state"] or "", row["wait_event"] or "")


def unread(port: int) -> int:
    """How many connections have sent something to a server at `port` that it has not read."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" and row[4][9:] != "0" * 8 for row in rows)


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


def pushing(connections: Connections) -> Callable[[], Awaitable[bool]]:
    async def pushes() -> bool:
        return connections.pushes

    return pushes


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


async def read_only(url: str, *, on: bool) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute("SET default_transaction_read_only = off")
    await connection.execute(f"ALTER SYSTEM SET default_transaction_read_only = {'on' if on else 'off'}")
    await connection.execute("SELECT pg_reload_conf()")
    await connection.close()

    async def so() -> bool:
        return bool(await ask(url, "SHOW default_transaction_read_only") == ("on" if on else "off"))

    await until(so)
