"""Memory of a rollout in flight: the service's beside a bare client's.

What is measured: resident memory of the process with 4,096 rollouts in flight, less that of the same process idle
after one group has gone through it, per rollout; the same of a bare aiohttp client; the difference. The engine takes a
minute for a completion, so nothing ends meanwhile. In the service's figure are the group's prompt and state, the
store's caches and whatever the allocator keeps; not in it are the kernel's socket buffers and the reward workers.

    python -m benchmarks.memory [--rounds 5] [--quick]
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
import urllib.request
from functools import partial

import aiohttp
import httpx
import uvloop

from benchmarks import processes
from benchmarks.bare import checked
from benchmarks.load import BODY, GROUP, REWARDS, config, rows
from benchmarks.report import Figure, alternate, below, median, run_alone, shown

IN_FLIGHT, QUICK_IN_FLIGHT = 4096, 512
LATENCY_S = 60.0
"""Of 64 tokens; the warm-up asks for one, which takes a second."""
SETTLE_S = 1.0
"""The last answers to the last dispatches are out."""
WITHIN_S = 60.0
CHUNK = 256
_RUNNING = re.compile(rb"^vllm:num_requests_running\S* (\d+)", re.MULTILINE)


def of_service(engine_url: str, in_flight: int) -> float:
    """Bytes a rollout in flight."""
    toml = config(engine_url, in_flight=in_flight, prompts="")
    files = {"bench_rewards.py": REWARDS}
    with (
        processes.folder() as folder,
        processes.service(toml, files, within=folder) as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
    ):
        warm = {"prompt_id": "warm", "prompt_token_ids": [65], "sampling": {"max_tokens": 1}}
        http.post("/prompts", json={"prompts": [warm]}).raise_for_status()
        lease = http.post("/leases", json={"max_groups": 1, "wait_s": 30}).raise_for_status().json()
        http.post(f"/leases/{lease['lease_id']}/ack").raise_for_status()
        time.sleep(SETTLE_S)
        idle = processes.resident_bytes(running.pid)
        for first in range(0, in_flight // GROUP, CHUNK):
            some = rows(first, min(CHUNK, in_flight // GROUP - first))
            http.post("/prompts", json={"prompts": some}).raise_for_status()
        return _grown(running.pid, idle, engine_url, in_flight)


def of_bare(engine_url: str, in_flight: int) -> float:
    """Bytes a completion in flight."""
    command = processes.module("benchmarks.memory", "bare", engine_url, in_flight)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with processes.process(command, processes.CLIENT_CORE, cwd=processes.ROOT, **pipes) as child:
        if child.stdin is None or child.stdout is None or not child.stdout.readline():
            raise RuntimeError("the bare client did not start")
        idle = processes.resident_bytes(child.pid)
        child.stdin.write("go\n")
        child.stdin.flush()
        return _grown(child.pid, idle, engine_url, in_flight)


def _grown(pid: int, idle: int, engine_url: str, in_flight: int) -> float:
    def all_there() -> bool:
        with urllib.request.urlopen(f"{engine_url}/metrics", timeout=10) as answer:
            found = _RUNNING.search(answer.read())
        return found is not None and int(found[1]) == in_flight

    processes.wait_for(all_there, WITHIN_S, f"{in_flight} are in flight", every_s=0.2)
    time.sleep(SETTLE_S)
    return (processes.resident_bytes(pid) - idle) / in_flight


async def bare(url: str, in_flight: int) -> None:
    """The bare client: says when it is idle, waits for a line, then keeps `in_flight` requests until it is ended."""

    async def one(session: aiohttp.ClientSession, body: bytes, name: str) -> None:
        headers = {"Content-Type": "application/json", "X-Request-Id": name}
        async with session.post(f"{url}/v1/completions", data=body, headers=headers) as answer:
            checked(await answer.read())

    short = json.dumps(json.loads(BODY) | {"max_tokens": 1}).encode()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for number in range(GROUP):
            await one(session, short, f"w{number}")
        print("idle", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.gather(*(one(session, BODY, f"b{number}") for number in range(in_flight)))


def measure(rounds: int, *, quick: bool) -> list[Figure]:
    in_flight = QUICK_IN_FLIGHT if quick else IN_FLIGHT

    def one(kind: str) -> float:
        # An engine for each: what the one before left in flight must not be counted.
        with processes.lean_engine(LATENCY_S) as url:
            return of_service(url, in_flight) if kind == "service" else of_bare(url, in_flight)

    found = alternate(rounds, {"bare": partial(one, "bare"), "service": partial(one, "service")})
    beyond = tuple(ours - theirs for ours, theirs in zip(found["service"], found["bare"], strict=True))
    ours, theirs = median(found["service"]), median(found["bare"])
    return [
        Figure(
            key="bytes_per_inflight_beyond_bare",
            what=f"memory of a rollout in flight beyond a bare client's, {in_flight:,} in flight",
            value=ours - theirs,
            unit="bytes",
            beside=f"service {shown(ours, 'bytes')}, bare {shown(theirs, 'bytes')}",
            goal=below(8 * 1024),
            runs=beyond,
        )
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["bare"]:
        uvloop.run(bare(sys.argv[2], int(sys.argv[3])))
    else:
        run_alone(measure, "memory of a rollout in flight beside a bare client's")
