"""What only shared memory has: a store that is down, a replica that is cut off, answers that get lost."""

from __future__ import annotations

import asyncio

import pytest

from rollout_service.core.records import Batch
from rollout_service.core.shared import Replica
from rollout_service.errors import StoreUnavailable
from rollout_service.store.shared import SharedStore, Signal, Transaction
from rollout_service.store.shared_memory import SharedMemory, SharedMemoryStore
from tests.contract.store_samples import MAX_STALENESS, at_once, dropped, lease, leased, pending, scored, submitted

A = Replica(replica_id="a", name="host-a", service="1.0", rules="r")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory(clock: Clock) -> SharedMemory:
    return SharedMemory(MAX_STALENESS, clock)


async def opened(memory: SharedMemory) -> SharedMemoryStore:
    store = memory.store()
    await store.open()
    return store


async def submit(transaction: Transaction) -> None:
    await transaction.write(submitted(1))
    transaction.signal(Signal.PENDING)


async def assert_out_of_reach(store: SharedStore) -> None:
    for call in (
        store.load(),
        store.commit(Batch()),
        store.transact(submit),
        store.try_exclusively("prompts", at_once, lambda _, tx: submit(tx)),
        store.overview(),
        store.join(A, lease_s=1),
        store.beat(A, lease_s=1),
        store.expel(),
        store.leave("a"),
        store.groups([1]),
    ):
        with pytest.raises(StoreUnavailable):
            await call
    assert not store.pushes


async def test_a_store_that_is_down_fails_every_call_of_every_handle_and_comes_back(memory: SharedMemory) -> None:
    first, second = await opened(memory), await opened(memory)
    memory.broken = "no space left on device"
    for store in (first, second):
        await assert_out_of_reach(store)
    memory.broken = None
    await first.transact(submit)
    assert await second.groups([1]) == {1: pending(1)}


async def test_a_handle_that_is_cut_off_fails_alone_and_hears_nothing(memory: SharedMemory) -> None:
    first, second = await opened(memory), await opened(memory)
    heard: list[Signal] = []
    first.watch(heard.append)
    first.cut = True
    await assert_out_of_reach(first)
    await second.transact(submit)
    await asyncio.sleep(0)
    assert heard == []
    first.cut = False
    assert await first.groups([1]) == {1: pending(1)}


async def test_a_transaction_that_is_cut_off_comes_to_nothing(memory: SharedMemory) -> None:
    first, second = await opened(memory), await opened(memory)

    async def work(transaction: Transaction) -> None:
        await transaction.write(submitted(1))
        first.cut = True

    with pytest.raises(StoreUnavailable):
        await first.transact(work)
    assert await second.groups([1]) == {}


async def test_a_lost_answer_is_of_a_transaction_that_took_effect(memory: SharedMemory) -> None:
    first, second = await opened(memory), await opened(memory)
    heard: list[Signal] = []
    second.watch(heard.append)
    first.lost_answers = 1
    with pytest.raises(StoreUnavailable, match="may have taken effect"):
        await first.transact(submit)
    await asyncio.sleep(0)
    assert heard == [Signal.PENDING]
    assert await second.groups([1]) == {1: pending(1)}
    await first.overview()


async def test_without_pushes_only_ones_own_signals_are_heard(memory: SharedMemory) -> None:
    first, second = await opened(memory), await opened(memory)
    heard: list[Signal] = []
    first.watch(heard.append)
    first.pushes = False
    await second.transact(submit)
    await asyncio.sleep(0)
    assert (heard, first.pushes) == ([], False)
    await first.expel()

    async def tell(transaction: Transaction) -> None:
        transaction.signal(Signal.RUN)
        transaction.signal(Signal.RUN)

    await first.transact(tell)
    await asyncio.sleep(0)
    assert heard == [Signal.RUN]


async def test_times_are_those_of_the_clock(memory: SharedMemory, clock: Clock) -> None:
    store = await opened(memory)
    await store.join(A, lease_s=10)
    await store.transact(lambda transaction: transaction.write(scored(1)))
    held = Batch(groups={1: leased(1, "l")}, leases={"l": lease("l", 1, expires_at=1009.0)})
    await store.transact(lambda transaction: transaction.write(held))
    clock.now = 1008.9
    assert await store.expel() == []
    assert await store.transact(lambda transaction: transaction.leases_due(9)) == []
    clock.now = 1010.0  # at that moment it is over
    assert [due.lease_id for due in await store.transact(lambda transaction: transaction.leases_due(9))] == ["l"]
    assert await store.expel() == ["host-a"]


async def test_a_transaction_is_used_inside_only_and_the_run_is_held_before_it_is_written(memory: SharedMemory) -> None:
    store = await opened(memory)
    kept: list[Transaction] = []

    async def keep(transaction: Transaction) -> None:
        kept.append(transaction)

    await store.transact(keep)
    with pytest.raises(RuntimeError):
        await kept[0].groups([1])
    with pytest.raises(RuntimeError):
        kept[0].signal(Signal.RUN)
    with pytest.raises(RuntimeError, match="without holding"):
        await store.transact(lambda transaction: transaction.set_run(transaction.run))


async def test_nobody_sees_a_transaction_before_it_is_over(memory: SharedMemory) -> None:
    store, other = await opened(memory), await opened(memory)
    await store.transact(submit)
    inside, leave = asyncio.Event(), asyncio.Event()

    async def work(transaction: Transaction) -> None:
        await transaction.write(Batch(groups={1: dropped(1)}))
        inside.set()
        await leave.wait()

    task = asyncio.create_task(store.transact(work))
    await inside.wait()
    assert await other.groups([1]) == {1: pending(1)}
    assert (await other.overview()).run.run.ends == 0
    leave.set()
    await task
    assert (await other.overview()).run.run.ends == 1
