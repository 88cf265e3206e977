"""Notifications through a real PostgreSQL, with and without a pooler in between."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollout_service.errors import StoreUnavailable
from rollout_service.store.postgres_connections import Connections
from tests.postgres_cluster import Cluster, cluster
from tests.postgres_pooler import running_pooler
from tests.postgres_things import add, ask, names, opened, pid, pushing, until, works


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


# signals


async def test_notifications_reach_others_and_ones_own_watcher_once_and_at_once(url: str) -> None:
    async with opened(url) as here, opened(url) as there:
        own, other = Heard(here), Heard(there)
        assert here.pushes
        assert there.pushes
        here.notify_soon("ready")
        assert own.payloads == []  # not within the call
        await asyncio.sleep(0)  # but in the loop's next turn
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
            await asyncio.sleep(0)  # it is asked for in the loop's next turn
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


# behind a pooler


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
