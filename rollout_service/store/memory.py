"""A store that keeps values and loses them with the process: for tests, simulations and dry runs.

What always holds: it refuses what the SQLite store refuses, before anything of the batch was applied; a commit that
failed changed nothing, and further ones are refused until `load`. Every call suspends once, as a real store does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Self

from rollout_service.core.group import Group, Lease
from rollout_service.core.model import GroupState, Prompt
from rollout_service.core.records import Batch, GroupPayload, Snapshot, StoredPrompt
from rollout_service.errors import StoreUnavailable
from rollout_service.store.memory_content import Content
from rollout_service.store.rules import refusal
from rollout_service.store.standing import ordered


class MemoryStore:
    """A `Store` without a medium.

    `fail_commits`, where set, is why every commit fails (as a full disk would make it). `commits` counts those that
    took effect. `reopened` is what a process finds that starts after this one was killed.
    """

    def __init__(self, max_staleness: int) -> None:
        self.fail_commits: Exception | None = None
        self.commits = 0
        self._max_staleness = max_staleness
        self._committed = Content()
        self._opened = False
        self._failure: str | None = None

    @classmethod
    def reopened(cls, other: Self) -> Self:
        """A store that is not open yet and holds what `other` has committed; from here on the two are apart."""
        store = cls(other._max_staleness)
        store._committed = other._content.copy()
        return store

    async def open(self) -> None:
        if self._opened:
            raise RuntimeError("the store is open")
        self._opened = True

    async def close(self) -> None:
        self._opened = False

    async def load(self) -> Snapshot:
        self._check_open()
        loaded = self._content.snapshot()
        self._failure = None
        await asyncio.sleep(0)
        return loaded

    async def commit(self, batch: Batch) -> None:
        self._commit(batch)
        await asyncio.sleep(0)

    async def find_prompts(self, keys: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], StoredPrompt]:
        self._check_open()
        found = {key: self._content.known[key] for key in keys if key in self._content.known}
        await asyncio.sleep(0)
        return found

    async def groups(self, seqs: Collection[int]) -> Mapping[int, Group]:
        self._check_open()
        found = {seq: self._content.read(self._content.groups[seq]) for seq in seqs if seq in self._content.groups}
        await asyncio.sleep(0)
        return found

    async def payloads(self, seqs: Sequence[int]) -> Sequence[GroupPayload]:
        self._check_open()
        content = self._content
        found = [content.payload(content.groups[seq]) for seq in seqs if seq in content.groups]
        await asyncio.sleep(0)
        return found

    async def prompts(self, seqs: Sequence[int]) -> Mapping[int, Prompt]:
        self._check_open()
        found = {seq: self._content.prompts[seq] for seq in seqs if seq in self._content.prompts}
        await asyncio.sleep(0)
        return found

    async def list_groups(self, states: Collection[GroupState], *, after: int, limit: int) -> Sequence[Group]:
        self._check_open()
        wanted = ordered(states)
        seqs = sorted(seq for seq, group in self._content.groups.items() if seq > after and group.state in wanted)
        found = [self._content.read(self._content.groups[seq]) for seq in seqs[:limit]]
        await asyncio.sleep(0)
        return found

    async def lease(self, lease_id: str) -> Lease | None:
        self._check_open()
        found = self._content.leases.get(lease_id)
        await asyncio.sleep(0)
        return found

    async def lease_by_request(self, request_id: str) -> Lease | None:
        self._check_open()
        found = self._content.lease_by_request(request_id)
        await asyncio.sleep(0)
        return found

    async def ended_since(self, ends: int) -> Sequence[int]:
        self._check_open()
        found = self._content.ended_since(ends)
        await asyncio.sleep(0)
        return found

    @property
    def _content(self) -> Content:
        return self._committed

    def _check_open(self) -> None:
        if not self._opened:
            raise StoreUnavailable("the store is not open")

    def _commit(self, batch: Batch) -> None:
        self._check_open()
        if self._failure is not None:
            raise StoreUnavailable(f"{self._failure}; nothing is committed until the store was loaded again")
        if self.fail_commits is not None:
            self._failure = f"cannot commit: {self.fail_commits}"
            raise StoreUnavailable(self._failure) from self.fail_commits
        refused = refusal(batch, before=self._content, max_staleness=self._max_staleness)
        if refused is not None:
            self._failure = f"the store refused a batch: {refused}"
            raise StoreUnavailable(self._failure)
        self._apply(batch)
        self.commits += 1

    def _apply(self, batch: Batch) -> None:
        self._content.apply(batch)
