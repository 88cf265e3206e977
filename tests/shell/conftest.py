"""Connections to PostgreSQL under test: to a database on the shared server, or on one that may be maltreated."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from rollout_service.store.postgres_connections import Connections
from tests.postgres_cluster import UNSYNCED, Cluster, cluster
from tests.postgres_things import opened, prepare


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with cluster().database(schema=False) as url:
        await prepare(url)
        yield url


@pytest.fixture(scope="session")
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


@pytest.fixture
async def connections(url: str) -> AsyncIterator[Connections]:
    async with opened(url) as connections:
        yield connections
