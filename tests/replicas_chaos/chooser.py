"""The trainer of a replicated run: takes the replicas in turn, and another one where the last did not answer.

What always holds: a call is repeated at whichever replica is next until one answers it; what a replica tells about the
whole run may be a moment old, but comes true within `OLD_S`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
import msgspec

from tests.durability.history import History, Json
from tests.durability.trainer import AGAIN, LOST_PAUSE_S, Habits, Lost, Trainer
from tests.service import trained_ids

CALL_S = 5.0
"""Longer than any lease is waited for; a replica that stands still is not waited for longer, unless said
otherwise."""
SHUNNED_S = 0.5
"""A replica that did not answer is not asked again so soon, if there is another."""
OLD_S = 20.0
MARKS = 0.3
"""Share of bumps after which a checkpoint is made, unless said otherwise."""
KEPT_MARKS = 2


@dataclass(kw_only=True)
class SharedHistory(History):
    """Keeps what was delivered, too."""

    tokens: dict[tuple[str, int], dict[int, list[int]]] = field(default_factory=dict)
    """(group, attempt) -> row -> ids the engine sampled."""

    def leased(self, lease: Json, lease_s: int, version_when_asked: int) -> None:
        super().leased(lease, lease_s, version_when_asked)
        for group in lease["groups"]:
            rows = {sample["index"]: trained_ids(sample) for sample in group["samples"]}
            self.tokens.setdefault((group["group_id"], group["attempt"]), rows)


class Chooser(Trainer):
    history: SharedHistory

    def __init__(self, urls: Sequence[str], rng: random.Random, history: SharedHistory, habits: Habits) -> None:
        super().__init__("", rng, history, habits)
        self._urls = list(urls)
        self._shunned = dict.fromkeys(urls, 0.0)
        self._turn = 0
        self.marks: list[str] = []
        self.mark_share = MARKS
        self.call_s = CALL_S
        self.refused = 0
        """Calls that were answered with a refusal for now."""
        self.lost = 0
        """Calls that were not answered."""
        self.in_a_row = 0
        """Longest row of both that one task of the trainer has met: what retries had to cure."""
        self._rows: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()

    async def __aenter__(self) -> Chooser:
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    def _next(self) -> str:
        now = time.monotonic()
        for _ in self._urls:
            self._turn += 1
            url = self._urls[self._turn % len(self._urls)]
            if self._shunned[url] <= now:
                return url
        return url

    async def once(self, method: str, path: str, body: Any = None) -> tuple[int, Json]:
        url = self._next()
        data = None if body is None else msgspec.json.encode(body)
        headers = {"content-type": "application/json"} if data is not None else {}
        try:
            async with self._http.request(
                method, f"{url}{path}", data=data, headers=headers, timeout=aiohttp.ClientTimeout(total=self.call_s)
            ) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.lost += 1
            self._failed(url)
            raise Lost from error
        if response.status in AGAIN:
            self.refused += 1
            self._failed(url)
        else:
            self._rows.pop(_this_task(), None)
        return response.status, msgspec.json.decode(raw) if raw else {}

    def _failed(self, url: str) -> None:
        self._shunned[url] = time.monotonic() + SHUNNED_S
        task = _this_task()
        self._rows[task] = self._rows.get(task, 0) + 1
        self.in_a_row = max(self.in_a_row, self._rows[task])

    async def look(self) -> Json:
        known, deadline = self.history.known(), time.monotonic() + OLD_S
        while True:
            status = await self.get("/status")
            try:
                self.history.looked(known, status)
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(LOST_PAUSE_S)
            else:
                self.history.listed(await self.groups())
                return status

    async def bump(self, version: int) -> None:
        await super().bump(version)
        if self._rng.random() < self.mark_share:
            await self._mark(f"at-{version}")

    async def _mark(self, name: str) -> None:
        status, answer = await self.insist("POST", "/checkpoints", {"name": name})
        # 409: an answer was lost, and groups have ended since the point was made.
        assert status in (200, 201, 409), answer
        self.marks.append(name)
        if len(self.marks) > KEPT_MARKS:
            status, answer = await self.insist("DELETE", f"/checkpoints/{self.marks.pop(0)}")
            assert status in (200, 204, 404), answer
        names = [mark["name"] for mark in (await self.get("/checkpoints"))["checkpoints"]]
        assert set(self.marks) <= set(names), f"{self.marks} were made, there are {names}"


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task
