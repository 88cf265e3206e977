"""A client of a simulated engine, for the simulator's tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp

from rollout_service.simulator import Simulator, SimulatorSettings

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
Answer = tuple[int, Any]


class Caller:
    """A simulator and a client of it."""

    def __init__(self, sim: Simulator, session: aiohttp.ClientSession) -> None:
        self.sim = sim
        self.session = session

    async def post(self, path: str, body: object = None, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(self.sim.url + path, json=body, headers=named) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def get(self, path: str, **headers: str) -> Answer:
        async with self.session.get(self.sim.url + path, headers=headers) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else text

    async def complete(self, request_id: str | None = None, **body: Any) -> dict[str, Any]:
        """A completion with ids and logprobs; its only choice."""
        asked = {"prompt": [72, 105], "return_token_ids": True, "logprobs": 0, "max_tokens": 32, **body}
        headers = {"X_Request_Id": request_id} if request_id else {}
        status, answer = await self.post(COMPLETIONS, asked, **headers)
        assert status == 200, answer
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    async def send(self, method: str, path: str, body: object = None) -> Answer:
        async with self.session.request(method, self.sim.url + path, json=body) as response:
            return response.status, await response.json(content_type=None)

    async def ask(self, prompt: str = "hello", *, request_id: str = "X", **body: Any) -> tuple[int, bytes]:
        """20 tokens for a prompt, as bytes."""
        asked = {"prompt": prompt, "return_token_ids": True, "logprobs": 0, "max_tokens": 20, "ignore_eos": True}
        async with self.session.post(
            self.sim.url + COMPLETIONS, json={**asked, **body}, headers={"X-Request-Id": request_id}
        ) as response:
            return response.status, await response.read()

    async def choice(self, prompt: str = "hello", **body: Any) -> dict[str, Any]:
        """The only choice of `ask`."""
        status, answer = await self.ask(prompt, **body)
        assert status == 200
        first: dict[str, Any] = json.loads(answer)["choices"][0]
        return first

    async def running(self, requests: int) -> None:
        await self.sim.until(lambda sim: sim.engine.running == requests)

    async def metric(self, name: str) -> float:
        _, page = await self.get("/metrics")
        lines = [line for line in page.splitlines() if line.startswith(f"vllm:{name}{{")]
        return float(lines[0].split()[-1])


Start = Callable[..., Awaitable[Caller]]


@asynccontextmanager
async def simulators(**defaults: Any) -> AsyncIterator[Start]:
    """Gives a function that starts a simulator with the given settings; all of them end with the context."""
    async with AsyncExitStack() as stack:

        async def start(**fields: Any) -> Caller:
            sim = await stack.enter_async_context(Simulator(SimulatorSettings(**{**defaults, **fields})))
            connector = aiohttp.TCPConnector(limit=0)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            return Caller(sim, session)

        yield start


def soon(work: Awaitable[Any]) -> asyncio.Future[Any]:
    """Starts it and goes on."""
    return asyncio.ensure_future(work)
