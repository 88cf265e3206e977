"""The same as benchmarks.bare with httpx alone, as its documentation shows it. Prints one JSON line.

    python -m benchmarks.httpx_bare URL IN_FLIGHT WARM_UP_S WINDOW_S

httpx walks its whole pool for every request that begins or ends, so with hundreds in flight its loop stands still for
seconds to minutes. The window is therefore kept by a thread, which reads the count, prints and ends the process; what
the loop is doing then is not waited for.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
import time

import httpx
import uvloop

from benchmarks.bare import checked
from benchmarks.load import BODY, Run


class Count:
    done = 0
    failed: BaseException | None = None


async def keep_in_flight(url: str, in_flight: int, count: Count) -> None:
    ids = itertools.count()
    headers = {"Content-Type": "application/json"}

    async def worker(http: httpx.AsyncClient) -> None:
        while True:
            named = {**headers, "X-Request-Id": f"h{os.getpid()}-{next(ids)}"}
            answer = await http.post(f"{url}/v1/completions", content=BODY, headers=named)
            checked(answer.raise_for_status().content)
            count.done += 1

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=None) as http:  # noqa: S113  # the thread ends the process
        await asyncio.gather(*(worker(http) for _ in range(in_flight)))


def watch(count: Count, warm_up_s: float, window_s: float) -> None:
    time.sleep(warm_up_s)
    before, cpu, started = count.done, time.process_time(), time.monotonic()
    time.sleep(window_s)
    done, cpu, seconds = count.done - before, time.process_time() - cpu, time.monotonic() - started
    if count.failed is not None:
        print(f"a request failed: {count.failed!r}", file=sys.stderr, flush=True)
        os._exit(1)
    print(Run(per_s=done / seconds, cpu_ms=1000 * cpu / max(1, done)).line(), flush=True)
    os._exit(0)


def main(url: str, in_flight: int, warm_up_s: float, window_s: float) -> None:
    count = Count()
    thread = threading.Thread(target=watch, args=(count, warm_up_s, window_s))
    thread.start()
    try:
        uvloop.run(keep_in_flight(url, in_flight, count))
    except (httpx.HTTPError, RuntimeError) as error:
        count.failed = error
    thread.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
