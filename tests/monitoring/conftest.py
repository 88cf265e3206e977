"""One observed run for every test that asks what Prometheus knows of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import uvloop

from tests.monitoring.observed import Observed, observe
from tests.monitoring.tools import program


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    program("prometheus")
    with ExitStack() as stack:
        # Its loop ends with the run: these tests ask Prometheus alone, and others have loops of their own.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            seen = runner.run(observe(tmp_path_factory.mktemp("observed"), stack))
        yield seen
