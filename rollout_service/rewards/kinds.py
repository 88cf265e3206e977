"""The kinds of reward: sync function, async function, webhook. Each turns a group into one `Outcome`.

Each keeps its own deadline. `evaluate` raises only the cancellation of its own caller; anything else it might raise is
a fault of this service and is caught by the scorer.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import httpx
import msgspec

from rollout_service.loading import LoadedFunction, clean
from rollout_service.rewards.fields import GroupFields, unpack
from rollout_service.rewards.outcome import (
    Outcome,
    outcome_of_error,
    outcome_of_values,
    timed_out,
)
from rollout_service.rewards.pool import WorkerPool
from rollout_service.rewards.wire import call_frame

CONNECT_RETRY_S = 0.1
"""Pause before the one further try when a webhook refuses the connection (it may be restarting)."""

MAX_ANSWER = 1 << 20
"""Bytes of a webhook's answer: a thousand numbers are 20 KB."""


class Reward(Protocol):
    """One reward, ready to score."""

    async def evaluate(self, group: GroupFields) -> Outcome: ...


class SyncFunction:
    """Runs in a worker process that is killed when its time is up."""

    def __init__(self, pool: WorkerPool, number: int, timeout_s: float) -> None:
        self._pool = pool
        self._number = number
        self._timeout_s = timeout_s

    async def evaluate(self, group: GroupFields) -> Outcome:
        return await self._pool.call(call_frame(self._number, group.packed()), self._timeout_s)


class AsyncFunction:
    """Awaited in this loop, as a task of its own: so its cancellations are told apart from its caller's."""

    def __init__(self, function: LoadedFunction, timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._running: set[asyncio.Task[Outcome]] = set()

    async def evaluate(self, group: GroupFields) -> Outcome:
        n, arguments = unpack(group.packed(), self._function.accepts)
        task = asyncio.get_running_loop().create_task(self._run(n, arguments))
        # User code may swallow a cancellation and go on: nobody waits for it then, but the loop needs a reference.
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            return timed_out(self._timeout_s)
        return task.result()

    async def _run(self, n: int, arguments: dict[str, Any]) -> Outcome:
        try:
            return outcome_of_values(await self._function.call(**arguments), n)
        except BaseException as error:
            # A SystemExit that left the task would end the loop. If it was a cancellation from `evaluate`, nobody
            # reads this outcome.
            return outcome_of_error(error)

    def stop(self) -> None:
        for task in self._running:
            task.cancel()


class _Answer(msgspec.Struct):
    rewards: list[float | bool | None]


class Webhook:
    """POSTs the fields as JSON; the answer is `{"rewards": [number or null, ...]}`, one a survivor."""

    def __init__(self, client: httpx.AsyncClient, url: str, timeout_s: float) -> None:
        self._client = client
        self._url = url
        self._timeout_s = timeout_s

    async def evaluate(self, group: GroupFields) -> Outcome:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._ask(group)
        except TimeoutError:
            return timed_out(self._timeout_s)
        except httpx.HTTPError as error:
            return Outcome(error=clean(f"the webhook could not be asked: {type(error).__name__}: {error}"))

    async def _ask(self, group: GroupFields) -> Outcome:
        body = group.json()
        try:
            status, answer = await self._post(body)
        except httpx.ConnectError:  # nothing was sent yet, so asking again cannot score twice
            await asyncio.sleep(CONNECT_RETRY_S)
            status, answer = await self._post(body)
        if status != httpx.codes.OK:
            return Outcome(error=clean(f"the webhook answered {status}: {answer[:200].decode('utf-8', 'replace')}"))
        if len(answer) > MAX_ANSWER:
            return Outcome(error=f"the webhook answered more than {MAX_ANSWER} bytes")
        try:
            rewards = msgspec.json.decode(answer, type=_Answer).rewards
        except msgspec.MsgspecError as error:  # NaN and Infinity are not JSON either
            return Outcome(error=clean(f'the webhook\'s answer is not {{"rewards": [number or null, ...]}}: {error}'))
        return outcome_of_values(rewards, group.n)

    async def _post(self, body: bytes) -> tuple[int, bytes]:
        headers = {
            "content-type": "application/json",
            "accept": "application/json",
            "accept-encoding": "identity",  # what is never unpacked cannot unpack to any size
        }
        async with self._client.stream("POST", self._url, content=body, headers=headers) as response:
            encoding = response.headers.get("content-encoding", "identity")
            if encoding.lower() != "identity":
                raise httpx.DecodingError(f"it answered in {encoding[:40]!a}, which was not asked for")
            answer = bytearray()
            async for part in response.aiter_raw():
                answer += part
                if len(answer) > MAX_ANSWER:
                    break
            return response.status_code, bytes(answer)
