"""A trainer that uses everything the interface has, never trusts that an answer comes, and writes down what it saw.

What always holds: a call whose answer was lost is repeated until there is one, wherever repeating is what a careful
trainer does; whatever is not understood is an error. All choices are drawn from one seed.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from tests.durability.history import History, Json

LOST_PAUSE_S = 0.02
"""Between two tries while the service is not there."""
CALL_S = 30.0
SHORT_LEASE_S = 1
"""For a consumer that dies with its lease: the shortest there is."""


AGAIN = (408, 429, 503)
"""Refusals for now."""


class Lost(Exception):
    """No answer came; whether the call was carried out is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Habits:
    """What the trainer does, as shares of its chances."""

    hold_s: float = 0.3
    """Longest time a lease is held."""
    lease_s: int = 4
    """What is asked for: short, for a lease whose answer was lost must not hold up the end for long."""
    dies: float = 0.1
    releases: float = 0.15
    acks_in_parts: float = 0.2
    asks_again: float = 0.1
    """For the lease it holds."""
    names_requests: float = 0.7
    bumps: float = 0.4
    pauses: float = 0.15
    steer_s: float = 0.3
    """Longest time between two bumps or pauses."""
    max_groups: int = 3


class Trainer:
    """Speaks to the service at `url`, which comes and goes."""

    def __init__(self, url: str, rng: random.Random, history: History, habits: Habits) -> None:
        self.history, self.habits = history, habits
        self.over = asyncio.Event()
        """Set once the service says `exhausted`."""
        self.steering = True
        self._url, self._rng = url, rng
        self._requests = iter(range(10**9))

    async def __aenter__(self) -> Trainer:
        self._http = aiohttp.ClientSession(
            self._url, timeout=aiohttp.ClientTimeout(total=CALL_S), connector=aiohttp.TCPConnector(limit=0)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    # calls

    async def once(self, method: str, path: str, body: Any = None) -> tuple[int, Json]:
        """One try. Raises Lost."""
        data = None if body is None else msgspec.json.encode(body)
        headers = {"content-type": "application/json"} if data is not None else {}
        try:
            async with self._http.request(method, path, data=data, headers=headers) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Lost from error
        return response.status, msgspec.json.decode(raw)

    async def insist(self, method: str, path: str, body: Any = None) -> tuple[int, Json]:
        """Until there is an answer that is no refusal for now."""
        while True:
            try:
                status, answer = await self.once(method, path, body)
            except Lost:
                await asyncio.sleep(LOST_PAUSE_S)
                continue
            if status not in AGAIN:
                return status, answer
            await asyncio.sleep(LOST_PAUSE_S)

    async def get(self, path: str) -> Json:
        status, answer = await self.insist("GET", path)
        assert status == 200, answer
        return answer

    async def groups(self) -> list[Json]:
        """All of them."""
        groups: list[Json] = []
        while True:
            after = f"&after={groups[-1]['group_id']}" if groups else ""
            page = (await self.get(f"/groups?limit=1000{after}"))["groups"]
            groups += page
            if len(page) < 1000:
                return groups

    async def look(self) -> Json:
        """Check what the service says of itself."""
        known = self.history.known()
        status = await self.get("/status")
        self.history.looked(known, status)
        self.history.listed(await self.groups())
        return status

    # what a trainer does

    async def submit(self, names: list[str], *, final: bool = False) -> None:
        rows = [{"prompt_id": name, "prompt": f"p:{name};", "columns": {"name": name}} for name in names]
        status, answer = await self.insist("POST", "/prompts", {"prompts": rows, "final": final})
        assert status == 202, answer
        self.history.submitted(answer)

    async def consume(self, consumer: str) -> None:
        """Lease, train, ack until nothing more can come."""
        while not self.over.is_set():
            dies = self._rng.random() < self.habits.dies
            lease_s = SHORT_LEASE_S if dies else self.habits.lease_s
            ask: Json = {"max_groups": self._rng.randint(1, self.habits.max_groups), "wait_s": 1, "lease_s": lease_s}
            ask["consumer"] = consumer
            if self._rng.random() < self.habits.names_requests:
                ask["request_id"] = f"{consumer}-{next(self._requests)}"
            lease = await self._lease(ask)
            if lease is not None and not dies:
                await self._train(lease, ask)

    async def _lease(self, ask: Json) -> Json | None:
        """None where there is none to work on."""
        version = self.history.version  # when first asked: the lease may be as old as that
        while True:
            try:
                status, answer = await self.once("POST", "/leases", ask)
            except Lost:
                await asyncio.sleep(LOST_PAUSE_S)
                if "request_id" in ask:
                    continue
                return None  # whatever was leased comes back when its caller is missed, or when it expires
            if status in AGAIN:
                await asyncio.sleep(LOST_PAUSE_S)
                continue
            if status == 409:  # it was made, its answer was lost, and it has ended since
                return None
            assert status == 200, answer
            if answer["status"] == "exhausted":
                self.over.set()
            if answer["status"] != "ok":
                return None
            self.history.leased(answer, ask["lease_s"], version)
            return answer

    async def _train(self, lease: Json, ask: Json) -> None:
        rng, habits = self._rng, self.habits
        names = [group["group_id"] for group in lease["groups"]]
        await asyncio.sleep(rng.uniform(0.0, habits.hold_s))
        if "request_id" in ask and rng.random() < habits.asks_again:
            await self._lease(ask)
        if rng.random() < habits.releases:
            back = rng.sample(names, 1)
            status, answer = await self.insist("POST", f"/leases/{lease['lease_id']}/release", {"group_ids": back})
            assert status == 200, answer
            names = [name for name in names if name not in back]
        parts = [names]
        if len(names) > 1 and rng.random() < habits.acks_in_parts:
            parts = [names[:1], names[1:]]
        for part in parts:
            if part:
                await self._ack(lease["lease_id"], part)

    async def _ack(self, lease_id: str, names: list[str]) -> None:
        self.history.acking(names)
        status, answer = await self.insist("POST", f"/leases/{lease_id}/ack", {"group_ids": names})
        if status == 200:
            self.history.confirmed(lease_id, answer["acked"])
            assert sorted(answer["acked"]) == sorted(names)
        else:  # the lease ended meanwhile, and somebody else has the groups or they are too old
            assert status == 409, answer

    async def steer(self) -> None:
        """Bump the version, pause and resume, while `steering`."""
        rng, habits, history = self._rng, self.habits, self.history
        while self.steering:
            await asyncio.sleep(rng.uniform(habits.steer_s / 3, habits.steer_s))
            if rng.random() < habits.bumps:
                await self.bump(history.version + rng.choice((1, 1, 2)))
            if rng.random() < habits.pauses:
                await self._pause(True)
                await asyncio.sleep(rng.uniform(0.0, habits.steer_s))
                await self._pause(False)

    async def bump(self, version: int) -> None:
        known = self.history.version
        status, answer = await self.insist("POST", "/policy_version", {"version": version})
        assert status == 200, answer
        self.history.versioned(answer["version"], max(known, version))

    async def _pause(self, paused: bool) -> None:
        self.history.paused = None
        self.history.pauses += 1
        status, answer = await self.insist("POST", "/pause" if paused else "/resume")
        assert status == 200, answer
        self.history.paused = paused
