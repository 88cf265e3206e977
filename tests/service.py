"""The real service for tests: settings, app, uvicorn on a free port, real fleet, reward workers and SQLite store.

What always holds: every lease that comes through `pull` satisfies what a trainer relies on (aligned lengths, finite
numbers, staleness within the bound); a `LiveService` that stops had its group counts add up and logged no fault of its
own. Only engines are stand-ins.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import structlog
import uvicorn

from rollout_service.app import Parts
from rollout_service.server import Server
from rollout_service.settings import Settings
from tests.durability.lives import Lives

OUTSTANDING = ("pending", "generating", "scoring", "ready", "leased")
TERMINAL = ("acked", "stale", "dropped", "failed")
OUR_FAULTS = frozenset(
    {
        "commit_raised",
        "effect_raised",
        "engine_check_failed",
        "every_second_raised",
        "last_commit_failed",
        "reload_raised",
        "request_failed",
        "rollout_internal_error",
        "rollout_raised",
        "scoring_raised",
        "stop_failed",
        "stop_timed_out",
    }
)
"""Log events that only a fault of the service itself makes."""
WITHIN_S = 15.0
"""What a loaded machine may take for anything that is not a matter of speed."""

Tables = dict[str, Any]


async def until(condition: Callable[[], Any], within_s: float = WITHIN_S, what: str = "") -> Any:
    """The first true value of `condition()`, which may be awaitable, looked at every few milliseconds."""
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {within_s} s: {what or condition}"
        await asyncio.sleep(0.005)


def prompt(key: str, n: int | None = None, **columns: Any) -> dict[str, Any]:
    """A prompt of token ids that read `p:KEY;`."""
    row: dict[str, Any] = {"prompt_id": key, "prompt_token_ids": list(f"p:{key};".encode()), "columns": columns}
    return row | ({"num_generations": n} if n else {})


def trained_ids(sample: Mapping[str, Any]) -> list[int]:
    """Ids of the tokens the engine sampled."""
    return [i for i, mask in zip(sample["input_ids"], sample["completion_mask"], strict=True) if mask]


def trained_text(sample: Mapping[str, Any]) -> str:
    return bytes(i for i in trained_ids(sample) if i < 256).decode()


def tables(directory: Path, urls: list[str], **changes: Any) -> Tables:
    """Settings of a small run in `directory`; `changes` go on top, table by table."""
    values: Tables = {
        "engines": [{"url": url, "max_inflight": 256} for url in urls],
        "groups": {"num_generations": 4, "max_staleness": 4},
        "dispatch": {"max_inflight_rollouts": 64, "max_attempts": 1, "probe_interval_s": 0.2},
        "sampling": {"max_tokens": 64},
        "rewards": [{"name": "accuracy", "function": "fault_rewards:accuracy", "timeout_s": 10.0}],
        "reward_workers": {"processes": 1},
        "store": {"url": f"sqlite:///{directory / 'rollout.db'}"},
        "server": {"host": "127.0.0.1", "port": 8080},
    }
    for name, value in changes.items():
        values[name] = values.get(name, {}) | value if isinstance(value, dict) else value
    return values


def check_group(group: Mapping[str, Any], lease: Mapping[str, Any], max_staleness: int) -> None:
    """What holds of every group of every lease."""
    assert group["staleness"] == lease["policy_version"] - group["policy_version"]
    assert 0 <= group["staleness"] <= max_staleness, f"a lease carries staleness {group['staleness']}"
    indexes = [sample["index"] for sample in group["samples"]]
    assert indexes
    assert len(set(indexes)) == len(indexes)
    for sample in group["samples"]:
        assert len({len(sample[name]) for name in ("input_ids", "completion_mask", "old_log_probs")}) == 1
        assert any(sample["completion_mask"])
        rows = zip(sample["old_log_probs"], sample["completion_mask"], strict=True)
        assert all(math.isfinite(value) and (mask == 1 or value == 0.0) for value, mask in rows)
        assert sample["policy_version"] == group["policy_version"]
        assert sample["finish_reason"] in ("stop", "length", "tool_calls")
        assert sample["truncated"] is (sample["finish_reason"] == "length")
        assert math.isfinite(sample["advantage"])
        if not sample["scored"]:
            assert sample["reward"] is None
            assert sample["advantage"] == 0


class Api:
    """The interface as a trainer and an operator use it."""

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self.http: httpx.AsyncClient

    def connect(self, port: int) -> None:
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            timeout=60,
            limits=limits,
            trust_env=False,
            verify=False,  # noqa: S501 - it is plain HTTP
        )

    # versions

    async def post_version(self, version: Any, **more: Any) -> httpx.Response:
        return await self.http.post("/policy_version", json={"version": version, **more})

    async def bump(self, version: int, **more: Any) -> dict[str, Any]:
        answer = await self.post_version(version, **more)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def version(self) -> int:
        return int((await self.http.get("/policy_version")).json()["version"])

    # prompts and groups

    async def post_prompts(self, *rows: Mapping[str, Any], final: bool | None = None) -> httpx.Response:
        body = {"prompts": list(rows)} | ({} if final is None else {"final": final})
        return await self.http.post("/prompts", json=body)

    async def submit(self, *rows: Mapping[str, Any], final: bool | None = None) -> list[str]:
        answer = await self.post_prompts(*rows, final=final)
        assert answer.status_code == 202, answer.text
        return [group["group_id"] for group in answer.json()["groups"]]

    async def group(self, group_id: str) -> dict[str, Any]:
        answer = await self.http.get(f"/groups/{group_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def state(self, group_id: str) -> str:
        return str((await self.group(group_id))["state"])

    async def wait_state(self, group_id: str, *states: str, within_s: float = WITHIN_S) -> dict[str, Any]:
        """The group once it is in one of `states`."""
        deadline = time.monotonic() + within_s
        while (group := await self.group(group_id))["state"] not in states:
            assert time.monotonic() < deadline, f"{group_id} is {group['state']} and not {states}: {group}"
            await asyncio.sleep(0.01)
        return group

    # leases

    async def lease(self, max_groups: int = 64, wait_s: int = 10, **more: Any) -> httpx.Response:
        return await self.http.post("/leases", json={"max_groups": max_groups, "wait_s": wait_s, **more})

    async def pull(self, max_groups: int = 64, wait_s: int = 10, **more: Any) -> dict[str, Any]:
        answer = await self.lease(max_groups, wait_s, **more)
        assert answer.status_code == 200, answer.text
        lease = json.loads(answer.content, parse_constant=_refuse)
        assert (lease["status"] == "ok") == bool(lease["groups"])
        assert len(lease["groups"]) <= max_groups
        for group in lease["groups"]:
            check_group(group, lease, self.max_staleness)
        return dict(lease)

    async def ack(self, lease_id: str, group_ids: list[str] | None = None) -> httpx.Response:
        body = {} if group_ids is None else {"group_ids": group_ids}
        return await self.http.post(f"/leases/{lease_id}/ack", json=body)

    async def collect(self, count: int, within_s: float = 2 * WITHIN_S) -> list[dict[str, Any]]:
        """Pull and ack until `count` groups are here."""
        groups: list[dict[str, Any]] = []
        deadline = time.monotonic() + within_s
        while len(groups) < count:
            assert time.monotonic() < deadline, f"{len(groups)} of {count} groups; {await self.counts()}"
            lease = await self.pull(min(64, count - len(groups)), 2)
            if lease["groups"]:
                assert (await self.ack(lease["lease_id"])).status_code == 200
                groups += lease["groups"]
        return groups

    # status and metrics

    async def status(self) -> dict[str, Any]:
        return dict((await self.http.get("/status")).json())

    async def counts(self) -> dict[str, int]:
        """Groups by state, and `submitted`; the two sides of the identity are equal."""
        status = await self.status()
        counts: dict[str, int] = status["groups"]
        assert status["submitted"] == sum(counts[state] for state in OUTSTANDING + TERMINAL), counts
        assert status["outstanding"] == sum(counts[state] for state in OUTSTANDING), counts
        slots = status["slots"]
        assert slots["used"] >= 0
        assert slots["used"] + slots["free"] == slots["total"], slots
        return counts | {"submitted": status["submitted"]}

    async def slots_used(self) -> int:
        return int((await self.status())["slots"]["used"])

    async def wait_ready(self) -> None:
        while await self.probe("/readyz") != 200:
            await asyncio.sleep(0.01)

    async def probe(self, path: str) -> int:
        return (await self.http.get(path)).status_code

    async def metrics(self) -> dict[tuple[str, str], float]:
        """(name, labels) -> value of every sample line."""
        page = (await self.http.get("/metrics")).text
        lines = re.findall(r"^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)", page, re.MULTILINE)
        return {(name, labels): float(value) for name, labels, value in lines}

    async def metric(self, name: str, label: str = "") -> float:
        """The sum over the label sets that contain `label`."""
        found = {labels: v for (n, labels), v in (await self.metrics()).items() if n == name and label in labels}
        assert found, f"{name} with {label} has no sample"
        return sum(found.values())


class _Server(Server):
    """Leaves the garbage collector as it is: that is a setting of the whole process, and the tests outlive the service.

    With the collector switched off after the first such service, the rest of the tests kept a gigabyte of garbage.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await uvicorn.Server.startup(self, sockets)


