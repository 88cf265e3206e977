"""A small scripted vLLM server on a real socket, in the test's own event loop.

`script` decides what a generation request gets: a `Reply`, or an awaitable of one. Everything that arrives is kept in
`asked`, `aborts` and `paths`; an empty abort list is kept in `violations`.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.listening import hear_no_more

MODEL = "tiny"
WEIGHT_ROUTES = {
    "/weight_info", "/pause", "/resume", "/collective_rpc", "/update_weight_version",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
}  # fmt: skip
GENERATE = {"/v1/completions": "cmpl-{}-0", "/v1/chat/completions": "chatcmpl-{}"}


@dataclass
class Reply:
    """One answer. `body` None: a completion of `ids`, changed by `change` before it is sent."""

    ids: list[Any] = field(default_factory=lambda: [104, 105])
    logprobs: list[Any] | None = None
    finish_reason: Any = "stop"
    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    change: Callable[[dict[str, Any]], Any] = lambda answer: None
    cut: bool = False
    """Close the TCP connection without a byte."""
    cut_inside: bool = False
    """Send half of the body, then close the TCP connection."""


@dataclass(eq=False)
class Asked:
    """One generation request."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    peer: Any
    outcome: str | None = None

    @property
    def request_id(self) -> str:
        return self.headers["x-request-id"]

    @property
    def abort_id(self) -> str:
        return GENERATE[self.path].format(self.request_id)


Script = Callable[[Asked], "Reply | Awaitable[Reply]"]


