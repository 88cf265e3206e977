"""How fast what is stale stops: from `POST /policy_version` to the last abort at the engine, 1,000 requests in flight.

What is measured: 1,000 rollouts decode, `max_staleness` is 0, a version is posted: from just before the call is sent
until the engine has ended the last of the 1,000, read from the engine's journal. Meanwhile the service fills the 1,000
slots again. Beside it a bare aiohttp client on uvloop with 1,000 requests on the same engine, which posts one list of
ids or closes the connections, and does nothing else. A run's figure is the p99 of its posts, the worst of eight.

    python -m benchmarks.aborts [--rounds 5] [--quick]
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass

import aiohttp
import uvloop

from benchmarks.engine import Entry
from benchmarks.load import PROMPT_IDS
from benchmarks.processes import CLIENT_CORE, Service, module, output, wait_for
from benchmarks.report import Figure, alternate, at_most, below, median, percentile, run_alone
from benchmarks.serving import Engine, Versions, lean_engine, running_at, service, submit

IN_FLIGHT = 1000
GROUP = 8
LATENCY_S = 600.0
"""So long that only an abort ends a request."""
POSTS, QUICK_POSTS = 8, 2
"""Of one run."""
SETTLE_S = 1.2
"""Requests of less than a second are told to abort twice, in case the abort overtakes them; these are older."""
BARE_SETTLE_S = 0.3
REFILLED_S = 0.25
WITHIN_S = 30.0

Times = list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborts:
    """What one run found, one value for each time everything was ended."""

    last_ms: tuple[float, ...]
    """Until the last of the requests had ended."""
    busy: tuple[float, ...] = ()
    """The share of the slots that were busy again REFILLED_S after it; of the service only."""


def tables(in_flight: int) -> dict[str, dict[str, object]]:
    """Settings under which one new version makes everything stale that is in flight."""
    return {"groups": {"max_staleness": 0, "num_generations": GROUP}, "dispatch": {"max_inflight_rollouts": in_flight}}


def bump_full(engine: Engine, running: Service, *, in_flight: int, posts: int) -> Times:
    """Fills the slots and posts a version, `posts` times; when each call was sent."""
    submit(running.url, (posts + 2) * in_flight // GROUP)
    sent = []
    with Versions(running.url) as versions:
        for _ in range(posts):
            wait_for(lambda: engine.running() == in_flight, WITHIN_S, f"{in_flight} rollouts in flight")
            time.sleep(SETTLE_S)
            sent.append(time.monotonic())
            answer = versions.post()
            if answer["aborted_rollouts"] != in_flight:
                raise RuntimeError(f"{answer['aborted_rollouts']} of {in_flight} rollouts were aborted")
        time.sleep(SETTLE_S)
    return sent


def last_ends(entries: list[Entry], moments: Times, in_flight: int) -> Times:
    """Milliseconds from each moment to the end of the last request that was running then.

    RuntimeError where they were not `in_flight`, or one never ended."""
    found = []
    for moment in moments:
        ends = [entry.ended for entry in entries if entry.started < moment and (entry.ended or moment) >= moment]
        ended = [end for end in ends if end is not None]
        if len(ended) != len(ends) or len(ended) != in_flight:
            raise RuntimeError(f"of {in_flight} requests {len(ends)} ran and {len(ended)} ended")
        found.append(1000 * (max(ended) - moment))
    return found


def of_service(engine: Engine, *, posts: int) -> Aborts:
    with service(engine.url, tables(IN_FLIGHT)) as running:
        sent = bump_full(engine, running, in_flight=IN_FLIGHT, posts=posts)
        entries = engine.journal()
    busy = tuple(running_at(entries, moment + REFILLED_S, since=moment) / IN_FLIGHT for moment in sent)
    return Aborts(last_ms=tuple(last_ends(entries, sent, IN_FLIGHT)), busy=busy)


def of_bare(engine: Engine, way: str, *, posts: int) -> Aborts:
    command = module("benchmarks.aborts", "--bare", engine.url, way, IN_FLIGHT, posts)
    began: Times = json.loads(output(command, CLIENT_CORE))
    return Aborts(last_ms=tuple(last_ends(engine.journal(), began, IN_FLIGHT)))


async def bare(url: str, way: str, count: int, posts: int) -> Times:
    """A bare client that ends all it has in flight, `posts` times; when it began to."""
    began = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for number in range(posts):
            names = [f"bare{os.getpid()}-{way}-{number}-{index}" for index in range(count)]
            tasks = [asyncio.create_task(_complete(session, url, name)) for name in names]
            await asyncio.wait_for(_until_running(session, url, count), WITHIN_S)
            await asyncio.sleep(BARE_SETTLE_S)
            began.append(time.monotonic())
            if way == "list":
                async with session.post(
                    f"{url}/abort_requests", json={"request_ids": [f"cmpl-{name}-0" for name in names]}
                ) as answer:
                    answer.raise_for_status()
                    await answer.read()
            else:
                for task in tasks:
                    task.cancel()
            await asyncio.wait(tasks)
            await asyncio.wait_for(_until_running(session, url, 0), WITHIN_S)
    return began


async def _complete(session: aiohttp.ClientSession, url: str, name: str) -> None:
    body = {"model": "simulated", "prompt": PROMPT_IDS, "max_tokens": 64, "logprobs": 0, "return_token_ids": True}
    async with session.post(
        f"{url}/v1/completions", json=body, headers={"X-Request-Id": name}, timeout=aiohttp.ClientTimeout()
    ) as answer:
        await answer.read()


async def _until_running(session: aiohttp.ClientSession, url: str, count: int) -> None:
    while True:
        async with session.get(f"{url}/metrics") as answer:
            page = await answer.text()
        line = next(line for line in page.splitlines() if line.startswith("vllm:num_requests_running"))
        if round(float(line.rpartition(" ")[2])) == count:
            return
        await asyncio.sleep(0.05)


def measure(rounds: int, *, quick: bool) -> list[Figure]:
    posts = QUICK_POSTS if quick else POSTS
    with lean_engine(LATENCY_S) as engine:
        runs = alternate(
            rounds,
            {
                "service": lambda: of_service(engine, posts=posts),
                "bare, one list": lambda: of_bare(engine, "list", posts=posts),
                "bare, connections": lambda: of_bare(engine, "close", posts=posts),
            },
        )
    worst = {way: tuple(percentile(run.last_ms, 0.99) for run in found) for way, found in runs.items()}
    ours = median(worst["service"])
    best, beside = min((median(worst[way]), way) for way in worst if way != "service")
    everything = [milliseconds for run in runs["service"] for milliseconds in run.last_ms]
    return [
        Figure(
            key="abort_p99_ms_1000",
            what="from POST /policy_version to the last abort, 1,000 stale in flight, p99",
            value=ours,
            unit="ms",
            beside=f"{beside}: {best:.1f} ms",
            goal=below(100),
            runs=worst["service"],
            note=f"All {len(everything)} posts: median {median(everything):.1f} ms, worst {max(everything):.1f} ms.",
        ),
        Figure(
            key="abort_ratio_bare",
            what="the same over the faster of the bare client's two ways",
            value=ours / best,
            goal=at_most(2),
            runs=tuple(own / best for own in worst["service"]),
        ),
        Figure(
            key="refill_share_250ms_1000",
            what="of those 1,000 slots, busy again 250 ms after the POST",
            value=median(share for run in runs["service"] for share in run.busy),
            unit="%",
            runs=tuple(median(run.busy) for run in runs["service"]),
        ),
    ]


def main() -> None:
    if sys.argv[1:2] == ["--bare"]:
        url, way, count, posts = sys.argv[2:]
        print(json.dumps(uvloop.run(bare(url, way, int(count), int(posts)))))
    else:
        run_alone(measure, __doc__ or "")


if __name__ == "__main__":
    main()
