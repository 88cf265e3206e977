"""A service that says what a test wants: the page's files under the service's policy, and scripted answers.

What always holds: the shapes are those of the real one (tests/page/test_page_live.py runs the page against that);
`push` reaches every open stream.
"""

from __future__ import annotations

import asyncio
import copy
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

import rollout_service.api
from rollout_service.api.pages import CONTENT_SECURITY_POLICY, MEDIA_TYPES
from tests.listening import end

FOLDER = Path(rollout_service.api.__file__).parent / "page"
STATES = ("pending", "generating", "scoring", "ready", "leased", "acked", "stale", "dropped", "failed")
AT = "2026-11-30T01:02:03.456Z"

Json = dict[str, Any]


def status(**changes: Any) -> Json:
    """`GET /status`; `groups` are counts by state, the sums follow from them."""
    groups = dict.fromkeys(STATES, 0) | changes.pop("groups", {"generating": 2, "acked": 3})
    outstanding = sum(groups[state] for state in STATES[:5])
    base: Json = {
        "policy_version": 7,
        "max_staleness": 4,
        "submitted": sum(groups.values()),
        "groups": groups,
        "outstanding": outstanding,
        "slots": {"total": 128, "used": 96, "free": 32},
        "paused": False,
        "halted": None,
        "blocked": None,
        "final": False,
        "read_position": 0,
        "oldest_outstanding": {"group_id": "g-4", "state": "generating", "age_s": 12.5} if outstanding else None,
        "leases": {"live": 0, "waiting_calls": 0},
        "store": {"ok": True, "error": None},
        "threads": None,
        "engines": [engine()],
    }
    return base | changes


def engine(number: int = 0, **changes: Any) -> Json:
    base = {"id": f"e{number}", "url": f"http://10.0.0.{7 + number}:8000", "healthy": True, "in_flight": 96}
    more = {"max_inflight": 256, "model": "tiny", "max_model_len": 4096, "logprobs_mode": "processed_logprobs"}
    return (
        base
        | more
        | {"abort": "abort_requests", "weight_version": None, "behind": False, "leaving": False, "error": None}
        | changes
    )


def live(**changes: Any) -> Json:
    """One object of `/events`; `status` takes the place of `status()`."""
    base: Json = {
        "at": AT,
        "version": "0.1.0",
        "mode": "grpo",
        "status": status(),
        "rates": {"window_s": 30.0, "rollouts_per_s": 1.5, "tokens_per_s": 12_345.0, "groups_per_s": 0.2},
        "totals": {
            "rollouts_finished": 10,
            "rollouts_failed": {},
            "groups_delivered": 3,
            "groups_acked": 3,
            "groups_stale": 0,
            "groups_failed": 0,
            "groups_dropped": {},
            "tokens_generated": 1000,
            "tokens_delivered": 500,
            "tokens_wasted": {},
            "aborts": 0,
            "halts": 0,
        },
        "flow": [],
        "staleness": [],
        "rewards": [],
        "recent": [],
    }
    return base | changes


def row(number: int, **changes: Any) -> Json:
    """One row of `GET /groups`."""
    base: Json = {
        "group_id": f"g-{number}",
        "prompt_id": f"math-{number:05}",
        "epoch": 0,
        "state": "acked",
        "reason": None,
        "attempt": 1,
        "tries": 1,
        "num_generations": 4,
        "policy_version": 7,
        "staleness": None,
        "error": None,
        "engine": None,
        "lease_id": None,
        "acked_by": None,
        "submitted_at": AT,
        "age_s": 75.0,
        "state_age_s": 3.0,
    }
    return base | changes


def rollout(index: int, **changes: Any) -> Json:
    """One rollout of `GET /groups/{id}`; finished unless told otherwise."""
    names = ("in_flight_s", "finish_reason", "tokens", "text", "error", "reason", "engine", "attempts")
    base = {"index": index, "state": "finished"} | dict.fromkeys((*names, "reward", "rewards", "advantage"))
    if changes.get("state", "finished") == "finished":
        base |= {"finish_reason": "stop", "tokens": 5, "text": f"answer {index}", "engine": "http://10.0.0.7:8000"}
        base |= {"attempts": 1, "reward": 0.5, "rewards": {"accuracy": 0.5}, "advantage": 0.0}
    return base | changes


def detail(number: int, *rollouts: Json, **changes: Any) -> Json:
    """`GET /groups/{id}`."""
    rows: dict[str, list[int]] = {name: [] for name in ("waiting", "running", "finished", "failed")}
    for one in rollouts:
        rows[one["state"]].append(one["index"])
    more = {"rows": rows, "rollouts": list(rollouts), "reward_errors": {}, "columns": {}, "prompt": "The sea"}
    return row(number, state="ready") | more | {"sampling": {"temperature": 1.0}} | changes


