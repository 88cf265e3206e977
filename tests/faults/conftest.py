"""Engines and services of the fault tests. Every service is checked when it ends."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.durability.lives import Lives
from tests.faults.scripted import Engine
from tests.service import LiveService, ServiceProcess, killed_at_end

REWARDS = Path(__file__).with_name("fault_rewards.py")

MakeService = Callable[..., Awaitable[LiveService]]
MakeProcess = Callable[..., Awaitable[ServiceProcess]]


@pytest.hookimpl(optionalhook=True)  # of pytest-asyncio; an older one runs these tests on the standard loop
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop the service runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def lives() -> Iterator[Lives]:
    with Lives() as lives:
        yield lives


@pytest.fixture
async def make_engine() -> AsyncIterator[Callable[..., Awaitable[Engine]]]:
    async with AsyncExitStack() as stack:

        async def make(**options: Any) -> Engine:
            engine = Engine(**options)
            await stack.enter_async_context(engine)
            return engine

        yield make


@pytest.fixture
async def engine(make_engine: Callable[..., Awaitable[Engine]]) -> Engine:
    return await make_engine()


@pytest.fixture
async def service(engine: Engine, tmp_path: Path) -> AsyncIterator[MakeService]:
    """Starts services, each in a directory of its own, with `table={...}` on top of the usual settings."""
    made: list[LiveService] = []

    async def make(urls: list[str] | None = None, **changes: Any) -> LiveService:
        directory = _directory(tmp_path, len(made))
        made.append(LiveService(directory, urls or [engine.url], **changes))
        return await made[-1].start()

    yield make
    for live in made:
        await live.checked_stop()


@pytest.fixture
async def process(engine: Engine, lives: Lives, tmp_path: Path) -> AsyncIterator[MakeProcess]:
    """As `service`, in a process of its own that can be killed."""
    async with AsyncExitStack() as stack:

        async def make(urls: list[str] | None = None, **changes: Any) -> ServiceProcess:
            made = ServiceProcess(lives, _directory(tmp_path, 0), urls or [engine.url], **changes)
            await stack.enter_async_context(killed_at_end(made))
            return await made.start()

        yield make


def _directory(parent: Path, number: int) -> Path:
    directory = parent / f"service{number}"
    directory.mkdir()
    shutil.copy(REWARDS, directory)
    return directory
