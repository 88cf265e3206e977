"""deploy/haproxy.cfg, as HAProxy carries it out: who gets a call, and that none is sent twice."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.deploy.load_balancer import CONFIG, LoadBalancer, load_balancer

LONGEST_POLL_S = 60
MIB = 2**20


@pytest.fixture
async def balancer(tmp_path: Path) -> AsyncIterator[LoadBalancer]:
    """Before three replicas, all of them seen."""
    async with load_balancer(tmp_path) as running:
        await running.until_calls_reach({replica.host for replica in running.replicas})
        yield running


async def test_calls_go_round_the_replicas(balancer: LoadBalancer) -> None:
    met = [await balancer.call() for _ in range(9)]
    assert {status for status, _ in met} == {200}
    assert all(len(set(map(str, met[n : n + 3]))) == 3 for n in range(7))


async def test_a_replica_that_is_not_ready_gets_no_call_while_another_is(balancer: LoadBalancer) -> None:
    cut_off, *others = balancer.replicas
    cut_off.ready = False
    await balancer.until_calls_reach({replica.host for replica in others})
    cut_off.ready = True
    await balancer.until_calls_reach({replica.host for replica in balancer.replicas})


async def test_while_none_is_ready_calls_arrive_all_the_same(balancer: LoadBalancer) -> None:
    """A halted run makes every replica unready, and its trainer has to be told why."""
    for replica in balancer.replicas:
        replica.ready = False
    await balancer.until_calls_reach({replica.host for replica in balancer.replicas})
    status, text = await balancer.call("/resume")
    assert status == 503
    assert text in {replica.host for replica in balancer.replicas}


async def test_a_replica_that_refuses_connections_is_passed_over(balancer: LoadBalancer) -> None:
    """At once, before any check has told that it is gone."""
    gone, *others = balancer.replicas
    await gone.stop()
    met = [await balancer.call() for _ in range(6)]
    assert {status for status, _ in met} == {200}
    assert {text for _, text in met} == {replica.host for replica in others}


@pytest.mark.parametrize("kept", [False, True])
async def test_a_call_that_was_sent_is_never_sent_again(balancer: LoadBalancer, kept: bool) -> None:
    """Its caller sees a 502, or, on a connection that had carried calls before, the end of that connection."""

    async def die(request: web.Request) -> web.StreamResponse:
        await request.read()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with aiohttp.ClientSession() as session:
        if kept:
            async with session.get(f"{balancer.url}/look") as answer:
                await answer.read()
        for replica in balancer.replicas:
            replica.calls.clear()
            replica.answer = die
        try:
            async with session.post(f"{balancer.url}/rewind", data=b"{}") as answer:
                assert answer.status == 502
                assert json.loads(await answer.text())["type"] == "/problems/unavailable"
        except aiohttp.ServerDisconnectedError:
            assert kept
    assert sum(len(replica.calls) for replica in balancer.replicas) == 1


async def test_where_nobody_takes_connections_the_answer_is_a_problem_that_says_so(balancer: LoadBalancer) -> None:
    for replica in balancer.replicas:
        await replica.stop()
    async with balancer.session.post(f"{balancer.url}/leases", data=b"{}") as answer:
        assert answer.status == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["retry-after"] == "1"
        assert json.loads(await answer.text())["status"] == 503


async def test_a_replica_at_another_address_is_found(balancer: LoadBalancer) -> None:
    balancer.names.addresses = ["127.0.0.4"]
    await balancer.until_calls_reach({"127.0.0.4"})
    balancer.names.addresses = ["127.0.0.2", "127.0.0.3"]
    await balancer.until_calls_reach({"127.0.0.2", "127.0.0.3"})


async def test_a_caller_that_hangs_up_is_hung_up_on_at_the_replica(balancer: LoadBalancer) -> None:
    waiting, gone = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        return web.Response()

    for replica in balancer.replicas:
        replica.answer = wait
    call = asyncio.create_task(balancer.call())
    await asyncio.wait_for(waiting.wait(), 10)
    call.cancel()
    await asyncio.wait_for(gone.wait(), 10)


async def test_large_bodies_and_answers_flow_through_and_are_kept_nowhere(balancer: LoadBalancer) -> None:
    async def echo_length(request: web.Request) -> web.StreamResponse:
        got = 0
        async for part in request.content.iter_any():
            got += len(part)
        answer = web.StreamResponse(headers={"x-got": str(got)})
        await answer.prepare(request)
        for _ in range(64):
            await answer.write(bytes(MIB))
        return answer

    for replica in balancer.replicas:
        replica.answer = echo_length
    before = _most_memory(balancer.pid)
    async with balancer.session.post(f"{balancer.url}/prompts", data=io.BytesIO(bytes(64 * MIB))) as answer:
        assert answer.headers["x-got"] == str(64 * MIB)
        got = 0
        async for part in answer.content.iter_any():
            got += len(part)
    assert got == 64 * MIB
    assert _most_memory(balancer.pid) - before < 16 * MIB


def _most_memory(pid: int) -> int:
    """Bytes; of the process that carries the traffic."""
    match = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match
    return int(match[1]) * 1024


async def test_a_replica_that_stops_cuts_nothing_else(balancer: LoadBalancer) -> None:
    """Its waiting call breaks, which the client asks again; those at others go on."""
    release, waiting = asyncio.Event(), asyncio.Semaphore(0)

    async def wait(request: web.Request) -> web.StreamResponse:
        waiting.release()
        await release.wait()
        return web.Response(text="served")

    for replica in balancer.replicas:
        replica.answer = wait
    calls = [asyncio.create_task(balancer.call()) for _ in range(3)]
    for _ in calls:
        await asyncio.wait_for(waiting.acquire(), 10)
    await balancer.replicas[0].stop()
    release.set()
    broken, *served = sorted([await call for call in calls], key=lambda done: done[1] == "served")
    assert broken[0] in (0, 502)
    assert served == [(200, "served")] * 2


def test_silence_is_borne_longer_than_the_longest_poll() -> None:
    text = CONFIG.read_text()
    for name in ("client", "server"):
        (seconds,) = re.findall(rf"^ +timeout {name} (\d+)s", text, re.MULTILINE)
        assert int(seconds) >= LONGEST_POLL_S + 10


async def test_a_connection_is_kept_for_the_next_call_of_its_caller(balancer: LoadBalancer) -> None:
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector) as session:
        for _ in range(3):
            async with session.post(f"{balancer.url}/leases", data=b"{}") as answer:
                assert answer.headers.get("connection", "keep-alive").lower() != "close"
                await answer.read()
