"""A scripted service for the tests of the terminal commands: what `GET` answers, on a real socket.

Every answer can be changed while the server runs; with `key` set, calls without it get the service's own 401.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from tests.listening import end

STATES = ("pending", "generating", "scoring", "ready", "leased", "acked", "stale", "dropped", "failed")


def engine(number: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "id": f"e{number}", "url": f"http://10.0.0.{number}:8000", "healthy": True, "in_flight": 12,
        "max_inflight": 256, "model": "tiny", "max_model_len": 4096, "logprobs_mode": "raw_logprobs",
        "abort": "requests", "weight_version": 7, "behind": False, "leaving": False, "error": None,
    } | changes  # fmt: skip


def halt(**changes: Any) -> dict[str, Any]:
    return {
        "reason": "1 groups failed in a row", "group_id": "g-9", "engine": "http://10.0.0.0:8000",
        "error": "the prompt is cursed", "since": "2026-11-30T01:00:00Z",
    } | changes  # fmt: skip


BUSY = {"pending": 30, "generating": 4, "acked": 90}


def status(groups: dict[str, int] | None = None, **changes: Any) -> dict[str, Any]:
    """A run that generates; `groups`: counts of some states."""
    counts = dict.fromkeys(STATES, 0) | (
        groups if groups is not None else {"pending": 30, "generating": 4, "acked": 90}
    )
    outstanding = sum(counts[state] for state in STATES[:5])
    return {
        "policy_version": 7, "max_staleness": 4, "submitted": sum(counts.values()), "groups": counts,
        "outstanding": outstanding, "slots": {"total": 16, "used": 12, "free": 4}, "paused": False, "halted": None,
        "blocked": None, "final": False, "read_position": 40,
        "oldest_outstanding": {"group_id": "g-91", "state": "generating", "age_s": 75.0} if outstanding else None,
        "leases": {"live": 1, "waiting_calls": 2}, "store": {"ok": True, "error": None},
        "threads": {"total": 8, "busy": 0, "waiting": 0, "stuck": 0}, "engines": [engine()],
    } | changes  # fmt: skip


def live(status_: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "at": "2026-11-30T01:02:03.456Z", "version": "0.1.0", "mode": "grpo", "status": status_ or status(),
        "rates": {"window_s": 30.0, "rollouts_per_s": 1.5, "tokens_per_s": 1234.5, "groups_per_s": 0.2},
        "totals": {
            "rollouts_finished": 1000, "rollouts_failed": {"rejected": 1, "timeout": 4}, "groups_delivered": 95,
            "groups_acked": 90, "groups_stale": 2, "groups_failed": 0, "groups_dropped": {"too_few_survivors": 1},
            "tokens_generated": 100000, "tokens_delivered": 90000, "tokens_wasted": {"stale": 1500, "failed": 500},
            "aborts": 12, "halts": 0,
        },
        "flow": [{"from": "pending", "to": "generating", "count": 12}],
        "staleness": [{"staleness": 0, "groups": 80}, {"staleness": 1, "groups": 15}],
        "rewards": [{"policy_version": v, "groups": 3, "mean": v / 8} for v in range(8)],
        "recent": [
            {"at": "2026-11-30T01:02:01Z", "kind": "rollout_failed", "group_id": "g-88", "engine": "http://10.0.0.0:8000",
             "text": "timeout after 600 s"},
            {"at": "2026-11-30T01:01:00Z", "kind": "version", "group_id": None, "engine": None, "text": "version 7"},
        ],
    } | changes  # fmt: skip


def group(number: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "group_id": f"g-{number}", "prompt_id": f"p-{number}", "epoch": 0, "state": "generating", "reason": None,
        "attempt": 1, "tries": 1, "num_generations": 4, "policy_version": 7, "staleness": 0, "error": None,
        "engine": None, "lease_id": None, "acked_by": None, "submitted_at": "2026-11-30T01:00:00Z", "age_s": 75.0,
        "state_age_s": 3.5,
    } | changes  # fmt: skip


def detail(**changes: Any) -> dict[str, Any]:
    finished = {
        "index": 0, "state": "finished", "finish_reason": "stop", "tokens": 12, "text": "the sea is blue",
        "engine": "e0", "attempts": 1, "reward": 1.0, "rewards": {"accuracy": 1.0}, "advantage": 0.7,
    }  # fmt: skip
    failed = {"index": 1, "state": "failed", "error": "no answer in 600 s", "reason": "timeout", "attempts": 3}
    running = {"index": 2, "state": "running", "in_flight_s": 3.25}
    return group() | {
        "rows": {"waiting": [3], "running": [2], "finished": [0], "failed": [1]},
        "rollouts": [finished, failed, running, {"index": 3, "state": "waiting"}], "reward_errors": {},
        "columns": {"answer": 42}, "prompt": [{"role": "user", "content": "What colour is the sea?"}], "sampling": {},
    } | changes  # fmt: skip


def problem(code: int, slug: str, detail: str) -> web.Response:
    body = {"type": f"/problems/{slug}", "title": slug, "status": code, "detail": detail}
    return web.Response(status=code, body=json.dumps(body).encode(), content_type="application/problem+json")


Answer = Callable[[web.Request], "web.StreamResponse | Awaitable[web.StreamResponse]"]


class ConsoleService:
    """Used as `async with ConsoleService() as service`; `stop` and `start` keep the port."""

    def __init__(self) -> None:
        self.live = live()
        self.key = ""
        self.answers: dict[str, Answer] = {}
        """By path; these go before what is answered otherwise."""
        self.asked: list[str] = []
        """Path and query of every call."""
        self.port = 0
        self.changed = asyncio.Event()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> ConsoleService:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Every connection is cut."""
        runner, self._runner = self._runner, None
        if runner is not None:
            for connection in list(runner.server.connections if runner.server else ()):
                if connection.transport is not None:
                    connection.transport.abort()
            await end(runner)

    def show(self, new: dict[str, Any]) -> None:
        """Tell everybody who follows `/events`."""
        self.live = new
        self.changed.set()
        self.changed = asyncio.Event()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path_qs)
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return problem(401, "unauthorized", "a key is needed")
        if request.path in self.answers:
            answer = self.answers[request.path](request)
            return answer if isinstance(answer, web.StreamResponse) else await answer
        if request.path == "/events":
            return await self._events(request)
        found = {
            "/live": self.live, "/status": self.live["status"], "/engines": {"engines": self.live["status"]["engines"]},
            "/groups": {"groups": [group(1), group(2, state="dropped", reason="unscorable")], "next": None},
            "/groups/g-1": detail(),
        }.get(request.path)  # fmt: skip
        return problem(404, "not-found", f"no {request.path}") if found is None else web.json_response(found)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        while True:
            changed = self.changed
            await response.write(json.dumps(self.live).encode() + b"\n")
            await changed.wait()
