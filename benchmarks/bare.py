"""The least a client can do: aiohttp on uvloop keeps N completions in flight and counts them. Prints one JSON line.

    python -m benchmarks.bare URL IN_FLIGHT WARM_UP_S WINDOW_S

An answer is decoded to what a trainer needs of it, ids and logprobs, and its lengths are compared; nothing else is
checked, kept or scored.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time

import aiohttp
import msgspec
import uvloop

from benchmarks.load import BODY, MOST_WARM_UP, Run
from benchmarks.report import percentile

LAG_INTERVAL_S = 0.01


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs


class Answer(msgspec.Struct):
    choices: list[_Choice]


decode = msgspec.json.Decoder(Answer).decode


def checked(content: bytes) -> None:
    """RuntimeError where ids and logprobs have other lengths."""
    choice = decode(content).choices[0]
    if len(choice.token_ids) != len(choice.logprobs.token_logprobs):
        raise RuntimeError("the engine answered unequal lengths")


async def measure_lag(lags: list[float]) -> None:
    """How late the loop wakes a sleeper, seconds; runs until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        lags.append(max(0.0, loop.time() - due))


async def main(url: str, in_flight: int, warm_up_s: float, window_s: float) -> None:
    done = 0
    ids = itertools.count()

    async def worker(session: aiohttp.ClientSession) -> None:
        nonlocal done
        while True:
            headers = {"Content-Type": "application/json", "X-Request-Id": f"b{os.getpid()}-{next(ids)}"}
            async with session.post(f"{url}/v1/completions", data=BODY, headers=headers) as answer:
                checked(await answer.read())
            done += 1

    lags: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        workers = [asyncio.create_task(worker(session)) for _ in range(in_flight)]
        started = time.monotonic()
        await asyncio.sleep(warm_up_s)
        while done < in_flight and time.monotonic() < started + MOST_WARM_UP * warm_up_s:
            await asyncio.sleep(0.05)
        lag = asyncio.create_task(measure_lag(lags))
        before, cpu, started = done, time.process_time(), time.monotonic()
        await asyncio.sleep(window_s)
        count, cpu, seconds = done - before, time.process_time() - cpu, time.monotonic() - started
        failed = [task.exception() for task in workers if task.done()]
        for task in (*workers, lag):
            task.cancel()
        await asyncio.wait((*workers, lag))
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]!r}")
    lag_ms = 1000 * percentile(lags, 0.99)
    print(Run(per_s=count / seconds, cpu_ms=1000 * cpu / max(1, count), lag_p99_ms=lag_ms).line())


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])))
