"""Replicas in the store they share: joining, heartbeats, expulsion; what they tell each other.

Each test is one sentence of store/shared.py. Transactions of different replicas run at the same time where a store lets
them and one after the other where it does not; no test depends on which.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from rollout_service.core.records import Batch
from rollout_service.errors import ConfigError, StoreUnavailable
from rollout_service.store.shared import SharedStore, Signal, Transaction
from tests.contract.shared_stores import WAIT_S, Handles, Undo, ask, assert_counted, claimable, replica, write
from tests.contract.store_samples import generating, submitted


async def test_a_replica_that_joined_is_seen_with_what_it_says_of_itself(
    store: SharedStore, other: SharedStore
) -> None:
    first, second = replica("a", slots=8, prompts="f1"), replica("b")
    await store.join(first, lease_s=60)
    await other.join(second, lease_s=30)
    await write(store, submitted(1, 2))
    await write(store, Batch(groups={1: generating(1), 2: generating(2)}), owner="a")
    seen = await other.overview()
    assert [(each.replica, each.claims) for each in seen.replicas] == [(first, 2), (second, 0)]
    for each, lease_s in zip(seen.replicas, (60, 30), strict=True):
        assert each.started_at == each.seen_at <= seen.now
        assert each.expires_at == pytest.approx(each.seen_at + lease_s)
    said = replace(
        first, in_flight=3, engines=2, healthy_engines=1, enforced=5, stale_groups=6, aborted_rollouts=7, slots=9
    )
    assert await store.beat(said, lease_s=90)
    later = (await other.overview()).replicas[0]
    assert later.replica == said
    assert later.started_at == seen.replicas[0].started_at
    assert later.seen_at >= seen.replicas[0].seen_at
    assert later.expires_at == pytest.approx(later.seen_at + 90)


async def test_a_replica_with_other_rules_than_a_living_one_is_refused(store: SharedStore, other: SharedStore) -> None:
    await store.join(replica("a"), lease_s=60)
    with pytest.raises(ConfigError) as refused:
        await other.join(replica("b", rules="r2"), lease_s=60)
    assert "replica host-a has other rules" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert [each.replica.replica_id for each in (await store.overview()).replicas] == ["a"]
    await store.leave("a")
    await other.join(replica("b", rules="r2"), lease_s=60)


async def test_a_replica_with_another_prompts_file_than_a_living_one_is_refused(
    store: SharedStore, other: SharedStore
) -> None:
    await store.join(replica("a", prompts="f1"), lease_s=60)
    with pytest.raises(ConfigError):
        await other.join(replica("b", prompts="f2"), lease_s=60)
    await other.join(replica("c"), lease_s=60)  # reads no file
    await other.join(replica("d", prompts="f1"), lease_s=60)


async def test_a_replica_whose_time_is_over_refuses_nobody(store: SharedStore, other: SharedStore) -> None:
    await store.join(replica("a", prompts="f1"), lease_s=0)
    await other.join(replica("b", rules="r2", prompts="f2"), lease_s=60)


async def test_replicas_with_different_rules_that_join_at_the_same_time_do_not_both_get_in(handles: Handles) -> None:
    stores = [await handles() for _ in range(4)]
    joined = await asyncio.gather(
        *(store.join(replica(f"r{n}", rules=f"rules-{n}"), lease_s=60) for n, store in enumerate(stores)),
        return_exceptions=True,
    )
    assert sorted(type(each).__name__ for each in joined) == ["ConfigError"] * 3 + ["NoneType"]


async def test_expelling_takes_the_claims_of_those_whose_time_is_over(store: SharedStore, other: SharedStore) -> None:
    await store.join(replica("a"), lease_s=0)
    await other.join(replica("b"), lease_s=60)
    await write(store, submitted(1, 2, 3))
    await write(store, Batch(groups={1: generating(1), 2: generating(2)}), owner="a")
    await write(other, Batch(groups={3: generating(3)}), owner="b")
    before = await other.overview()
    assert list(await other.expel()) == ["host-a"]
    after = await other.overview()
    assert (after.run.taken, after.run.revision) == (before.run.taken + 1, before.run.revision + 1)
    assert [each.replica.replica_id for each in after.replicas] == ["b"]
    assert await ask(other, lambda transaction: transaction.claims([1, 2, 3])) == {
        1: (None, 1),
        2: (None, 1),
        3: ("b", 1),
    }
    assert await claimable(other, 9) == [1, 2]
    assert not await store.beat(replica("a"), lease_s=60)
    assert await write(other, Batch(groups={1: generating(1)}), owner="b") == {
        1: 2
    }  # the late one is told by its claim
    await assert_counted(store)


async def test_nobody_is_expelled_in_time_and_a_heartbeat_gives_time(store: SharedStore, other: SharedStore) -> None:
    await store.join(replica("a"), lease_s=0)
    assert await store.beat(replica("a"), lease_s=60)  # late, but nobody has expelled it yet
    before = (await store.overview()).run
    assert list(await other.expel()) == []
    assert (await store.overview()).run == before
    assert await store.beat(replica("a"), lease_s=60)


async def test_replicas_that_expel_at_the_same_time_expel_once(handles: Handles) -> None:
    stores = [await handles() for _ in range(3)]
    await stores[0].join(replica("a"), lease_s=0)
    await write(stores[0], submitted(1))
    await write(stores[0], Batch(groups={1: generating(1)}), owner="a")
    names = [name for each in await asyncio.gather(*(store.expel() for store in stores)) for name in each]
    assert names == ["host-a"]
    assert (await stores[0].overview()).run.taken == 1


async def test_claims_of_a_replica_that_is_known_no_more_are_taken_too(store: SharedStore, other: SharedStore) -> None:
    await other.join(replica("b"), lease_s=60)
    await write(store, submitted(1, 2))
    await write(store, Batch(groups={1: generating(1)}), owner="a")  # it was expelled while it claimed
    await write(other, Batch(groups={2: generating(2)}), owner="b")
    assert list(await other.expel()) == []
    assert (await other.overview()).run.taken == 1
    assert await ask(other, lambda transaction: transaction.claims([1, 2])) == {1: (None, 1), 2: ("b", 1)}


async def test_a_replica_that_leaves_gives_its_claims_back(store: SharedStore, other: SharedStore) -> None:
    await store.join(replica("a"), lease_s=60)
    await write(store, submitted(1))
    await write(store, Batch(groups={1: generating(1)}), owner="a")
    await store.leave("a")
    assert (await other.overview()).replicas == ()
    assert await ask(other, lambda transaction: transaction.claims([1])) == {1: (None, 1)}
    assert await claimable(other, 9, pending=False) == [1]
    assert not await store.beat(replica("a"), lease_s=60)
    await store.leave("a")  # again: nothing


class Heard:
    """The signals a store's watcher was told."""

    def __init__(self, store: SharedStore) -> None:
        self.signals: list[Signal] = []
        self._more = asyncio.Event()
        store.watch(self._hear)

    def _hear(self, signal: Signal) -> None:
        self.signals.append(signal)
        self._more.set()

    async def until(self, *signals: Signal) -> None:
        async with asyncio.timeout(WAIT_S):
            while not set(signals) <= set(self.signals):
                self._more.clear()
                await self._more.wait()


