"""What need not be tried on every store, and the stores that replicas share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial

import pytest

from rollout_service.store.postgres import PostgresStore
from rollout_service.store.shared import SharedStore
from rollout_service.store.shared_memory import SharedMemory
from tests.contract.shared_stores import Handles
from tests.contract.store_samples import MAX_STALENESS
from tests.postgres_cluster import cluster


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """PostgreSQL is tried with the hardest way to come back to a store only: it has its state elsewhere."""
    twice = [item for item in items if _is_twice(item)]
    if twice:
        config.hook.pytest_deselected(items=twice)
        items[:] = [item for item in items if item not in set(twice)]


def _is_twice(item: pytest.Item) -> bool:
    chosen = getattr(getattr(item, "callspec", None), "params", {})
    return chosen.get("medium") == "postgres" and chosen.get("again") in ("as it is", "reopened")


@pytest.fixture(params=["memory", "postgres"])
async def handles(request: pytest.FixtureRequest) -> AsyncIterator[Handles]:
    async with AsyncExitStack() as stack:
        if request.param == "postgres":
            url = await stack.enter_async_context(cluster().database())
            make: Callable[[], SharedStore] = partial(PostgresStore, url, max_staleness=MAX_STALENESS)
        else:
            make = SharedMemory(MAX_STALENESS).store

        async def handle() -> SharedStore:
            store = make()
            await store.open()
            stack.push_async_callback(store.close)
            return store

        yield handle


@pytest.fixture
async def store(handles: Handles) -> SharedStore:
    return await handles()


@pytest.fixture
async def other(handles: Handles, store: SharedStore) -> SharedStore:
    return await handles()
