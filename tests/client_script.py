"""A scripted service for the client's tests: the REST interface as the contract has it, on a real socket.

What it knows (ready groups, leases, acks, versions) outlives `stop()` and `start()`, as a store would; the port stays
the same. `faults` are used up in order by the requests they match: each names a path's beginning and what happens.
Every request is recorded before anything happens to it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from tests.listening import end
from trainer_client import AsyncRolloutClient, Lease, RolloutClient


def sample(index: int = 0, *, prompt: int = 2, completion: int = 3, **more: Any) -> dict[str, Any]:
    """A sample whose token t is `100 * index + t` and whose logprob there is -t/8 (exact in float32)."""
    length = prompt + completion
    return {
        "rollout_id": f"r{index}", "index": index, "policy_version": 0, "prompt": "p", "completion": "c",
        "input_ids": [100 * index + t for t in range(length)],
        "completion_mask": [0] * prompt + [1] * completion,
        "old_log_probs": [0.0] * prompt + [-t / 8 for t in range(prompt, length)],
        "reward": 1.0, "rewards": {"accuracy": 1.0}, "advantage": 0.5 + index, "scored": True,
        "finish_reason": "stop", "truncated": False, "metrics": {"duration_s": 0.1}, "a_later_member": {"x": [1]},
    } | more  # fmt: skip


def group(group_id: str, version: int = 0, samples: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A scored group as the service leases it."""
    return {
        "group_id": group_id, "prompt_id": f"p-{group_id}", "attempt": 1, "policy_version": version, "staleness": 0,
        "zero_variance": False, "reward_mean": 0.5, "reward_std": 0.5, "columns": {"answer": 42},
        "samples": samples or [sample(0), sample(1)],
    }  # fmt: skip


def problem(status: int, slug: str, detail: str, **facts: Any) -> web.Response:
    """RFC 9457, with the type as a URI, as services like to send it."""
    body = {"type": f"/problems/{slug}", "title": slug, "status": status, "detail": detail, **facts}
    headers = {"retry-after": str(facts["retry_after"])} if "retry_after" in facts else {}
    return web.Response(
        status=status, body=json.dumps(body).encode(), content_type="application/problem+json", headers=headers
    )


@dataclass
class Fault:
    """What happens to one request: `cut` before or after it was acted on, or an answer in its place."""

    path: str
    cut: str = ""
    answer: Callable[[], web.Response] | None = None


@dataclass
class Seen:
    """A request as it came."""

    method: str
    path: str
    body: Any


@dataclass
class Held:
    """A lease the service remembers."""

    lease_id: str
    params: dict[str, Any]
    groups: list[dict[str, Any]]
    open: set[str]
    expires_at: float
    """Monotonic; only renewing looks at it."""
    renewals: int = 0


