"""deploy/haproxy.cfg in a real HAProxy, before replicas and a name server that tests give it.

What always holds: everything listens on loopback; of the configuration only the address it listens on, the replicas'
port and the name server are others; HAProxy has ended when its context has.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from tests.listening import end
from tests.service import free_port

CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "haproxy.cfg"
NAME = "replica"
SEEN_WITHIN_S = 15.0
"""Addresses are asked for every second and replicas every two; the machine may be slow."""
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def program() -> str:
    """HAProxy's path. Skips the test where it is missing, unless REQUIRE_TOOLS=1: then it fails."""
    found = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        reason = "haproxy is not installed (Debian: apt install haproxy)"
        if os.environ.get("REQUIRE_TOOLS") == "1":
            pytest.fail(f"REQUIRE_TOOLS=1, but {reason}")
        pytest.skip(reason)
    return found


class Replica:
    """Answers probes as it is told, and everything else by `answer`."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.ready = True
        self.calls: list[str] = []
        """Path of every call that was no probe, as it came."""
        self.answer: Answer = self._named
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()

    async def stop(self) -> None:
        """Refuses connections from now on; does nothing where it does already."""
        if self._runner is not None:
            await end(self._runner)
            self._runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/livez":
            return web.Response(text="live")
        if request.path == "/readyz":
            return web.Response(status=200 if self.ready else 503)
        self.calls.append(request.path)
        return await self.answer(request)

    async def _named(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.Response(text=self.host, status=200 if self.ready else 503)


class Names(asyncio.DatagramProtocol):
    """A name server that knows one name."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)  # asyncio's own is none by its class

    def datagram_received(self, data: bytes, addr: Any) -> None:
        labels, at = [], 12
        while length := data[at]:
            labels.append(data[at + 1 : at + 1 + length].decode())
            at += 1 + length
        question = data[12 : at + 5]
        (kind,) = struct.unpack_from("!H", data, at + 1)
        known = ".".join(labels) == NAME
        found = self.addresses if known and kind == 1 else []
        # 0x8180: an answer, recursion available; with 3: there is no such name. Each row points back at the question.
        head = struct.pack("!2sHHHHH", data[:2], 0x8180 if known else 0x8183, 1, len(found), 0, 0)
        rows = b"".join(struct.pack("!HHHIH4s", 0xC00C, 1, 1, 1, 4, socket.inet_aton(host)) for host in found)
        self._transport.sendto(head + question + rows, addr)


class LoadBalancer:
    """A running HAProxy."""

    def __init__(self, url: str, names: Names, replicas: list[Replica], session: aiohttp.ClientSession) -> None:
        self.url, self.names, self.replicas, self.session = url, names, replicas, session
        self.pid = 0

    async def call(self, path: str = "/leases", *, method: str = "POST", data: bytes = b"{}") -> tuple[int, str]:
        """Status and body; 0 where the connection ended without an answer."""
        try:
            async with self.session.request(method, f"{self.url}{path}", data=data) as answer:
                return answer.status, await answer.text()
        except aiohttp.ServerDisconnectedError:
            return 0, ""

    async def until_calls_reach(self, hosts: set[str]) -> None:
        """Until nine calls in a row meet these replicas and no other."""
        deadline = time.monotonic() + SEEN_WITHIN_S
        while True:
            met = {(await self.call("/look", method="GET"))[1] for _ in range(9)}
            if met == hosts:
                break
            assert time.monotonic() < deadline, f"calls reach {met}, not {hosts}"
            await asyncio.sleep(0.05)  # between two looks
        for replica in self.replicas:
            replica.calls.clear()


@asynccontextmanager
async def load_balancer(folder: Path, replicas: int = 3) -> AsyncIterator[LoadBalancer]:
    """HAProxy before so many replicas at 127.0.0.2 and on, whose addresses its name server gives."""
    names, port, at = Names(), free_port(), free_port()
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: names, local_addr=("127.0.0.1", 0))
    name_server = transport.get_extra_info("sockname")[1]
    text = CONFIG.read_text()
    for old, new in {
        "parse-resolv-conf": f"nameserver test 127.0.0.1:{name_server}",
        "bind :8080": f"bind 127.0.0.1:{port}",
        '"${REPLICAS}:8080"': f'"${{REPLICAS}}:{at}"',
    }.items():
        assert old in text
        text = text.replace(old, new)
    config = folder / "haproxy.cfg"
    config.write_text(text)
    there = [Replica(f"127.0.0.{2 + number}", at) for number in range(replicas)]
    for replica in there:
        await replica.start()
    names.addresses = [replica.host for replica in there]
    log = folder / "haproxy.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            program(), "-db", "-f", str(config), env={"REPLICAS": NAME}, stdout=output, stderr=output
        )
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as session:
            balancer = LoadBalancer(f"http://127.0.0.1:{port}", names, there, session)
            balancer.pid = process.pid
            await _listening(port, process, log)
            yield balancer
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        transport.close()
        for replica in there:
            await replica.stop()


async def _listening(port: int, process: asyncio.subprocess.Process, log: Path) -> None:
    deadline = time.monotonic() + SEEN_WITHIN_S
    while True:
        assert process.returncode is None, log.read_text()
        assert time.monotonic() < deadline, "HAProxy does not listen"
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.02)  # between two looks
            continue
        writer.close()
        await writer.wait_closed()
        return