def sample(index: int, tokens: list[str | None], logprobs: list[float], context: int = 1) -> Json:
    """One of `GET /groups/{id}/samples`; the first `context` tokens are not trained."""
    count = len(tokens)
    return {
        "index": index,
        "policy_version": 7,
        "reward": 0.5,
        "rewards": {"accuracy": 0.5},
        "advantage": 0.0,
        "scored": True,
        "finish_reason": "stop",
        "input_ids": list(range(100, 100 + count)),
        "completion_mask": [0] * context + [1] * (count - context),
        "old_log_probs": [0.0] * context + logprobs,
        "tokens": tokens,
    }


class Backend:
    """Used as `async with Backend() as backend`; `stop` and `start` keep the port."""

    def __init__(self, view: Json | None = None) -> None:
        self.view = view or live()
        self.rows: list[Json] = []
        self.details: dict[str, Json] = {}
        self.samples: dict[str, list[Json]] = {}
        self.key = ""
        """Set: what every call but the page's files must bring."""
        self.refusal: tuple[int, str] | None = None
        """Set: status and detail of every such answer."""
        self.cut = 0
        """Set: a line of /events goes out in pieces of so many bytes."""
        self.idle_s: float | None = 1.0
        """As the real one does, a line is said again after so long; None: never."""
        self.queries: list[dict[str, str]] = []
        """Of `GET /groups`, in order."""
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._changed = asyncio.Condition()
        self._serial = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    async def __aenter__(self) -> Backend:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/", self._file)
        app.router.add_get("/page/{name}", self._file)
        for path, handler in (
            ("/events", self._events),
            ("/status", self._status),
            ("/groups", self._groups),
            ("/groups/{id}", self._group),
            ("/groups/{id}/samples", self._samples),
        ):
            app.router.add_get(path, self._guarded(handler))
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            for connection in list(runner.server.connections if runner.server else ()):
                if connection.transport is not None:
                    connection.transport.abort()
            await end(runner)

    async def push(self, **changes: Any) -> None:
        """Every stream gets the view with these members in place of its own."""
        async with self._changed:
            self.view = copy.deepcopy(self.view) | changes
            self._serial += 1
            self._changed.notify_all()

    def _guarded(self, handler: Any) -> Any:
        async def guarded(request: web.Request) -> web.StreamResponse:
            if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
                return _problem(401, "a key is needed")
            if self.refusal:
                return _problem(*self.refusal)
            answer: web.StreamResponse = await handler(request)
            return answer

        return guarded

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name", "index.html")
        path = FOLDER / name
        if not path.is_file():
            return web.Response(status=404)
        kind = MEDIA_TYPES[path.suffix.removeprefix(".")]
        headers = {"content-type": kind, "content-security-policy": CONTENT_SECURITY_POLICY}
        return web.Response(body=path.read_bytes(), headers=headers)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
        await response.prepare(request)
        while True:
            serial = self._serial
            line = json.dumps(self.view, ensure_ascii=False).encode() + b"\n"
            step = self.cut or len(line)
            for start in range(0, len(line), step):
                await response.write(line[start : start + step])
                if self.cut:
                    await asyncio.sleep(0.001)  # or the network puts the pieces together again
            async with self._changed:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.idle_s):
                        await self._changed.wait_for(lambda before=serial: self._serial != before)

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(self.view["status"])

    async def _groups(self, request: web.Request) -> web.Response:
        query = dict(request.query)
        self.queries.append(query)
        limit, after = int(query.get("limit", 100)), int(query.get("after", "g-0")[2:])
        states = set(filter(None, query.get("state", "").split(",")))
        found = [r for r in self.rows if int(r["group_id"][2:]) > after and (not states or r["state"] in states)]
        page = found[:limit]
        return web.json_response({"groups": page, "next": page[-1]["group_id"] if len(page) == limit else None})

    async def _group(self, request: web.Request) -> web.Response:
        group = self.details.get(request.match_info["id"])
        return web.json_response(group) if group else _problem(404, "no group of that id")

    async def _samples(self, request: web.Request) -> web.Response:
        name, index = request.match_info["id"], request.query.get("index")
        found = [s for s in self.samples.get(name, []) if index in (None, str(s["index"]))]
        return web.json_response({"group_id": name, "attempt": 1, "samples": found})


def _problem(status: int, detail: str) -> web.Response:
    body = {"type": "/problems/x", "title": "x", "status": status, "detail": detail}
    return web.json_response(body, status=status, content_type="application/problem+json")
