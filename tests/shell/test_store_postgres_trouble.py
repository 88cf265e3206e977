"""What becomes of transactions when something happens to the PostgreSQL they run on, and of a start without one."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

from rollout_service.errors import ConfigError, StoreUnavailable
from rollout_service.store import postgres_server
from rollout_service.store.postgres_connections import Connections
from tests.postgres_cluster import PASSWORD, USER, Cluster, cluster
from tests.postgres_things import (
    CLOSED_S,
    DROPPED,
    PASSED,
    WAIT_S,
    add,
    ask,
    assert_shown,
    names,
    opened,
    pid,
    prepare,
    pushing,
    read_only,
    stopped,
    through_proxy,
    unread,
    until,
    works,
)

# trouble


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
            before = unread(own.port)
            reserved = asyncio.create_task(connections.run(add("cancelled"), reserved=True))

            async def asked() -> bool:
                return unread(own.port) > before

            await until(asked)
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

        async def all_asked() -> bool:
            return unread(own.port) >= 3

        await until(all_asked)
        began = time.monotonic()
        await connections.close()
        assert time.monotonic() - began < CLOSED_S
        told = await asyncio.gather(*hung, return_exceptions=True)
        assert [type(each) for each in told] == [StoreUnavailable] * 5
        assert len(asyncio.all_tasks()) == 1


async def test_closing_lets_a_transaction_on_its_way_end(url: str) -> None:
    connections = Connections(url, pool_size=1, statement_timeout_s=10)
    await connections.open()
    inside, leave = asyncio.Event(), asyncio.Event()

    async def work(connection: Any) -> None:
        inside.set()
        await leave.wait()
        await add("ended")(connection)

    task = asyncio.create_task(connections.run(work))
    await inside.wait()
    closing = asyncio.create_task(connections.close())
    await asyncio.sleep(0)  # it has begun
    leave.set()
    await asyncio.gather(closing, task)
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


async def test_hosts_that_are_gone_or_silent_keep_nobody_from_the_others(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_server, "CONNECT_S", 1.0)  # which the silent one takes at the start
    login, _, place = url.rpartition("@")
    host, _, database = place.partition("/")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        gone = socket.create_server(("127.0.0.1", 0))
        ports = [gone.getsockname()[1], silent.getsockname()[1]]
        gone.close()
        others = ",".join(f"127.0.0.1:{port}" for port in ports)
        async with opened(f"{login}@{others},{host}/{database}") as connections:
            monkeypatch.setattr(postgres_server, "CONNECT_S", 60.0)
            async with asyncio.timeout(WAIT_S):  # the one that answered is asked first from then on
                await asyncio.gather(*(connections.run(add(f"{n}")) for n in range(4)))
        monkeypatch.setattr(postgres_server, "CONNECT_S", 1.0)
        with pytest.raises(ConfigError) as told:
            await Connections(f"{login}@{others}/{database}", pool_size=1, statement_timeout_s=1).open()
        assert_shown(told.value)
        assert "refused" in str(told.value) or "Connect call failed" in str(told.value)
        assert "no answer in time" in str(told.value)


# at the start


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
