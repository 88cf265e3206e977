"""A small scripted teacher on a real socket, in the test's own event loop.

By default it gives token x, wherever it stands, the logprob `OWN`, and the `top_k` tokens after it `LIKELY - i` each.
`script` decides what a scoring request gets instead; everything that arrives is kept in `asked`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.listening import end

MODEL = "big"
OWN = -7.5
LIKELY = -0.25


@dataclass
class Said:
    """One answer. `body` None: what the teacher finds of the prompt, changed by `change` before it is sent."""

    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    change: Callable[[dict[str, Any]], Any] = lambda answer: None
    cut: bool = False
    """Close the TCP connection without a byte."""


def refused(status: int, message: str = "scripted refusal", param: str | None = None, **headers: str) -> Said:
    body = {"error": {"message": message, "type": "BadRequestError", "param": param, "code": status}}
    return Said(status=status, body=json.dumps(body).encode(), headers=headers)


def found(token: int, top_k: int) -> dict[str, Any]:
    """What the teacher finds of a position where `token` stands."""
    own = {str(token): {"logprob": OWN, "rank": top_k + 1, "decoded_token": '"},{'}}
    likely = {
        str(token + 1 + i): {"logprob": LIKELY - i, "rank": i + 1, "decoded_token": "\ufffd"} for i in range(top_k)
    }
    return own | likely


Script = Callable[[Mapping[str, Any]], "Said | Awaitable[Said]"]


class ScriptedTeacher:
    """Used as `async with ScriptedTeacher() as teacher`; `stop` and `start` keep the port."""

    def __init__(self) -> None:
        self.script: Script = lambda body: Said()
        self.models: Any = {"data": [{"id": MODEL, "max_model_len": 4096}]}
        self.models_status = 200
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.in_flight = self.most_in_flight = self.left = 0
        """`left`: requests whose caller closed the connection before the answer."""
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> ScriptedTeacher:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Die: every connection is cut."""
        runner, self._runner = self._runner, None
        if runner is not None:
            for connection in list(runner.server.connections if runner.server else ()):
                if connection.transport is not None:
                    connection.transport.abort()
            await end(runner)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(self.models, status=self.models_status)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.asked.append(body)
        self.headers.append(request.headers)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            said = self.script(body)
            if isinstance(said, Awaitable):
                said = await said
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.in_flight -= 1
        if said.cut:
            assert request.transport is not None
            request.transport.abort()
        return web.Response(body=_body(body, said), status=said.status, headers=said.headers)


def _body(asked: Mapping[str, Any], said: Said) -> bytes:
    if said.body is not None:
        return said.body
    rows = [None, *(found(token, asked["prompt_logprobs"]) for token in asked["prompt"][1:])]
    answer = {"choices": [{"index": 0, "text": "x", "finish_reason": "length", "prompt_logprobs": rows}]}
    said.change(answer)
    return json.dumps(answer).encode()