class ScriptedEngine:
    """Used as `async with ScriptedEngine(...) as engine`; `stop` and `start` keep the port."""

    def __init__(self, *, dev_mode: bool = True, scale_out: bool = False, keepalive_s: float = 75.0) -> None:
        self.dev_mode, self.scale_out, self.keepalive_s = dev_mode, scale_out, keepalive_s
        self.script: Script = lambda asked: Reply()
        self.health: Callable[[], int] = lambda: 200
        self.models: Any = {"data": [{"id": MODEL, "max_model_len": 64}]}
        self.models_status = 200
        self.server_info: Any = {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}}
        self.detokenize: Callable[[list[int]], web.Response] = lambda ids: web.json_response({"prompt": _text(ids)})
        self.abort_status = 200
        self.weight_version: str | None = None
        """What /weight_info reports; None: there are no weight routes."""
        self.control: list[tuple[str, Any]] = []
        """Weight and pause calls in order: (path, body)."""
        self.on_control: Callable[[str, Any], web.Response | Awaitable[web.Response] | None] = lambda path, body: None
        """Answers a weight or pause call in another way."""
        self.paused = False
        self.metrics: Callable[[], str] | None = None
        """The text of /metrics; None: there is no such page."""
        self.before_server_info: Callable[[], Awaitable[Any]] | None = None
        """Awaited before /server_info is answered."""
        self.silent = False
        """/weight_info answers 503."""
        self.asked: list[Asked] = []
        self.aborts: list[list[str]] = []
        self.paths: Counter[str] = Counter()
        self.violations: list[str] = []
        self.port = 0
        self.arrived = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def aborted(self) -> list[str]:
        return [abort_id for ids in self.aborts for abort_id in ids]

    @property
    def connections(self) -> int:
        return len(self._runner.server.connections) if self._runner and self._runner.server else 0

    async def __aenter__(self) -> ScriptedEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        assert not self.violations
        ids = [asked.request_id for asked in self.asked]
        assert len(ids) == len(set(ids)), "a request id came twice"

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0, keepalive_timeout=self.keepalive_s
        )
        await self._runner.setup()
        await web.SockSite(self._runner, socket.create_server(("127.0.0.1", self.port))).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Die: every connection is cut."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await hear_no_more(runner)
            for connection in list(runner.server.connections if runner.server else ()):
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()

    async def wait_asked(self, count: int) -> list[Asked]:
        """Wait until `count` generation requests have arrived."""
        async with asyncio.timeout(10), self.arrived:
            await self.arrived.wait_for(lambda: len(self.asked) >= count)
        return self.asked

    async def wait_for(self, condition: Callable[[], Any]) -> None:
        """Wait until `condition()` is true; it is looked at after everything that arrives or ends."""
        async with asyncio.timeout(10), self.arrived:
            await self.arrived.wait_for(condition)

    async def _tell(self) -> None:
        async with self.arrived:
            self.arrived.notify_all()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.paths[request.path] += 1
        try:
            if request.path in GENERATE:
                return await self._generate(request)
            return await self._control(request)
        finally:
            await asyncio.shield(asyncio.ensure_future(self._tell()))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        asked = Asked(request.path, headers, await request.json(), request.transport.get_extra_info("peername"))
        self.asked.append(asked)
        await self._tell()
        try:
            reply = self.script(asked)
            if not isinstance(reply, Reply):
                reply = await reply
        except asyncio.CancelledError:
            asked.outcome = "disconnected"
            raise
        asked.outcome = "answered"
        if reply.cut:
            asked.outcome = "cut"
            request.transport.abort()
            return web.Response()
        raw = reply.body if reply.body is not None else _answer(asked, reply)
        if reply.cut_inside:
            response = web.StreamResponse(headers={"Content-Length": str(len(raw))})
            await response.prepare(request)
            await response.write(raw[: len(raw) // 2])
            request.transport.close()
            return response
        return web.Response(status=reply.status, body=raw, headers=reply.headers, content_type="application/json")

    async def _control(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path == "/health":
            return web.Response(status=self.health())
        if path == "/v1/models":
            if isinstance(self.models, bytes):
                return web.Response(body=self.models, status=self.models_status)
            return web.json_response(self.models, status=self.models_status)
        if path == "/metrics" and self.metrics is not None:
            return web.Response(text=self.metrics())
        if path == "/server_info" and self.dev_mode:
            if self.before_server_info is not None:
                await self.before_server_info()
            return web.json_response(self.server_info)
        if self.weight_version is not None and path in WEIGHT_ROUTES:
            return await self._weights(request)
        if path == "/detokenize":
            return self.detokenize((await request.json())["tokens"])
        if (path == "/abort_requests" and self.dev_mode) or (path == "/inference/v1/abort_requests" and self.scale_out):
            ids = (await request.json())["request_ids"]
            if ids:
                self.aborts.append(ids)
            elif path == "/abort_requests":
                self.violations.append("an empty abort list aborts everything")
            return web.json_response({"aborted": len(ids)}, status=self.abort_status)
        return web.json_response({"detail": "Not Found"}, status=404)

    async def _weights(self, request: web.Request) -> web.StreamResponse:
        path = request.path_qs
        if path == "/weight_info":
            if self.silent:
                return web.json_response({"error": "warming up"}, status=503)
            return web.json_response({"weight_version": self.weight_version})
        body = await request.json() if request.can_read_body else None
        self.control.append((path, body))
        await self._tell()
        other = self.on_control(path, body)
        if other is not None:
            return other if isinstance(other, web.Response) else await other
        if path.startswith("/pause"):
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/update_weight_version":
            self.weight_version = body["new_version"]
        return web.json_response({"results": [None]})


def hold() -> tuple[Script, asyncio.Future[Reply]]:
    """A script that answers when the future gets its reply."""
    reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
    return lambda asked: asyncio.shield(reply), reply


def completion(asked_body: dict[str, Any], reply: Reply, *, chat: bool = False) -> dict[str, Any]:
    """The answer a vLLM server gives to `asked_body`."""
    logprobs = reply.logprobs if reply.logprobs is not None else [-0.5] * len(reply.ids)
    choice: dict[str, Any] = {"index": 0, "finish_reason": reply.finish_reason, "token_ids": reply.ids}
    usage = {"prompt_tokens": 3, "completion_tokens": len(reply.ids)}
    if chat:
        choice["message"] = {"role": "assistant", "content": _text(reply.ids), "tool_calls": []}
        choice["logprobs"] = {"content": [{"token": "t", "logprob": value, "top_logprobs": []} for value in logprobs]}
        prompt_ids = list("".join(m["content"] or "" for m in asked_body["messages"]).encode())
        return {"choices": [choice], "prompt_token_ids": prompt_ids, "usage": usage}
    prompt = asked_body["prompt"]
    choice |= {
        "text": _text(reply.ids),
        "prompt_token_ids": list(prompt.encode()) if isinstance(prompt, str) else prompt,
        "logprobs": {"tokens": ["t"] * len(logprobs), "token_logprobs": logprobs, "top_logprobs": None},
    }
    return {"choices": [choice], "usage": usage}


def _answer(asked: Asked, reply: Reply) -> bytes:
    if reply.status != 200:
        return json.dumps({"error": {"message": "scripted", "type": "x", "param": None}}).encode()
    answer = completion(asked.body, reply, chat=asked.path.endswith("/chat/completions"))
    reply.change(answer)
    return json.dumps(answer).encode()


def _text(ids: list[Any]) -> str:
    return bytes(i for i in ids if isinstance(i, int) and 0 <= i < 256).decode("utf-8", "replace")
