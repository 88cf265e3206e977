"""Transactions of a store that replicas share, and the row of the run they share.

Each test is one sentence of store/shared.py. Transactions of different replicas run at the same time where a store lets
them and one after the other where it does not; no test depends on which.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace

import pytest

from rollout_service.core.changes import Halt
from rollout_service.core.model import GroupState
from rollout_service.core.records import Batch, RunState
from rollout_service.core.shared import SharedRun, Whole
from rollout_service.core.streaks import Streak
from rollout_service.errors import StoreUnavailable
from rollout_service.store.shared import SharedStore, Transaction
from tests.contract.shared_stores import WAIT_S, Handles, Undo, a_while, assert_counted, claimed, write
from tests.contract.store_samples import (
    at_once,
    dropped,
    generating,
    lease,
    leasing,
    new_group,
    pending,
    prompt,
    ready,
    scored,
    submitted,
)

S = GroupState


async def test_what_a_transaction_returned_from_is_seen_by_every_replica(
    store: SharedStore, other: SharedStore
) -> None:
    await write(store, scored(1))
    assert await other.groups([1]) == {1: ready(1)}
    assert (await other.load()).run == RunState(last_seq=1)


async def test_nothing_of_a_transaction_that_raised_happened(store: SharedStore, other: SharedStore) -> None:
    await write(store, submitted(1))
    before = await store.overview()

    async def work(transaction: Transaction) -> None:
        await transaction.hold_run()
        await transaction.set_run(replace(transaction.run, revision=9, run=RunState(policy_version=3, last_seq=2)))
        await transaction.write(submitted(2))
        await transaction.write(Batch(groups={1: dropped(1)}, forget_payloads={1}))
        raise Undo

    with pytest.raises(Undo):
        await store.transact(work)
    after = await other.overview()
    # Numbers of ends may be left out: a store need not take back what it gave out.
    run = replace(after.run, run=replace(after.run.run, ends=0))
    assert (run, after.whole) == (before.run, before.whole)
    assert await other.groups([1, 2]) == {1: pending(1)}
    assert await other.find_prompts([("prompt-2", 0)]) == {}
    assert await other.prompts([1]) == {1: prompt(1)}


async def test_a_cancelled_transaction_is_undone_and_holds_up_nobody(store: SharedStore, other: SharedStore) -> None:
    await write(store, submitted(1))
    inside = asyncio.Event()

    async def hang(transaction: Transaction) -> None:
        await transaction.groups([1])
        await transaction.write(Batch(groups={1: dropped(1)}))
        inside.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(store.transact(hang, alone=True))
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await claimed(other, 1))[1].group == pending(1)
    assert (await claimed(store, 1))[1].group == pending(1)


async def test_a_refused_write_undoes_its_transaction_and_hinders_no_other(store: SharedStore) -> None:
    await write(store, submitted(1))
    with pytest.raises(StoreUnavailable):
        await write(store, Batch(groups={1: pending(1, attempt=2), 7: pending(7)}))
    assert await write(store, Batch(groups={1: generating(1)}), owner="a") == {1: 1}


async def test_alone_no_other_transaction_runs_meanwhile(store: SharedStore, other: SharedStore) -> None:
    await write(store, submitted(*range(1, 9)))
    running: list[str] = []
    together: list[tuple[str, ...]] = []

    async def work(name: str, transaction: Transaction) -> None:
        running.append(name)
        together.append(tuple(running))
        await transaction.groups([int(name[-1])])
        await a_while(transaction)
        together.append(tuple(running))
        running.remove(name)

    def transact(name: str, handle: SharedStore, *, alone: bool) -> Awaitable[None]:
        return handle.transact(lambda transaction: work(name, transaction), alone=alone)

    await asyncio.gather(
        *(transact(f"shared-{n}", (store, other)[n % 2], alone=False) for n in range(1, 9)),
        *(transact(f"alone-{n}", (store, other)[n % 2], alone=True) for n in range(1, 4)),
    )
    assert len(together) == 22
    for names in together:
        assert len(names) == 1 or not any(name.startswith("alone") for name in names), names


async def test_exclusive_transactions_of_one_name_exclude_each_other(store: SharedStore, other: SharedStore) -> None:
    running = 0

    async def work(transaction: Transaction) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await transaction.claims_of("a")
        await a_while(transaction)
        running -= 1

    await asyncio.gather(*((store, other)[n % 2].transact(work, exclusive="prompts") for n in range(8)))


async def test_exclusively_is_tried_and_given_up_at_once_where_somebody_else_is_in_it(
    store: SharedStore, other: SharedStore
) -> None:
    inside, leave = asyncio.Event(), asyncio.Event()

    async def hold(transaction: Transaction) -> str:
        inside.set()
        await leave.wait()
        return "held"

    async def enter(transaction: Transaction) -> str:
        return "entered"

    held = asyncio.create_task(store.transact(hold, exclusive="prompts"))
    await inside.wait()
    async with asyncio.timeout(WAIT_S):
        assert await other.try_exclusively("prompts", at_once, lambda _, tx: enter(tx)) is None
        assert await store.try_exclusively("prompts", at_once, lambda _, tx: enter(tx)) is None
    leave.set()
    assert await held == "held"
    assert await other.try_exclusively("prompts", at_once, lambda _, tx: enter(tx)) == "entered"


async def test_what_is_prepared_exclusively_keeps_nobody_from_the_run(store: SharedStore, other: SharedStore) -> None:
    inside, leave = asyncio.Event(), asyncio.Event()

    async def prepare(run: SharedRun, whole: Whole) -> int:
        inside.set()
        await leave.wait()
        return run.run.last_seq

    async def work(prepared: int, transaction: Transaction) -> tuple[int, int]:
        return prepared, transaction.run.run.last_seq

    async def submit(transaction: Transaction) -> None:
        await transaction.write(Batch(new_groups={1: new_group(1)}))
        await transaction.set_run(replace(transaction.run, run=replace(transaction.run.run, last_seq=1)))

    reading = asyncio.create_task(store.try_exclusively("prompts", prepare, work))
    await inside.wait()
    async with asyncio.timeout(WAIT_S):
        assert await other.try_exclusively("prompts", at_once, lambda _, tx: submit(tx)) is None
        await other.transact(submit, alone=True)
    leave.set()
    assert await reading == (0, 1)


async def test_what_work_raises_leaves_the_exclusive_lock(store: SharedStore, other: SharedStore) -> None:
    async def fail(transaction: Transaction) -> str:
        raise Undo

    async def enter(transaction: Transaction) -> str:
        return "entered"

    with pytest.raises(Undo):
        await store.try_exclusively("prompts", at_once, lambda _, tx: fail(tx))
    with pytest.raises(Undo):
        await store.transact(fail, exclusive="prompts")
    assert await other.try_exclusively("prompts", at_once, lambda _, tx: enter(tx)) == "entered"


async def test_two_transactions_with_the_same_new_prompt_end_as_one_group(handles: Handles) -> None:
    stores = [await handles() for _ in range(3)]
    runs = 0

    async def work(seq: int, transaction: Transaction) -> int:
        nonlocal runs
        runs += 1
        known = await transaction.find_prompts([("same", 0)])
        if known:
            return known["same", 0].seq
        await a_while(transaction)
        new = replace(new_group(seq), group=pending(seq, prompt_id="same"))
        await transaction.write(Batch(new_groups={seq: new}))
        return seq

    def submit(seq: int) -> Awaitable[int]:
        return stores[seq % 3].transact(lambda transaction: work(seq, transaction))

    seqs = await asyncio.gather(*(submit(seq) for seq in range(1, 7)))
    assert len(set(seqs)) == 1
    assert runs >= 6
    assert [group.seq for group in await stores[0].list_groups(set(), after=0, limit=9)] == [seqs[0]]


async def test_two_transactions_with_the_same_request_id_end_as_one_lease(handles: Handles) -> None:
    stores = [await handles() for _ in range(2)]
    await write(stores[0], scored(1, 2, 3, 4))

    async def work(name: str, transaction: Transaction) -> str:
        found = await transaction.lease_by_request("step-1")
        if found is not None:
            return found.lease_id
        (group,) = await transaction.ready(1, oldest=0)
        await a_while(transaction)
        await transaction.write(leasing(lease(name, group.seq, request_id="step-1")))
        return name

    def take(n: int) -> Awaitable[str]:
        return stores[n % 2].transact(lambda transaction: work(f"lease-{n}", transaction))

    names = await asyncio.gather(*(take(n) for n in range(4)))
    assert len(set(names)) == 1
    seen = await assert_counted(stores[0])
    assert (seen.whole.counts[S.LEASED], seen.leases) == (1, 1)


async def test_now_is_the_time_of_the_store_and_goes_on(store: SharedStore, other: SharedStore) -> None:
    async def now(transaction: Transaction) -> float:
        return transaction.now

    first, second = await store.transact(now), await other.transact(now)
    assert first <= second <= (await store.overview()).now


async def test_the_runs_row_is_kept_but_for_its_counters(store: SharedStore, other: SharedStore) -> None:
    await write(store, submitted(1, 2))
    await write(store, Batch(groups={2: dropped(2)}))
    row = SharedRun(
        run=RunState(
            policy_version=4, paused=True, final=True, last_seq=2, read_position=7, prompts_fingerprint="größe"
        ),
        revision=3,
        taken=1,
        returns=2,
        halt=Halt(reason="1 group(s) in a row failed whole", group_id="g-1", engine="http://e", error="nö", since=12.5),
        streak=Streak(failed=1, unproductive=5),
        pace_relaxed=4,
    )
    ended: dict[S, int] = {S.ACKED: 70}

    async def work(transaction: Transaction) -> SharedRun:
        await transaction.hold_run()
        await transaction.set_run(replace(row, run=replace(row.run, ended=ended, ends=99)))
        return transaction.run

    kept = replace(row, run=replace(row.run, ended={S.DROPPED: 1}, ends=1))
    assert without_zeros(await store.transact(work)) == kept
    assert without_zeros((await other.overview()).run) == kept
    assert (await other.load()).run == kept.run
    cleared = replace(row, halt=None, pace_relaxed=None, streak=Streak())

    async def clear(transaction: Transaction) -> None:
        await transaction.set_run(cleared)

    await store.transact(clear, alone=True)  # the row needs no holding there
    assert without_zeros((await other.overview()).run) == replace(cleared, run=kept.run)


def without_zeros(run: SharedRun) -> SharedRun:
    return replace(run, run=replace(run.run, ended={state: n for state, n in run.run.ended.items() if n}))


async def test_whoever_holds_the_run_has_it_to_itself(handles: Handles) -> None:
    stores = [await handles() for _ in range(3)]

    async def submit(transaction: Transaction) -> int:
        await transaction.hold_run()
        seq = transaction.run.run.last_seq + 1
        await a_while(transaction)
        run = replace(transaction.run.run, last_seq=seq)
        await transaction.set_run(replace(transaction.run, run=run, revision=transaction.run.revision + 1))
        await transaction.write(Batch(new_groups={seq: new_group(seq)}))
        return seq

    seqs = await asyncio.gather(*(stores[n % 3].transact(submit) for n in range(12)))
    assert sorted(seqs) == list(range(1, 13))
    seen = await assert_counted(stores[0])
    assert (seen.run.revision, seen.run.run.last_seq) == (12, 12)