@dataclass
class ScriptedService:
    """Start it, fill `ready`, script `faults`, look at `seen`, `acked`, `released`."""

    ready: list[dict[str, Any]] = field(default_factory=list)
    exhausted_when_empty: bool = True
    faults: list[Fault] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    authorizations: list[list[str]] = field(default_factory=list)
    """The Authorization headers of each request in `seen`."""
    acked: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    leases: dict[str, Held] = field(default_factory=dict)
    halted: dict[str, Any] | None = None
    version: int = 0
    max_staleness: int = 1
    prompts: dict[str, dict[str, Any]] = field(default_factory=dict)
    paused: bool = False
    marks: list[str] = field(default_factory=list)
    removed: set[str] = field(default_factory=set)
    """Engines."""
    in_service: int = 0
    """Requests being answered now."""

    def __post_init__(self) -> None:
        self.port = 0
        """Chosen by the first `start()`, kept by the later ones."""
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = threading.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # running it

    def start(self) -> ScriptedService:
        started = threading.Event()
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = int(listener.getsockname()[1])
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(listener, started)), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def stop(self) -> None:
        """End at once, cutting every connection. A service that was not started: no effect."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(10)
        self._loop = self._thread = None

    async def _main(self, listener: socket.socket, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping, self._more = asyncio.Event(), asyncio.Condition()
        server = web.Server(self._handle, handler_cancellation=True)  # a handler ends when its client hangs up
        runner = web.ServerRunner(server, shutdown_timeout=0)
        await runner.setup()
        site = web.SockSite(runner, listener)
        await site.start()
        started.set()
        await self._stopping.wait()
        # Accepting ends some turns before the server does: asyncio fails on a connection it is accepting meanwhile.
        self._loop.remove_reader(listener)
        for _ in range(3):
            await asyncio.sleep(0)
        await site.stop()
        while server.connections:
            for connection in list(server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await asyncio.sleep(0)
        await end(runner)

    # what tests wait for and change while it runs

    def wait_for(self, condition: Callable[[], bool], within: float = 10.0) -> None:
        """Until `condition()`, looked at after every request and every change."""
        with self._changed:
            assert self._changed.wait_for(condition, within), f"not within {within} s; seen: {self.seen[-10:]}"

    def change(self, **values: Any) -> None:
        """Set attributes and wake the calls that wait."""

        async def apply() -> None:
            for name, value in values.items():
                setattr(self, name, value)
            async with self._more:
                self._more.notify_all()

        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(apply(), self._loop).result(10)

    def requests(self, path: str) -> list[Seen]:
        return [request for request in self.seen if request.path.startswith(path)]

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # answering

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw) if raw else None
        self.seen.append(Seen(request.method, request.path_qs, body))
        self.authorizations.append(request.headers.getall("Authorization", []))
        fault = next((f for f in self.faults if request.path.startswith(f.path)), None)
        if fault is not None:
            self.faults.remove(fault)
        self.in_service += 1
        self._tell()
        try:
            if fault is not None and fault.cut == "before":
                return self._cut(request)
            if fault is not None and fault.answer is not None:
                return fault.answer()
            answer = await self._answer(request, body)
            return self._cut(request) if fault is not None and fault.cut == "after" else answer
        finally:
            self.in_service -= 1
            self._tell()

    def _cut(self, request: web.BaseRequest) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def _answer(self, request: web.BaseRequest, body: Any) -> web.Response:
        parts = [unquote(part) for part in request.rel_url.raw_path.strip("/").split("/")]
        match [request.method, *parts]:
            case ["POST", "leases"]:
                return await self._lease(body)
            case ["POST", "leases", lease_id, verb]:
                return await self._settle(lease_id, verb, body)
            case ["POST", "policy_version"]:
                return self._bump(body)
            case ["GET", "policy_version"]:
                return web.json_response({"version": self.version, "max_staleness": self.max_staleness})
            case ["POST", "prompts"]:
                return self._submit(body)
            case ["GET", "status"]:
                return self._status()
            case ["GET", "groups"]:
                return self._groups(request)
            case [_, "groups", group_id]:
                return self._group(request.method, group_id)
            case ["POST", "pause" | "resume" as verb]:
                self.paused = verb == "pause"
                return web.json_response({"paused": self.paused})
            case ["GET", "engines"]:
                return web.json_response({"engines": [{"id": "e0", "healthy": True}]})
            case ["POST", "engines"]:
                return web.json_response({"id": "e1", "healthy": True, **body}, status=201)
            case ["DELETE", "engines", engine_id]:
                if engine_id in self.removed:
                    return problem(404, "not-found", f"no engine {engine_id!r}")
                self.removed.add(engine_id)
                return web.json_response({"id": engine_id, "leaving": True})
            case ["GET", "metrics"]:
                return web.Response(text="rollout_policy_version 0.0\n")
            case [_, "checkpoints" | "rewind", *_]:
                return self._checkpoints(request.method, parts, body)
        return web.Response(status=404, text="404: Not Found")

    async def _lease(self, body: dict[str, Any]) -> web.Response:
        known = self.leases.get(body["request_id"])
        if known is not None:
            if not known.open or known.params != body:
                return problem(409, "conflict", f"request_id {body['request_id']} was used already")
            return self._lease_answer("ok", known)
        try:
            async with asyncio.timeout(body["wait_s"]), self._more:
                await self._more.wait_for(lambda: self._satisfies(body["min_groups"]))
        except TimeoutError:
            return self._lease_answer("empty", None)
        if not self.ready:
            if self.halted is not None:
                return problem(503, "halted", "halted after 1 failed group in a row", **self.halted)
            return self._lease_answer("exhausted", None)
        taken = [self.ready.pop(0) for _ in range(min(body["max_groups"], len(self.ready)))]
        until = time.monotonic() + body["lease_s"]
        held = Held(f"l{len(self.leases)}", body, taken, {g["group_id"] for g in taken}, until)
        self.leases[body["request_id"]] = held
        return self._lease_answer("ok", held)

    def _satisfies(self, min_groups: int) -> bool:
        leased = any(held.open for held in self.leases.values())
        nothing_comes = self.exhausted_when_empty and not leased
        return len(self.ready) >= min_groups or self.halted is not None or nothing_comes

    def _lease_answer(self, status: str, held: Held | None) -> web.Response:
        groups = held.groups if held else []
        return web.json_response({
            "lease_id": held.lease_id if held else None, "expires_at": 1e9, "status": status, "groups": groups,
            "policy_version": self.version, "outstanding": len(self.ready) + len(groups), "a_later_member": 1,
        })  # fmt: skip

    async def _settle(self, lease_id: str, verb: str, body: Any) -> web.Response:
        held = next((h for h in self.leases.values() if h.lease_id == lease_id), None)
        if held is None:
            return problem(404, "not-found", f"no lease {lease_id}")
        ids = (body or {}).get("group_ids") or [g["group_id"] for g in held.groups]
        if verb == "renew":
            if not held.open or time.monotonic() > held.expires_at:
                return problem(409, "conflict", "expired")
            held.renewals += 1
            held.expires_at = time.monotonic() + held.params["lease_s"]
            return web.json_response({"expires_at": "later"})
        if verb == "ack":
            if refused := [i for i in ids if i not in held.open and i not in self.acked]:
                return problem(409, "conflict", f"{refused[0]} is leased to somebody else", group_id=refused[0])
            self.acked += [i for i in ids if i in held.open]
        elif not held.open:
            return problem(409, "conflict", f"lease {lease_id} has ended")
        else:
            self.released += [i for i in ids if i in held.open]
        held.open -= set(ids)
        async with self._more:
            self._more.notify_all()
        return web.json_response({})

    def _bump(self, body: dict[str, Any]) -> web.Response:
        previous, version = self.version, body["version"]
        if version < previous and not body["reset"]:
            return problem(409, "conflict", f"version {version} is lower than {previous}", version=previous)
        if version < previous:
            for held in self.leases.values():
                held.open.clear()
        self.version = version
        effect = {"stale_groups": 2 * (version > previous), "aborted_rollouts": 9 * (version > previous)}
        return web.json_response({"version": version, "previous": previous, **effect})

    def _submit(self, body: dict[str, Any]) -> web.Response:
        for prompt in body["prompts"]:
            self.prompts.setdefault(prompt["prompt_id"], {"group_id": f"g{len(self.prompts)}", **prompt})
        rows = [self.prompts[prompt["prompt_id"]] for prompt in body["prompts"]]
        answer = [{"group_id": row["group_id"], "prompt_id": row["prompt_id"]} for row in rows]
        return web.json_response({"groups": answer}, status=202)

    def _status(self) -> web.Response:
        return web.json_response({
            "policy_version": self.version, "submitted": 5, "groups": {"ready": len(self.ready), "acked": 0},
            "outstanding": len(self.ready), "slots": {"total": 8, "used": 3, "free": 5}, "paused": self.paused,
            "halted": self.halted, "oldest_outstanding": None, "engines": [{"id": "e0"}], "a_later_member": {},
        })  # fmt: skip

    def _groups(self, request: web.BaseRequest) -> web.Response:
        rows = [{"group_id": g["group_id"], "state": "ready", "policy_version": 0} for g in self.ready]
        if after := request.query.get("after"):
            rows = [row for row in rows if row["group_id"] > after]
        return web.json_response({"groups": rows[: int(request.query["limit"])]})

    def _group(self, method: str, group_id: str) -> web.Response:
        if method == "DELETE":
            kept = [g for g in self.ready if g["group_id"] != group_id]
            if len(kept) == len(self.ready):
                return problem(409, "conflict", f"{group_id} has ended")
            self.ready = kept
            return web.json_response({})
        if not group_id.startswith("g"):
            return problem(404, "not-found", f"no group {group_id}")
        state = "ready" if any(g["group_id"] == group_id for g in self.ready) else "dropped"
        return web.json_response({"group_id": group_id, "state": state, "attempts": [], "policy_version": None})

    def _checkpoints(self, method: str, parts: list[str], body: Any) -> web.Response:
        match [method, *parts]:
            case ["POST", "checkpoints"]:
                if body["name"] in self.marks:
                    return problem(409, "conflict", "the name is taken")
                self.marks.append(body["name"])
                return web.json_response({"name": body["name"]})
            case ["GET", "checkpoints"]:
                return web.json_response({"checkpoints": [{"name": name} for name in self.marks]})
            case ["DELETE", "checkpoints", name] if name in self.marks:
                self.marks.remove(name)
                return web.json_response({})
            case ["POST", "rewind"] if body["name"] in self.marks:
                return web.json_response({"version": 3})
        return problem(404, "not-found", "no such checkpoint")


class Waited:
    """An `AsyncRolloutClient` behind the blocking interface, its loop running in a thread: what is tested for one
    driver is tested for the other, and its tasks go on while the test does something else."""

    def __init__(self, url: str, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

        async def connect() -> AsyncRolloutClient:
            return AsyncRolloutClient(url, **options)

        self._client = self._wait(connect())

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._wait(getattr(self._client, name)(*args, **kwargs))

    def leases(self, *args: Any, **kwargs: Any) -> Iterator[Lease]:
        async def make() -> Any:  # async iterators belong to the loop they are first used in
            return self._client.leases(*args, **kwargs)

        async def step() -> Lease | None:
            return await anext(leases, None)

        leases = self._wait(make())
        try:
            while (lease := self._wait(step())) is not None:
                yield lease
        finally:
            if not self._loop.is_closed():  # else it was closed with its loop
                self._wait(leases.aclose())

    @contextmanager
    def prefetch(self, *args: Any, **kwargs: Any) -> Iterator[Iterator[Lease]]:
        async def make() -> Any:
            return self._client.prefetch(*args, **kwargs)

        async def step() -> Lease | None:
            return await anext(leases, None)

        leases = self._wait(make())
        self._wait(leases.__aenter__())
        try:
            yield iter(lambda: self._wait(step()), None)
        except BaseException as error:
            self._wait(leases.__aexit__(type(error), error, None))
            raise
        self._wait(leases.__aexit__(None, None, None))

    def close(self) -> None:
        if self._loop.is_closed():
            return
        try:
            self._wait(self._client.aclose())
            self._wait(self._loop.shutdown_asyncgens())
            self._wait(asyncio.sleep(0))  # closed connections are let go of in the loop's next turn
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Waited:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


DRIVERS: list[Callable[..., Any]] = [RolloutClient, Waited]
"""Parametrize a `connect` fixture with these."""
