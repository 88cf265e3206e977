"""Whoever waits for a commit hears how it ended, whatever ends the committer."""

from __future__ import annotations

import asyncio

import pytest

from rollout_service.core.records import Batch, RunState
from rollout_service.errors import StoreUnavailable
from rollout_service.orchestrator.committer import Committer


class Store:
    """Commits when `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked = asyncio.Event()

    async def commit(self, batch: Batch) -> None:
        self.asked.set()
        await self.go.wait()


def committer_of(store: Store) -> Committer:
    committer = Committer(store, on_failure=lambda error: None, on_commit=lambda seconds: None)
    committer.start()
    return committer


async def test_a_stop_tells_those_whose_commit_is_under_way_and_those_behind_it() -> None:
    store = Store()
    committer = committer_of(store)
    committer.batch.run = RunState()
    under_way = asyncio.create_task(committer.committed())
    await store.asked.wait()
    committer.batch.run = RunState()
    behind = asyncio.create_task(committer.committed())
    await asyncio.sleep(0)
    await committer.stop(StoreUnavailable("unreadable"))
    for waiting in (under_way, behind):
        with pytest.raises(StoreUnavailable, match="unreadable"):
            await asyncio.wait_for(waiting, 1)
    with pytest.raises(StoreUnavailable, match="unreadable"):
        await committer.committed()


async def test_after_a_stop_it_can_start_again_with_nothing_left_of_before() -> None:
    store = Store()
    committer = committer_of(store)
    ran: list[str] = []
    committer.after_commit(lambda: ran.append("before"), lambda error: ran.append(f"lost: {error}"))
    await committer.stop(StoreUnavailable("unreadable"))
    store.go.set()
    committer.start()
    committer.batch.run = RunState()
    await asyncio.wait_for(committer.committed(), 1)
    assert ran == ["lost: unreadable"]
    await committer.stop()