class LiveService(Api):
    """The service in the test's own event loop. `stop` and `start` keep its directory."""

    def __init__(self, directory: Path, urls: list[str], **changes: Any) -> None:
        self.directory = directory
        self.settings = Settings(**tables(directory, urls, **changes))
        super().__init__(self.settings.groups.max_staleness)
        self.logs: list[Any] = []
        self.port = 0
        self.server: _Server | None = None
        self._parts: Parts
        self._serving: asyncio.Task[None]
        self._capture: Any = None
        self._path: list[str] = []

    async def start(self) -> LiveService:
        self._capture = structlog.testing.capture_logs()
        self.logs = self._capture.__enter__()
        self._path = list(sys.path)
        self._parts = Parts(self.settings, self.directory)
        try:
            await self._parts.start()
        except BaseException:
            self._let_go()
            raise
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        self.port = sock.getsockname()[1]
        self.server = _Server(self.settings, self._parts)
        self._serving = asyncio.create_task(self.server.serve(sockets=[sock]))
        self.connect(self.port)
        server = self.server
        await until(lambda: server.started, what="uvicorn started")
        return self

    async def stop(self) -> None:
        if self.server is None:
            return
        await self.http.aclose()
        self.server.end()
        await self._serving
        await self._parts.stop()
        self.server = None
        self._let_go()
        assert gc.isenabled(), "the service switched the collector off for all tests after it"

    def _let_go(self) -> None:
        sys.path[:] = self._path
        self._capture.__exit__(None, None, None)

    def connections(self) -> int:
        """Open ones, as the server sees them."""
        return len(self.server.server_state.connections) if self.server else 0

    def logged(self, event: str) -> list[Any]:
        return [entry for entry in self.logs if entry["event"] == event]

    def reward_calls(self) -> list[dict[str, Any]]:
        return reward_calls(self.directory)

    async def checked_stop(self) -> None:
        """Stop, and see that nothing was wrong in the end."""
        if self.server is None:
            return
        try:
            await self.counts()
        finally:
            await self.stop()
        ours = [entry for entry in self.logs if entry["event"] in OUR_FAULTS]
        assert not ours, ours


