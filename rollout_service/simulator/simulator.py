"""One simulated engine: its parts put together, its life, and its use in a test.

Always holds: between `start` and `stop` (or `kill`) it listens and serves; a restart keeps the port, the faults and
the journal, and nothing of the engine: weights are `default` again, the batch is empty.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from typing import Any, Self

from .bodies import Kind, Refusal
from .control import Control, Handler
from .engine import Engine
from .faults import FaultPlan
from .journal import Journal
from .scripting import PREFIX, record_view, routes, stats
from .server import Generation
from .settings import SimulatorSettings
from .wire import Exchange, Listener

GUARDED = ("/v1", "/v2", "/inference")
"""What vLLM's --api-key guards; everything else stays open."""
CRASH_EXIT_S = 0.5
"""A real server is gone within a second of its engine core."""


class Simulator:
    """A simulated engine in this process: `async with Simulator(SimulatorSettings()) as sim: ... sim.url`."""

    def __init__(self, settings: SimulatorSettings | None = None) -> None:
        self.settings = settings or SimulatorSettings()
        self.faults = FaultPlan(self.settings.seed)
        self.journal = Journal(self.settings.journal_size)
        self.down_status: int | None = None
        self.crashed = False
        self._listener = Listener(self._handle, keepalive_s=self.settings.keepalive_s)
        self._port = self.settings.port
        self._engine: Engine | None = None
        self._generation: Generation | None = None
        self._routes: dict[tuple[str, str], Handler] = {}
        self._paths: frozenset[str] = frozenset()
        self._watchers: list[tuple[Callable[[Simulator], bool], asyncio.Future[None]]] = []
        self._gone: asyncio.Event = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None

    # -- life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens; raises `OSError` where the address cannot be had. After an end: again, on the same port."""
        self.crashed = False
        self._gone.clear()
        self._generation = Generation(self.settings, self.faults, self.journal, changed=self.changed)
        self._engine = self._generation.engine
        control = Control(self.settings, self._engine, self.journal, changed=self.changed)
        self._routes = {**control.routes(), **routes(self), ("GET", "/openapi.json"): self._openapi}
        for kind in Kind:
            self._routes["POST", kind.value] = self._generate_as(kind)
        self._paths = frozenset(path for _, path in self._routes)
        await self._listener.start(self.settings.host, self._port)
        self._port = self._listener.port

    async def stop(self) -> None:
        """As on SIGTERM: who is in flight is answered (200, finish_reason abort), then every connection ends."""
        if self._ending is not None:
            await self._ending
        if self._engine is None:
            return
        self._listener.closing = True
        self._engine.abort_all()
        await self._end(abrupt=False)

    async def kill(self) -> None:
        """As `kill -9`: every connection is reset, nobody gets an answer."""
        if self._engine is not None:
            await self._end(abrupt=True)

    def crash(self) -> None:
        """The engine core dies: 500 for who is in flight, 503 from `/health`, and soon after the server is gone."""
        if self._generation is None or self.crashed:
            return
        self.crashed = True
        self._generation.die()
        loop = asyncio.get_running_loop()
        loop.call_later(CRASH_EXIT_S, self._end_soon)

    async def wait_gone(self) -> None:
        """Until it does not listen any more."""
        await self._gone.wait()

    # -- in a test

    @property
    def url(self) -> str:
        return f"http://{self.settings.host}:{self._port}"

    @property
    def engine(self) -> Engine:
        """Of the present life; raises `RuntimeError` before the first start and after the end."""
        if self._engine is None:
            raise RuntimeError("the simulator is not started")
        return self._engine

    def stats(self) -> dict[str, Any]:
        """As `GET /sim/stats`."""
        return stats(self)

    def requests(self, match: str | None = None) -> list[dict[str, Any]]:
        """As `GET /sim/requests`: the latest last; with `match`, those whose prompt has that text."""
        views = [record_view(record) for record in self.journal.records()]
        return [one for one in views if match is None or match in one["prompt"]]

    async def until(self, condition: Callable[[Simulator], bool], *, timeout_s: float = 10.0) -> None:
        """Waits for `condition`, looked at whenever a request starts or ends or a control call comes."""
        if condition(self):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers.append((condition, future))
        try:
            await asyncio.wait_for(future, timeout_s)
        finally:
            self._watchers = [watcher for watcher in self._watchers if watcher[1] is not future]

    def connections(self) -> int:
        return len(self._listener.connections)

    def changed(self) -> None:
        """Something happened that a watcher may wait for."""
        for condition, future in self._watchers:
            if not future.done() and condition(self):
                future.set_result(None)

    # -- within

    async def _end(self, *, abrupt: bool) -> None:
        engine, generation = self._engine, self._generation
        self._engine = self._generation = None
        if generation is not None and abrupt:
            generation.cut_all()
        if engine is not None:
            engine.stop()
        await self._listener.stop(abrupt=abrupt)
        self._gone.set()

    def _end_soon(self) -> None:
        if self._engine is not None and self.crashed:
            self._ending = asyncio.get_running_loop().create_task(self._end(abrupt=True))

    def _handle(self, exchange: Exchange) -> None:
        path = exchange.path
        try:
            self._admit(path, exchange)
            handler = self._routes.get((exchange.method, path))
            if handler is not None:
                handler(exchange)
            elif path in self._paths:
                exchange.answer_json({"detail": "Method Not Allowed"}, status=405)
            else:
                exchange.answer_json({"detail": "Not Found"}, status=404)
        except Refusal as refusal:
            exchange.answer_json(refusal.body, status=refusal.status)

    def _admit(self, path: str, exchange: Exchange) -> None:
        if path.startswith(PREFIX):
            return
        if self.down_status is not None:
            raise Refusal(self.down_status, "scripted to be down", kind="ServiceUnavailableError")
        if self.settings.api_key and path.startswith(GUARDED) and not self._authorized(exchange):
            refusal = Refusal(401, "Unauthorized")
            # Unlike every other error: no object, just the word.
            refusal.body = {"error": "Unauthorized"}
            raise refusal

    def _authorized(self, exchange: Exchange) -> bool:
        scheme, _, key = exchange.headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self.settings.api_key.encode())

    def _generate_as(self, kind: Kind) -> Handler:
        def handler(exchange: Exchange) -> None:
            if self._generation is not None:
                self._generation.serve(kind, exchange)

        return handler

    def _openapi(self, exchange: Exchange) -> None:
        hidden = PREFIX if self.settings.scale_out else (PREFIX, "/inference")
        paths: dict[str, dict[str, Any]] = {}
        for method, path in self._routes:
            if not path.startswith(hidden):
                paths.setdefault(path, {})[method.lower()] = {}
        exchange.answer_json({"openapi": "3.1.0", "info": {"title": "FastAPI", "version": "0.1.0"}, "paths": paths})
