"""A start that meets a database that goes away."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_service.errors import ConfigError
from rollout_service.store.postgres import PostgresStore
from rollout_service.store.postgres_connections import Connections
from tests.postgres_cluster import Cluster


async def test_a_database_lost_after_the_first_connection_is_told_in_one_line(
    postgres: Cluster, monkeypatch: pytest.MonkeyPatch
):
    look = Connections.look

    async def lost(connection: Any) -> None:
        raise ConnectionResetError("Connection reset by peer")

    async def cut(self: Connections, work: Any) -> Any:
        return await look(self, lost)

    async with postgres.database() as url:
        monkeypatch.setattr(Connections, "look", cut)
        with pytest.raises(ConfigError, match=r"^store\.url: .*Connection reset by peer"):
            await PostgresStore(url, max_staleness=1, pool_size=1).open()
