"""Three processes that fork replicas, and a PostgreSQL to be maltreated: made once for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.durability.lives import Lives
from tests.postgres_cluster import UNSYNCED, Cluster

REPLICAS = 3


@pytest.fixture(scope="session")
def herd() -> Iterator[list[Lives]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Lives()) for _ in range(REPLICAS)]


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    made = Cluster(UNSYNCED)
    made.start()
    yield made
    made.close()