class ServiceProcess(Api):
    """`rollout-service serve` as a process of its own, for what only a kill shows. `start` keeps directory and port."""

    def __init__(self, lives: Lives, directory: Path, urls: list[str], **changes: Any) -> None:
        self.lives, self.directory, self.port = lives, directory, free_port()
        values = tables(directory, urls, **changes)
        super().__init__(values["groups"]["max_staleness"])
        (directory / "rollout.toml").write_text(to_toml(values))

    async def start(self) -> ServiceProcess:
        await self.lives.begin(self.directory, "serve", "--config", "rollout.toml", "--port", str(self.port))
        self.connect(self.port)
        await until(self._ready, 60, "/readyz is 200")
        return self

    async def _ready(self) -> bool:
        assert not self.lives.over, self.log()[-3000:]
        try:
            return await self.probe("/readyz") == 200
        except httpx.TransportError:
            return False

    def log(self) -> str:
        return (self.directory / "service.log").read_text(errors="replace")

    async def kill(self) -> None:
        """As `kill -9` does."""
        if self.lives.pid is not None:
            self.lives.signal(signal.SIGKILL)
            await self.lives.ended()
        await self.http.aclose()

    def reward_calls(self) -> list[dict[str, Any]]:
        return reward_calls(self.directory)


@asynccontextmanager
async def killed_at_end(service: ServiceProcess) -> AsyncIterator[ServiceProcess]:
    try:
        yield service
    finally:
        await service.kill()


def reward_calls(directory: Path) -> list[dict[str, Any]]:
    path = directory / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def to_toml(values: Tables) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict | list)]
    for name, value in values.items():
        if isinstance(value, dict | list):
            for table in value if isinstance(value, list) else [value]:
                lines.append(f"[[{name}]]" if isinstance(value, list) else f"[{name}]")
                lines += [f"{key} = {json.dumps(entry)}" for key, entry in table.items()]
    return "\n".join(lines) + "\n"


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")
