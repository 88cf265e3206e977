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
            await asyncio.wait_for(waiting, 15)
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


async def test_what_leaves_first_leaves_before_the_rest_and_committed_waits_for_all_of_it() -> None:
    store = Store()
    store.go.set()
    committer = committer_of(store)
    ran: list[str] = []
    committer.batch.run = RunState()
    committer.after_commit(lambda: ran.append("rest"))
    committer.after_commit_first(lambda: ran.append("first"))
    committer.flush()
    while not ran:
        await asyncio.sleep(0)
    assert ran == ["first"], "the rest waits a moment"
    await asyncio.wait_for(committer.committed(), 5)  # called in that moment
    assert ran == ["first", "rest"]
    await committer.stop()


async def test_a_stop_in_that_moment_still_has_the_rest_leave_for_it_is_committed() -> None:
    store = Store()
    store.go.set()
    committer = committer_of(store)
    ran: list[str] = []
    committer.batch.run = RunState()
    committer.after_commit(lambda: ran.append("rest"), lambda error: ran.append("lost"))
    committer.after_commit_first(lambda: ran.append("first"))
    committer.flush()
    while not ran:
        await asyncio.sleep(0)
    await committer.stop(StoreUnavailable("unreadable"))
    assert ran == ["first", "rest"]


async def test_commits_gather_while_nobody_waits_and_go_at_once_when_somebody_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout_service.orchestrator.committer.GATHER_S", 3600.0)
    store = Store()
    store.go.set()
    committer = committer_of(store)
    ran: list[int] = []
    for number in range(3):
        committer.batch.run = RunState()
        committer.after_commit(lambda number=number: ran.append(number))
        committer.flush()
        for _ in range(10):  # passes of the loop, which is all a commit of this store takes
            await asyncio.sleep(0)
    assert ran == [0], "the first goes at once, the others gather"
    await asyncio.wait_for(committer.committed(), 5)
    assert ran == [0, 1, 2]
    await committer.stop()
