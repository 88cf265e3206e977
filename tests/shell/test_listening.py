"""A server that ends while it accepts a connection leaves none open, at whichever turn of the loop it ends."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from aiohttp import web

from rollout_service.simulator import Simulator, SimulatorSettings
from tests.engine_script import ScriptedEngine
from tests.listening import end, listening
from tests.tcp_proxy import Faults, Proxy

TURNS = range(8)
"""More than a connection needs until it is handled."""


async def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


@asynccontextmanager
async def streams() -> AsyncIterator[str]:
    async with listening(quiet) as address:
        yield address


@asynccontextmanager
async def proxy() -> AsyncIterator[str]:
    async with listening(quiet) as address, Proxy(f"http://{address}", random.Random(1), Faults()) as between:
        yield between.url.removeprefix("http://")


@asynccontextmanager
async def engine() -> AsyncIterator[str]:
    async with ScriptedEngine() as scripted:
        yield scripted.url.removeprefix("http://")


@asynccontextmanager
async def application() -> AsyncIterator[str]:
    runner = web.AppRunner(web.Application(), shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    yield f"{host}:{port}"
    await end(runner)


@asynccontextmanager
async def simulator() -> AsyncIterator[str]:
    async with Simulator(SimulatorSettings()) as simulated:
        yield simulated.url.removeprefix("http://")


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("serving", [streams, proxy, engine, application, simulator])
async def test_what_is_accepted_while_a_server_ends_is_closed(
    serving: Callable[[], AbstractAsyncContextManager[str]], turns: int
) -> None:
    async with serving() as address:
        host, _, port = address.rpartition(":")
        caller = socket.create_connection((host, int(port)))
        for _ in range(turns):
            await asyncio.sleep(0)  # the turns are what is tested
    with caller:
        caller.setblocking(False)
        assert await asyncio.wait_for(ended(caller), 5)
    gc.collect()  # what is left open is warned of, and a warning is a failure


async def ended(caller: socket.socket) -> bool:
    try:
        return not await asyncio.get_running_loop().sock_recv(caller, 1)
    except ConnectionResetError:
        return True