def signalling(*signals: Signal, undo: bool = False) -> Callable[[Transaction], Awaitable[None]]:
    async def work(transaction: Transaction) -> None:
        for signal in signals:
            transaction.signal(signal)
        if undo:
            raise Undo

    return work


async def test_signals_reach_every_replica_this_one_included(store: SharedStore, other: SharedStore) -> None:
    assert store.pushes
    assert other.pushes
    here, there = Heard(store), Heard(other)
    await store.transact(signalling(*Signal))
    await here.until(*Signal)
    await there.until(*Signal)


async def test_signals_of_a_transaction_that_was_undone_are_never_heard(store: SharedStore, other: SharedStore) -> None:
    here, there = Heard(store), Heard(other)
    with pytest.raises(Undo):
        await store.transact(signalling(Signal.ENFORCED, Signal.PENDING, undo=True))
    await store.transact(signalling(Signal.RUN, Signal.READY))
    for heard in (here, there):
        await heard.until(Signal.RUN, Signal.READY)
        assert set(heard.signals) == {Signal.RUN, Signal.READY}


async def test_what_was_signalled_is_there_for_whoever_hears_it(store: SharedStore, other: SharedStore) -> None:
    heard = Heard(other)

    async def work(transaction: Transaction) -> None:
        await transaction.write(submitted(1))
        transaction.signal(Signal.PENDING)

    await store.transact(work)
    await heard.until(Signal.PENDING)
    assert await claimable(other, 9) == [1]


async def test_a_heartbeat_carries_its_signal(store: SharedStore, other: SharedStore) -> None:
    await store.join(replica("a"), lease_s=60)
    heard = Heard(other)
    assert await store.beat(replica("a", enforced=4), lease_s=60, signal=Signal.ENFORCED)
    await heard.until(Signal.ENFORCED)
    assert (await other.overview()).replicas[0].replica.enforced == 4


async def test_a_store_that_is_closed_hears_nothing_and_does_nothing(store: SharedStore, other: SharedStore) -> None:
    heard, witness = Heard(other), Heard(store)
    await other.close()
    await store.transact(signalling(Signal.RUN))
    await witness.until(Signal.RUN)
    assert heard.signals == []
    with pytest.raises(StoreUnavailable):
        await other.transact(signalling())
    with pytest.raises(StoreUnavailable):
        await other.overview()
