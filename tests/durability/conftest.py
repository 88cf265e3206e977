"""One process that forks services for all tests here: its imports cost seconds, once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.durability.lives import Lives


@pytest.fixture(scope="session")
def lives() -> Iterator[Lives]:
    with Lives() as lives:
        yield lives
