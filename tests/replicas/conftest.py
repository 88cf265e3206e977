"""The same tests over the store in memory and over PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from rollout_service.store.postgres import PostgresStore
from tests.postgres_cluster import cluster
from tests.replicas.world import World


@pytest.fixture(params=["memory", "postgres"])
async def worlds(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., World]]:
    """Makes a `World` over one kind of store."""
    async with AsyncExitStack() as stack:
        url = "" if request.param == "memory" else await stack.enter_async_context(cluster().database())

        def make(**given: Any) -> World:
            world = World(**given)
            if url:
                bound = world.policy.group.max_staleness
                world.make_store = lambda: PostgresStore(url, max_staleness=bound, pool_size=3)
            return world

        yield make
