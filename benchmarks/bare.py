"""The least a client can do: aiohttp on uvloop keeps N completions in flight and counts them. Prints one JSON line.

python -m benchmarks.bare URL IN_FLIGHT WARM_UP_S WINDOW_S
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time

import aiohttp
import uvloop

from benchmarks.load import BODY


async def main(url: str, in_flight: int, warm_up_s: float, window_s: float) -> None:
    done = 0
    ids = itertools.count()

    async def worker(session: aiohttp.ClientSession) -> None:
        nonlocal done
        while True:
            headers = {"Content-Type": "application/json", "X-Request-Id": f"b{os.getpid()}-{next(ids)}"}
            async with session.post(f"{url}/v1/completions", data=BODY, headers=headers) as answer:
                content = await answer.read()
            choice = json.loads(content)["choices"][0]
            if len(choice["token_ids"]) != len(choice["logprobs"]["token_logprobs"]):
                raise RuntimeError("the engine answered unequal lengths")
            done += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        workers = [asyncio.create_task(worker(session)) for _ in range(in_flight)]
        await asyncio.sleep(warm_up_s)
        before, cpu, started = done, time.process_time(), time.monotonic()
        await asyncio.sleep(window_s)
        count, cpu, seconds = done - before, time.process_time() - cpu, time.monotonic() - started
        for task in workers:
            task.cancel()
        await asyncio.wait(workers)
    print(json.dumps({"per_s": count / seconds, "cpu_ms": 1000 * cpu / max(1, count)}))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])))
