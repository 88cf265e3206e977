"""A service and a lean engine as a benchmark runs them, and what the engine's journal says about a stretch of time.

What always holds: the service is the real one, in a process of its own on CLIENT_CORE, with SQLite in FULL on a real
disk and a reward on; engine and trainer share ENGINE_CORE. Whatever was started ends with its block.
All times are CLOCK_MONOTONIC seconds, which every process of the machine shares.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import msgspec

from benchmarks import processes
from benchmarks.engine import Entry, How
from benchmarks.load import PROMPT_IDS, REWARDS
from benchmarks.processes import ENGINE_CORE, Service

CHUNK = 250
"""Prompts of one call."""

Tables = Mapping[str, Mapping[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A running lean engine."""

    url: str

    def journal(self) -> list[Entry]:
        """Every request so far, oldest first."""
        content = httpx.get(f"{self.url}/journal", timeout=60).raise_for_status().content
        entries: list[Entry] = msgspec.json.Decoder(Entry).decode_lines(content)
        return entries

    def running(self) -> int:
        """Requests that decode now."""
        page = httpx.get(f"{self.url}/metrics", timeout=10).raise_for_status().text
        line = next(line for line in page.splitlines() if line.startswith("vllm:num_requests_running"))
        return round(float(line.rpartition(" ")[2]))


@contextmanager
def lean_engine(latency_s: float, *, spread: float = 0.0, tokens: int = 64) -> Iterator[Engine]:
    """A lean engine on a free port."""
    with processes.lean_engine(latency_s, spread=spread, tokens=tokens) as url:
        yield Engine(url=url)


def config(engine_url: str, tables: Tables) -> str:
    """TOML of a service with one engine and the benchmarks' reward; `tables` come on top, table by table."""
    values: dict[str, dict[str, object]] = {
        "groups": {"num_generations": 8, "max_ready_groups": 4096, "max_pending_groups": 10000},
        "dispatch": {"max_inflight_rollouts": 256},
        "sampling": {"max_tokens": 64},
        "store": {"url": "sqlite:///bench.db"},
    }
    for name, table in tables.items():
        values[name] = values.get(name, {}) | dict(table)
    lines = ["[[engines]]", f'url = "{engine_url}"', "max_inflight = 8192"]
    for name, table in values.items():
        lines += [f"[{name}]", *(f"{key} = {msgspec.json.encode(value).decode()}" for key, value in table.items())]
    lines += ["[[rewards]]", 'name = "brevity"', 'function = "bench_rewards:brevity"', ""]
    return "\n".join(lines)


@contextmanager
def service(engine_url: str, tables: Tables) -> Iterator[Service]:
    """A service that is ready, on a free port, with a folder of its own that goes when it ends."""
    files = {"bench_rewards.py": REWARDS}
    with (
        processes.folder() as folder,
        processes.service(config(engine_url, tables), files, within=folder) as running,
    ):
        yield running


def submit(url: str, count: int, prompt_ids: list[int] = PROMPT_IDS) -> None:
    """`count` prompts of the same ids, each a group of its own."""
    with httpx.Client(base_url=url, timeout=60) as http:
        for start in range(0, count, CHUNK):
            numbers = range(start, min(count, start + CHUNK))
            rows = [{"prompt_id": f"p{number}", "prompt_token_ids": prompt_ids} for number in numbers]
            http.post("/prompts", json={"prompts": rows}).raise_for_status()


class Acker:
    """A trainer that leases what is ready and acks it at once, from a thread, until its block ends."""

    def __init__(self, url: str, *, max_groups: int = 64, core: int = ENGINE_CORE) -> None:
        self._url, self._max_groups, self._core = url, max_groups, core
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._failed: Exception | None = None
        self.acked: set[tuple[str, int]] = set()
        """(group id, attempt) of every group whose ack was answered."""

    def __enter__(self) -> Acker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failed is not None:
            raise RuntimeError("the trainer of the benchmark failed") from self._failed

    def _run(self) -> None:
        if (os.cpu_count() or 1) > 1:
            os.sched_setaffinity(0, {self._core})  # of this thread alone
        try:
            with httpx.Client(base_url=self._url, timeout=60) as http:
                while not self._stop.is_set():
                    body = {"max_groups": self._max_groups, "min_groups": 1, "wait_s": 1}
                    lease = http.post("/leases", json=body).raise_for_status().json()
                    if lease["groups"]:
                        http.post(f"/leases/{lease['lease_id']}/ack").raise_for_status()
                        self.acked.update((group["group_id"], group["attempt"]) for group in lease["groups"])
        except (httpx.HTTPError, KeyError, ValueError) as error:
            self._failed = error


class Versions:
    """Posts versions 1, 2, … on a connection of its own, and knows when."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60)
        self._numbers = itertools.count(1)

    def __enter__(self) -> Versions:
        self._http.get("/policy_version").raise_for_status()  # the connection is made before a time counts
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def post(self) -> dict[str, int]:
        """The service's answer."""
        answer = self._http.post("/policy_version", json={"version": next(self._numbers)}).raise_for_status()
        found: dict[str, int] = answer.json()
        return found


def decoded(entry: Entry, start: float, end: float) -> float:
    """Tokens of `entry` decoded between `start` and `end`: it decodes evenly until it ends. Only of an ended entry."""
    if entry.ended is None:
        raise ValueError(f"{entry.id} is still running")
    seconds = entry.ended - entry.started
    overlap = min(entry.ended, end) - max(entry.started, start)
    if overlap <= 0:
        return 0.0
    return entry.tokens * min(1.0, overlap / seconds) if seconds > 0 else float(entry.tokens)


def running_at(entries: Iterable[Entry], moment: float, *, since: float = float("-inf")) -> int:
    """How many entries that began after `since` were decoding at `moment`."""
    return sum(
        since < entry.started <= moment and (entry.how is How.RUNNING or (entry.ended or 0.0) > moment)
        for entry in entries
    )
