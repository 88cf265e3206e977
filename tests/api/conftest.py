"""The API over a real orchestrator in memory: only engines and rewards are stand-ins.

`service` is called in process; `live` and `Service.running()` listen on a real socket.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn

from rollout_service.api import Access, Context, Viewers, build_api
from rollout_service.core.model import WeightUpdate
from rollout_service.errors import NotFound
from rollout_service.keys import Keys
from rollout_service.metrics import Metrics
from rollout_service.observers import History, Observers, OutcomeLog
from rollout_service.orchestrator import Orchestrator, PolicyUpdates
from rollout_service.run import rules
from rollout_service.settings import EngineSettings, RewardSettings, Settings
from rollout_service.settings.registration import allowed_url
from rollout_service.store import MemoryStore
from tests.fakes import Clock, Engines, Runner, Scorer


@dataclass
class Fleet(Engines):
    """One engine that is always there."""

    updates: list[WeightUpdate] = field(default_factory=list)
    loads: Callable[[WeightUpdate], Awaitable[list[str]]] | None = None
    """What loading does; None: it works at once."""

    async def update_weights(self, update: WeightUpdate, *, again: bool = False) -> list[str]:
        self.updates.append(update)
        return [] if self.loads is None else await self.loads(update)

    async def token_texts(self, ids: Collection[int]) -> Mapping[int, str]:
        return {id_: f"<{id_}>" for id_ in ids if id_ != 8}

    async def add_engine(self, url: str, max_inflight: int | None = None) -> tuple[dict[str, Any], bool]:
        allowed_url(url, ())
        raise AssertionError("no pattern allows anything")

    async def remove_engine(self, id: str, *, drain_s: float) -> dict[str, Any]:
        raise NotFound(f"no engine {id[:40]!a}", engine_id=id[:40])

    def describe(self) -> list[dict[str, Any]]:
        return [{"id": "e0", "url": "http://engine", "healthy": self.capacity > 0, "in_flight": 0, "max_inflight": 64}]


def settings_with(**tables: Any) -> Settings:
    return Settings(
        engines=[EngineSettings()],
        rewards=[RewardSettings(name="accuracy", function="rewards:accuracy")],
        **({"groups": {"num_generations": 4}} | tables),
    )


@dataclass
class Service:
    """A service whose rollouts a test makes."""

    settings: Settings = field(default_factory=settings_with)
    runner: Runner = field(default_factory=Runner)
    scorer: Scorer = field(default_factory=Scorer)
    fleet: Fleet = field(default_factory=Fleet)
    clock: Clock = field(default_factory=Clock)
    keys: Keys = field(default_factory=lambda: Keys(()))

    def __post_init__(self) -> None:
        self.store = MemoryStore(self.settings.groups.max_staleness)
        self.metrics = Metrics(rewards=["accuracy"])
        self.history = History(self.clock)
        self.viewers = Viewers()
        self.door = Orchestrator(
            rules(self.settings),
            store=self.store,
            runner=self.runner,
            scorer=self.scorer,
            engines=self.fleet,
            observer=Observers(self.metrics, self.history, OutcomeLog()),
            clock=self.clock,
            steady=self.clock,
        )
        self.metrics.watch(self.door.status, self.fleet)
        self.context = Context(
            settings=self.settings,
            orchestrator=self.door,
            updates=PolicyUpdates(self.door, self.fleet, allowed_paths=self.settings.weights.allowed_paths),
            fleet=self.fleet,
            engine_calls=self.fleet,
            metrics=self.metrics,
            access=Access(self.keys, allowed_hosts=["service"]),
            history=self.history,
            viewers=self.viewers,
        )
        self.app = build_api(self.context)
        self.port = 0
        self.http: httpx.AsyncClient
        self.server: uvicorn.Server

    @asynccontextmanager
    async def in_process(self) -> AsyncIterator[Service]:
        await self.door.start()
        try:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://service", timeout=10) as self.http:
                yield self
        finally:
            await self.door.stop()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Service]:
        await self.door.start()
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        self.port = sock.getsockname()[1]
        self.server = server = _Server(
            uvicorn.Config(
                self.app, http="httptools", ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:
            await asyncio.sleep(0.001)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=10) as self.http:
                yield self
        finally:
            await self.door.stop()
            server.should_exit = True
            await serving

    def settled(self) -> int:
        """Rollouts whose end is committed."""
        return int(self.metrics.registry.get_sample_value("rollout_duration_seconds_count") or 0)

    def connections(self) -> int:
        """Open ones, as the server sees them."""
        return len(self.server.server_state.connections)

    async def post(self, path: str, body: Any = None) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def submit(self, *keys: str) -> list[str]:
        rows = [{"prompt_id": key, "prompt": f"p:{key};"} for key in keys]
        answer = await self.post("/prompts", {"prompts": rows})
        assert answer.status_code == 202, answer.text
        return [group["group_id"] for group in answer.json()["groups"]]

    async def counter(self, line: str) -> float:
        page = (await self.http.get("/metrics")).text
        (value,) = [found.rpartition(" ")[2] for found in page.splitlines() if found.rpartition(" ")[0] == line]
        return float(value)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The test runner keeps its own."""
        yield


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with Service().in_process() as service:
        yield service


@pytest.fixture
async def live() -> AsyncIterator[Service]:
    async with Service().running() as live:
        yield live
