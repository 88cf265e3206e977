"""A trainer that does nothing but its REST calls: keeps prompts pending, leases, acks, counts. Prints one JSON line.

    python -m benchmarks.trainer URL SERVICE_PID WARM_UP_S WINDOW_S

Completions are counted when their group's ack was answered.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time

import httpx

from benchmarks.load import PROMPT_IDS
from benchmarks.processes import cpu_seconds

KEEP_PENDING = 1500
CHUNK = 250


def feed(url: str, stop: threading.Event) -> None:
    numbers = itertools.count()
    with httpx.Client(base_url=url, timeout=30) as http:
        while not stop.wait(0.05):
            pending = http.get("/status").json()["groups"]["pending"]
            if pending < KEEP_PENDING:
                rows = [{"prompt_id": f"p{next(numbers)}", "prompt_token_ids": PROMPT_IDS} for _ in range(CHUNK)]
                http.post("/prompts", json={"prompts": rows}).raise_for_status()


def main(url: str, pid: int, warm_up_s: float, window_s: float) -> None:
    stop = threading.Event()
    feeder = threading.Thread(target=feed, args=(url, stop), daemon=True)
    feeder.start()
    acked = 0
    start = time.monotonic() + warm_up_s
    end = start + window_s
    before: tuple[int, float, float] | None = None
    with httpx.Client(base_url=url, timeout=60) as http:
        while (now := time.monotonic()) < end:
            if before is None and now >= start:
                before = (acked, cpu_seconds(pid), now)
            body = {"max_groups": 64, "min_groups": 1, "wait_s": 1}
            lease = http.post("/leases", json=body).raise_for_status().json()
            if lease["groups"]:
                http.post(f"/leases/{lease['lease_id']}/ack").raise_for_status()
                acked += sum(len(group["samples"]) for group in lease["groups"])
        if before is None:
            raise RuntimeError("the warm-up was longer than the run")
        count, seconds = acked - before[0], time.monotonic() - before[2]
        cpu = cpu_seconds(pid) - before[1]
    stop.set()
    feeder.join()
    print(json.dumps({"per_s": count / seconds, "cpu_ms": 1000 * cpu / max(1, count)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
