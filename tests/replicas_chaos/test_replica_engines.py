"""Engines that operators add and remove through one replica, at all of them: real services, a real PostgreSQL."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from rollout_service.simulator import Simulator, SimulatorSettings
from tests.durability.lives import Lives
from tests.engine_script import ScriptedEngine
from tests.postgres_cluster import Cluster
from tests.replicas_chaos.member import Member
from tests.service import free_port, tables, to_toml

WITHIN_S = 30.0
LENGTHS = """
def length(completion_ids, **columns):
    return [float(sum(ids)) for ids in completion_ids]
"""
LOOPBACK = {"allowed": ["http://127.0.0.0/8:*"]}


class Calls:
    """What an operator does at one replica."""

    def __init__(self, member: Member, http: aiohttp.ClientSession) -> None:
        self.member, self._http = member, http

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self._http.request(method, f"{self.member.url}{path}", json=body) as answer:
            return answer.status, await answer.json()

    async def engines(self) -> dict[str, tuple[str, bool]]:
        """URL -> id, and whether it is healthy."""
        _, answer = await self.call("GET", "/engines")
        return {engine["url"]: (engine["id"], engine["healthy"]) for engine in answer["engines"]}

    async def sees(self, *healthy: str) -> None:
        """Until these engines are there, and no others."""
        async with asyncio.timeout(WITHIN_S):
            while {url: good for url, (_, good) in (await self.engines()).items()} != dict.fromkeys(healthy, True):
                await asyncio.sleep(0.05)  # between two looks


@asynccontextmanager
async def kept_alive(members: list[Member]) -> AsyncIterator[list[Calls]]:
    keepers = [asyncio.create_task(member.keep()) for member in members]
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WITHIN_S)) as http:
            await asyncio.gather(*(member.ready() for member in members))
            yield [Calls(member, http) for member in members]
    finally:
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        for member in members:
            if member.alive:
                member.lives.signal(signal.SIGKILL)
                await member.lives.ended()


async def test_engines_come_and_go_at_all_replicas_through_any_of_them(
    herd: list[Lives], postgres: Cluster, tmp_path: Path
):
    slow = SimulatorSettings(latency=0.02)
    async with (
        postgres.database() as url,
        Simulator(slow) as first,
        Simulator(slow) as second,
        ScriptedEngine() as wrong,
    ):
        members = [Member(lives, tmp_path / f"replica-{n}", free_port()) for n, lives in enumerate(herd[:2])]
        for member in members:
            member.directory.mkdir()
            values = tables(
                member.directory,
                [first.url, wrong.url],
                server={"port": member.port},
                store={"url": url},
                replica={"name": member.name, "lease_s": 2},
                registration=LOOPBACK,
                sampling={"max_tokens": 16},
                rewards=[{"name": "length", "function": "lengths:length"}],
            )
            (member.directory / "lengths.py").write_text(LENGTHS)
            (member.directory / "rollout.toml").write_text(to_toml(values))
        async with kept_alive(members) as (one, two):
            # What a removed engine has become by then keeps no replica from starting.
            status, _ = await two.call("DELETE", f"/engines/{(await two.engines())[wrong.url][0]}?drain_s=0")
            assert status == 200
            await asyncio.gather(one.sees(first.url), two.sees(first.url))
            wrong.models_status = 404
            status, added = await one.call("POST", "/engines", {"url": second.url, "max_inflight": 4})
            assert (status, added["url"], added["max_inflight"]) == (201, second.url, 4)
            await two.sees(first.url, second.url)
            assert await two.engines() == await one.engines()

            rows = [{"prompt_id": f"p{n}", "prompt": f"p:{n};"} for n in range(40)]
            assert (await two.call("POST", "/prompts", {"prompts": rows, "final": True}))[0] == 202
            acked: list[str] = []
            while True:
                _, lease = await one.call("POST", "/leases", {"max_groups": 8, "wait_s": 10})
                if lease["status"] == "exhausted":
                    break
                if lease["groups"]:
                    acked += (await two.call("POST", f"/leases/{lease['lease_id']}/ack"))[1]["acked"]
            assert len(acked) == len(rows)
            assert any(record.request_id for record in second.journal.records()), "the new engine got work"

            # Removed through the other one, the configured one too; a start does not bring it back.
            status, _ = await two.call("DELETE", f"/engines/{added['id']}?drain_s=1")
            assert status == 200
            await asyncio.gather(one.sees(first.url), two.sees(first.url))
            id_of_first, _ = (await one.engines())[first.url]
            assert (await one.call("DELETE", f"/engines/{id_of_first}?drain_s=0"))[0] == 200
            await asyncio.gather(one.sees(), two.sees())
            await two.member.kill()
            await until_answering(two)
            await two.sees()
            assert (await two.member.readyz())[0] == 503
            status, again = await two.call("POST", "/engines", {"url": first.url})
            assert (status, again["id"]) == (201, id_of_first)
            await asyncio.gather(one.sees(first.url), two.sees(first.url))
            await asyncio.gather(one.member.ready(), two.member.ready())


async def until_answering(calls: Calls) -> None:
    async with asyncio.timeout(WITHIN_S):
        while (await calls.member.readyz())[0] == 0:
            await asyncio.sleep(0.05)  # between two looks
