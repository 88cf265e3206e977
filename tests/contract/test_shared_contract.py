"""What every store holds that several replicas share: each test is one sentence of store/shared.py.

Transactions of different replicas run at the same time where a store lets them and one after the other where it does
not; no test depends on which.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest

from rollout_service.core.changes import Halt
from rollout_service.core.group import Checkpoint, Group, Lease, LeaseState
from rollout_service.core.model import GroupState, prompt_size
from rollout_service.core.records import Batch, GroupPayload, RunState, StoredPrompt
from rollout_service.core.shared import Claimed, Overview, Replica, SharedRun, Whole
from rollout_service.core.streaks import Streak
from rollout_service.errors import ConfigError, StoreUnavailable
from rollout_service.store.postgres import PostgresStore
from rollout_service.store.shared import SharedStore, Signal, Transaction
from rollout_service.store.shared_memory import SharedMemory
from tests.contract.store_samples import (
    MAX_STALENESS,
    ROWS,
    N,
    acked,
    at_once,
    checkpoint,
    dropped,
    failed,
    finished,
    generating,
    lease,
    leasing,
    new_group,
    pending,
    prompt,
    ready,
    score,
    scored,
    settled,
    submitted,
)
from tests.postgres_cluster import cluster

S = GroupState
T = TypeVar("T")
WAIT_S = 20.0

KINDS = ("memory", "postgres")

Handles = Callable[[], Awaitable[SharedStore]]
"""Opens one more replica's store on the same content."""


class Undo(Exception):
    """Raised by work that wants its transaction undone."""


@pytest.fixture(params=KINDS)
async def handles(request: pytest.FixtureRequest) -> AsyncIterator[Handles]:
    async with AsyncExitStack() as stack:
        if request.param == "postgres":
            url = await stack.enter_async_context(cluster().database())
            make: Callable[[], SharedStore] = partial(PostgresStore, url, max_staleness=MAX_STALENESS)
        else:
            make = SharedMemory(MAX_STALENESS).store

        async def handle() -> SharedStore:
            store = make()
            await store.open()
            stack.push_async_callback(store.close)
            return store

        yield handle


@pytest.fixture
async def store(handles: Handles) -> SharedStore:
    return await handles()


@pytest.fixture
async def other(handles: Handles, store: SharedStore) -> SharedStore:
    return await handles()


# --- doing


async def write(store: SharedStore, batch: Batch, *, owner: str | None = None) -> Mapping[int, int]:
    """Commits `batch`; its run, where it has one, by `set_run`."""

    async def work(transaction: Transaction) -> Mapping[int, int]:
        if batch.run is not None:
            await transaction.hold_run()
            await transaction.set_run(replace(transaction.run, run=batch.run))
        return await transaction.write(batch, owner=owner)

    return await store.transact(work)


async def ask(store: SharedStore, question: Callable[[Transaction], Awaitable[T]]) -> T:
    return await store.transact(question)


async def claimed(store: SharedStore, *seqs: int) -> Mapping[int, Claimed]:
    return await ask(store, lambda transaction: transaction.groups(seqs))


async def claimable(store: SharedStore, limit: int, *, pending: bool = True) -> list[int]:
    found = await ask(store, lambda transaction: transaction.claimable(limit, pending=pending))
    return [each.group.seq for each in found]


async def until(holds: Callable[[], Awaitable[T]]) -> T:
    """Looks until what `holds` gives is true."""
    async with asyncio.timeout(WAIT_S):
        while not (found := await holds()):
            await asyncio.sleep(0.005)  # between two looks
    return found


def replica(replica_id: str, **changed: Any) -> Replica:
    return replace(Replica(replica_id=replica_id, name=f"host-{replica_id}", service="1.0", rules="r1"), **changed)


async def assert_counted(store: SharedStore) -> Overview:
    """The counters are those of the groups."""
    seen = await store.overview()
    groups = await store.list_groups(set(), after=0, limit=10_000)
    states = [group.state for group in groups]
    assert dict(seen.whole.counts) == {state: states.count(state) for state in S}
    ended = {state: count for state in S if state.terminal and (count := states.count(state))}
    assert {state: count for state, count in seen.run.run.ended.items() if count} == ended
    held = [group.payload_bytes for group in groups if group.state in (S.SCORING, S.READY)]
    assert seen.whole.held_bytes == sum(held)
    outstanding = [group.seq for group in groups if not group.state.terminal]
    assert seen.whole.prompt_bytes == sum(prompt_size(prompt(seq)) for seq in outstanding)
    return seen


# --- transactions


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
        await asyncio.sleep(0.002)  # time for others to come in, if they can
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
        await asyncio.sleep(0.002)  # time for another to come in, if it can
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
        await asyncio.sleep(0.002)  # time for another to find nothing, if it can
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
        await asyncio.sleep(0.002)  # time for another to find nothing, if it can
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


# --- the run's row


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
        await asyncio.sleep(0.001)  # time for another to read the same number, if it can
        run = replace(transaction.run.run, last_seq=seq)
        await transaction.set_run(replace(transaction.run, run=run, revision=transaction.run.revision + 1))
        await transaction.write(Batch(new_groups={seq: new_group(seq)}))
        return seq

    seqs = await asyncio.gather(*(stores[n % 3].transact(submit) for n in range(12)))
    assert sorted(seqs) == list(range(1, 13))
    seen = await assert_counted(stores[0])
    assert (seen.run.revision, seen.run.run.last_seq) == (12, 12)


# --- writing


async def test_counters_follow_a_group_through_its_life(store: SharedStore) -> None:
    await write(store, submitted(1, 2, 3))
    assert (await assert_counted(store)).whole.counts[S.PENDING] == 3
    await write(store, Batch(groups={1: generating(1), 2: generating(2)}), owner="a")
    await assert_counted(store)
    rollouts = {(1, 1, row): finished(row) for row in ROWS}
    await write(store, Batch(groups={1: settled(1, S.SCORING)}, rollouts=rollouts), owner="a")
    assert (await assert_counted(store)).whole.held_bytes == N * finished(0).payload_bytes
    await write(store, Batch(groups={1: ready(1)}, scores={(1, 1): score()}))
    await assert_counted(store)
    await write(store, leasing(lease("l", 1)))
    assert (await assert_counted(store)).whole.held_bytes == 0
    ended = lease("l", 1, state=LeaseState.ENDED)
    await write(store, Batch(groups={1: acked(1, "l"), 3: dropped(3)}, leases={"l": ended}, forget_payloads={3}))
    seen = await assert_counted(store)
    assert (seen.whole.counts[S.ACKED], seen.whole.counts[S.DROPPED], seen.run.run.ends) == (1, 1, 2)
    await write(store, Batch(groups={3: pending(3, attempt=2)}))  # a rewind opens it again
    seen = await assert_counted(store)
    assert (seen.run.run.ended, seen.run.run.ends) == ({S.ACKED: 1}, 2)


async def test_counters_follow_store_commits_too(store: SharedStore) -> None:
    batch = scored(1, 2, 3)
    batch.groups[3] = dropped(3, end_number=1)
    batch.run = RunState(last_seq=3, ended={S.DROPPED: 1}, ends=1)
    await store.commit(batch)
    seen = await assert_counted(store)
    assert seen.run == SharedRun(run=RunState(last_seq=3, ended={S.DROPPED: 1}, ends=1))
    await write(store, Batch(groups={2: dropped(2)}))
    assert (await store.groups([2]))[2].end_number == 2


async def test_a_new_group_written_with_another_standing_has_that_one_and_is_counted_once(store: SharedStore) -> None:
    batch = submitted(1)
    batch.groups[1] = generating(1)
    assert await write(store, batch, owner="a") == {1: 1}
    assert (await assert_counted(store)).whole.counts[S.GENERATING] == 1


async def test_generating_and_scoring_groups_belong_to_whoever_writes_them(store: SharedStore) -> None:
    await write(store, submitted(1, 2, 3))
    assert await write(store, Batch(groups={1: generating(1), 2: generating(2), 3: pending(3)}), owner="a") == {
        1: 1,
        2: 1,
    }
    assert await write(store, Batch(groups={1: generating(1, error="again")}), owner="a") == {1: 1}
    assert await write(store, Batch(groups={1: generating(1)}), owner="b") == {1: 2}
    found = await claimed(store, 1, 2, 3, 99)
    assert {seq: (each.owner, each.claim) for seq, each in found.items()} == {1: ("b", 2), 2: ("a", 1), 3: (None, 0)}
    assert await ask(store, lambda transaction: transaction.claims([1, 3, 99])) == {1: ("b", 2), 3: (None, 0)}
    assert await ask(store, lambda transaction: transaction.claims_of("b")) == {1: 2}


async def test_groups_in_other_states_belong_to_nobody_and_a_claim_never_falls(store: SharedStore) -> None:
    await write(store, submitted(1))
    await write(store, Batch(groups={1: generating(1)}), owner="a")
    assert await write(store, Batch(groups={1: pending(1, attempt=2)}), owner="a") == {}
    assert (await claimed(store, 1))[1].owner is None
    assert await write(store, Batch(groups={1: generating(1, attempt=2)}), owner="a") == {1: 2}
    assert await write(store, Batch(groups={1: generating(1, attempt=2)})) == {}  # given to nobody
    assert (await claimed(store, 1))[1].owner is None
    assert await write(store, Batch(groups={1: generating(1, attempt=2)}), owner="b") == {1: 3}


async def test_rollouts_and_scores_alone_change_no_owner(store: SharedStore) -> None:
    await write(store, submitted(1))
    await write(store, Batch(groups={1: generating(1)}), owner="a")
    assert await write(store, Batch(rollouts={(1, 1, 0): finished(0)}), owner="a") == {}
    assert await ask(store, lambda transaction: transaction.claims([1])) == {1: ("a", 1)}


async def test_a_group_taken_over_goes_on_with_the_rollouts_it_has(store: SharedStore, other: SharedStore) -> None:
    await write(store, submitted(1))
    await write(store, Batch(groups={1: generating(1)}), owner="a")
    await write(store, Batch(rollouts={(1, 1, 2): finished(2), (1, 1, 0): failed(0)}), owner="a")
    group = (await claimed(other, 1))[1].group
    assert (group.waiting, group.running, group.finished, group.failed) == ((1, 3), frozenset(), {2}, {0})
    assert group.payload_bytes == finished(2).payload_bytes
    assert (await ask(other, lambda transaction: transaction.payloads([1])))[0].rollouts == {
        2: finished(2),
        0: failed(0),
    }


REFUSED = {
    "a stale group leased": leasing(lease("m", 2), version=0),
    "a group leased twice": Batch(leases={"m": lease("m", 1)}),
    "a late rollout of an earlier attempt": Batch(rollouts={(3, 1, 0): finished(0)}),
    "a settled rollout written again": Batch(rollouts={(2, 1, 0): finished(0, "other")}),
    "an attempt that falls": Batch(groups={3: generating(3)}),
    "a standing of an unknown group": Batch(groups={9: pending(9)}),
    "a score of another attempt": Batch(scores={(3, 1): score()}),
    "an identity that is known": Batch(new_groups={9: replace(new_group(9), group=pending(9, prompt_id="prompt-1"))}),
    "a checkpoint's name again": Batch(checkpoints={"step-1": checkpoint("step-1", 2)}),
    "a request's second lease": leasing(lease("m", 4, request_id="step-1"), version=3),
}


@pytest.mark.parametrize("batch", REFUSED.values(), ids=REFUSED.keys())
async def test_a_batch_that_breaks_a_rule_is_refused(store: SharedStore, batch: Batch) -> None:
    await write(store, scored(1, 2, 3, 4, version=0))
    versions = {seq: ready(seq, version=3) for seq in (1, 4)}
    again = pending(3, attempt=2)
    await write(store, Batch(groups={**versions, 3: again}, checkpoints={"step-1": checkpoint("step-1", 1)}))
    await write(store, leasing(lease("l", 1, request_id="step-1"), version=3))
    await write(store, Batch(run=RunState(policy_version=3, last_seq=4)))
    before = await assert_counted(store)
    with pytest.raises(StoreUnavailable):
        await write(store, batch)
    after = await assert_counted(store)
    assert (after.run, after.whole, after.leases) == (before.run, before.whole, before.leases)
    assert (await store.groups([1]))[1].lease_id == "l"


@pytest.mark.parametrize("version_first", [True, False])
async def test_a_lease_is_judged_by_the_version_its_transaction_leaves_behind(
    store: SharedStore, version_first: bool
) -> None:
    await write(store, scored(1))

    async def work(transaction: Transaction) -> None:
        run = replace(transaction.run.run, policy_version=MAX_STALENESS + 1)
        await transaction.hold_run()
        if version_first:
            await transaction.set_run(replace(transaction.run, run=run))
        await transaction.write(leasing(lease("l", 1)))
        if not version_first:
            await transaction.set_run(replace(transaction.run, run=run))

    with pytest.raises(StoreUnavailable):
        await store.transact(work)
    assert (await store.groups([1]))[1].state is S.READY


async def test_a_batch_is_written_once(store: SharedStore, other: SharedStore) -> None:
    await store.join(replica("a"), lease_s=60)
    await other.join(replica("b"), lease_s=60)

    async def first(transaction: Transaction) -> bool:
        return await transaction.once("a", 1)

    async def undone(transaction: Transaction) -> None:
        assert await transaction.once("a", 2)
        raise Undo

    assert await store.transact(first)
    assert not await store.transact(first)
    assert not await other.transact(first)
    with pytest.raises(Undo):
        await store.transact(undone)
    assert await store.transact(lambda transaction: transaction.once("a", 2))
    assert not await store.transact(first)
    assert await other.transact(lambda transaction: transaction.once("b", 1))


# --- ends


async def test_ends_are_numbered_in_the_order_of_the_batch_whatever_it_says(store: SharedStore) -> None:
    await write(store, submitted(1, 2, 3))
    groups = {3: dropped(3, end_number=7), 1: dropped(1), 2: dropped(2, end_number=1)}
    await write(store, Batch(groups=groups))
    assert list(await store.ended_since(0)) == [3, 1, 2]
    found = await store.groups([1, 2, 3])
    assert [found[seq].end_number for seq in (3, 1, 2)] == [1, 2, 3]


async def test_a_group_written_again_keeps_its_number_and_one_that_ends_again_gets_a_new_one(
    store: SharedStore,
) -> None:
    await write(store, submitted(1, 2))
    await write(store, Batch(groups={1: dropped(1)}))
    await write(store, Batch(groups={1: dropped(1, error="seen later"), 2: dropped(2)}))
    assert {seq: group.end_number for seq, group in (await store.groups([1, 2])).items()} == {1: 1, 2: 2}
    await write(store, Batch(groups={1: pending(1, attempt=2)}))
    assert (await store.groups([1]))[1].end_number is None
    await write(store, Batch(groups={1: dropped(1, attempt=2)}))
    numbers = {seq: group.end_number for seq, group in (await store.groups([1, 2])).items()}
    assert numbers[2] == 2
    assert (numbers[1] or 0) > 2
    assert list(await store.ended_since(2)) == [1]


async def test_concurrent_ends_have_different_numbers_and_a_checkpoint_made_alone_parts_them(handles: Handles) -> None:
    stores = [await handles() for _ in range(3)]
    seqs = list(range(1, 61))
    await write(stores[0], submitted(*seqs))

    async def end(seq: int) -> None:
        await write(stores[seq % 3], Batch(groups={seq: dropped(seq)}))

    async def mark(transaction: Transaction) -> int:
        made = Checkpoint(
            name="step-1", number=1, policy_version=0, ends=transaction.run.run.ends, created_at=transaction.now
        )
        await transaction.write(Batch(checkpoints={made.name: made}))
        return made.ends

    *_, ends = await asyncio.gather(*(end(seq) for seq in seqs[:50]), stores[1].transact(mark, alone=True))
    await asyncio.gather(*(end(seq) for seq in seqs[50:]))
    groups = await stores[2].groups(seqs)
    numbers = {group.end_number: seq for seq, group in groups.items()}
    assert None not in numbers
    assert len(numbers) == 60
    later = [numbers[number] for number in sorted(numbers) if number > ends]
    assert list(await stores[0].ended_since(ends)) == later
    assert list(await ask(stores[0], lambda transaction: transaction.ended_since(ends))) == later
    assert set(later) >= set(seqs[50:])
    assert (await assert_counted(stores[0])).run.run.ends >= max(number for number in numbers if number)
    assert [made.ends for made in await ask(stores[1], lambda transaction: transaction.checkpoints())] == [ends]


# --- reading


async def test_claimable_are_first_opened_ones_without_owner_then_pending_of_later_attempts_then_others(
    store: SharedStore,
) -> None:
    batch = scored(*range(1, 10))
    batch.groups.update({1: pending(1), 2: pending(2, attempt=2), 3: generating(3), 4: generating(4)})
    batch.groups.update({5: settled(5, S.SCORING), 6: dropped(6), 7: pending(7), 8: pending(8, attempt=3)})
    for seq in (1, 2, 3, 4, 7, 8):
        for row in ROWS:
            del batch.rollouts[seq, 1, row]
        del batch.scores[seq, 1]
    await write(store, batch)
    await write(store, Batch(groups={4: generating(4)}), owner="a")
    assert await claimable(store, 9) == [3, 5, 2, 8, 1, 7]
    assert await claimable(store, 3) == [3, 5, 2]
    assert await claimable(store, 9, pending=False) == [3, 5]
    assert await claimable(store, 0) == []


async def test_replicas_that_claim_at_the_same_time_claim_different_groups(handles: Handles) -> None:
    stores = [await handles() for _ in range(3)]
    await write(stores[0], submitted(*range(1, 31)))

    async def claim(name: str, transaction: Transaction) -> list[int]:
        found = [each.group.seq for each in await transaction.claimable(5, pending=True)]
        await asyncio.sleep(0.001)  # time for another to find the same ones, if it can
        claims = await transaction.write(Batch(groups={seq: generating(seq) for seq in found}), owner=name)
        assert sorted(claims) == found
        return found

    def claiming(n: int) -> Awaitable[list[int]]:
        return stores[n % 3].transact(lambda transaction: claim(f"r{n % 3}", transaction))

    taken: list[int] = []
    for _ in range(10):
        taken += [seq for seqs in await asyncio.gather(*(claiming(n) for n in range(6))) for seq in seqs]
        if len(taken) == 30:
            break
    assert sorted(taken) == list(range(1, 31))
    owned = [
        await ask(store, lambda transaction, n=n: transaction.claims_of(f"r{n}")) for n, store in enumerate(stores)
    ]
    assert sorted(seq for claims in owned for seq in claims) == list(range(1, 31))


async def test_ready_groups_come_by_version_then_number_from_the_oldest_allowed(store: SharedStore) -> None:
    await write(store, scored(1, 2, 3, 4, 5))
    versions = {1: 4, 2: 2, 3: 3, 4: 2, 5: 1}
    await write(store, Batch(groups={seq: ready(seq, version=version) for seq, version in versions.items()}))

    async def seqs(limit: int, oldest: int) -> list[int]:
        return [group.seq for group in await ask(store, lambda each: each.ready(limit, oldest=oldest))]

    assert await seqs(9, 2) == [2, 4, 3, 1]
    assert await seqs(2, 0) == [5, 2]
    assert await seqs(9, 5) == []
    (first,) = await ask(store, lambda transaction: transaction.ready(1, oldest=0))
    assert first == ready(5, version=1)


async def test_outdated_are_ready_ones_and_opened_ones_without_owner_below_the_oldest(store: SharedStore) -> None:
    batch = scored(1, 2, 3, 4, 5, 6, 7)
    batch.groups.update({seq: ready(seq, version=1) for seq in (1, 2)})
    batch.groups.update({5: settled(5, S.SCORING, version=1), 3: settled(3, S.SCORING, version=1)})
    batch.groups.update({2: ready(2, version=3), 4: settled(4, S.SCORING, version=3), 6: dropped(6, version=1)})
    await write(store, batch)
    await write(store, Batch(groups={5: settled(5, S.SCORING, version=1)}), owner="a")
    await write(store, leasing(lease("l", 7), version=0))
    found = await ask(store, lambda transaction: transaction.outdated(2))
    assert list(found) == [ready(1, version=1), settled(3, S.SCORING, version=1)]


async def test_opened_are_all_groups_between_pending_and_their_end(store: SharedStore) -> None:
    batch = scored(1, 2, 3, 4, 5, 6)
    batch.groups.update(
        {3: settled(3, S.SCORING), 2: pending(2, attempt=2), 5: dropped(5), 6: generating(6, attempt=2)}
    )
    batch.forget_attempts |= {2, 6}
    await write(store, batch)
    await write(store, leasing(lease("l", 4)))
    found = await ask(store, lambda transaction: transaction.opened())
    assert [(group.seq, group.state) for group in found] == [
        (1, S.READY),
        (3, S.SCORING),
        (4, S.LEASED),
        (6, S.GENERATING),
    ]
    assert (found[3].waiting, found[3].running) == (ROWS, frozenset())


async def test_a_transaction_reads_what_the_store_reads(store: SharedStore) -> None:
    await write(store, scored(1, 2))
    await write(store, Batch(groups={2: dropped(2)}, forget_payloads={2}))

    async def work(transaction: Transaction) -> None:
        found = await transaction.groups([2, 1, 99])
        assert found == {1: Claimed(group=ready(1), owner=None, claim=0), 2: found[2]}
        assert found[2].group.state is S.DROPPED
        assert await transaction.payloads([2, 1]) == [
            GroupPayload(group=dropped(2, end_number=1), prompt=None, rollouts={}, score=None),
            GroupPayload(
                group=ready(1), prompt=prompt(1), rollouts={row: finished(row) for row in ROWS}, score=score()
            ),
        ]
        assert await transaction.prompts([1, 2]) == {1: prompt(1)}
        assert await transaction.find_prompts([("prompt-2", 0), ("prompt-3", 0)]) == {
            ("prompt-2", 0): StoredPrompt(seq=2, digest=b"digest-2")
        }
        assert transaction.whole.counts[S.READY] == 1

    await store.transact(work)


async def test_tokens_are_those_of_the_finished_rollouts_of_the_current_attempt(store: SharedStore) -> None:
    await write(store, submitted(1, 2, 3))
    rollouts = {(1, 1, 0): finished(0), (1, 1, 1): finished(1), (1, 1, 2): failed(2), (2, 1, 0): finished(0)}
    await write(store, Batch(groups={1: generating(1), 2: generating(2)}, rollouts=rollouts), owner="a")
    await write(store, Batch(groups={2: generating(2, attempt=2)}), owner="a")
    await write(store, Batch(rollouts={(2, 2, 3): finished(3)}), owner="a")
    assert await ask(store, lambda transaction: transaction.tokens([1, 2, 3, 99])) == {
        1: 2 * finished(0).output_tokens,
        2: finished(3).output_tokens,
    }


async def test_leases_are_found_ended_ones_included_and_live_ones_by_creation(store: SharedStore) -> None:
    await write(store, scored(1, 2, 3))
    made = {
        "b": lease("b", 1, created_at=2001.0, request_id="step-1"),
        "a": lease("a", 2, created_at=2002.0),
        "c": lease("c", 3, created_at=2000.0, request_id="step-0"),
    }
    for each in made.values():
        await write(store, leasing(each))
    over = replace(made["c"], state=LeaseState.ENDED)
    await write(store, Batch(leases={"c": over}, groups={3: ready(3)}))

    async def work(transaction: Transaction) -> list[Lease | None]:
        assert await transaction.live_leases() in ([made["b"], made["a"]], (made["b"], made["a"]))
        return [
            await transaction.lease("a"),
            await transaction.lease("c"),
            await transaction.lease("x"),
            await transaction.lease_by_request("step-1"),
            await transaction.lease_by_request("step-0"),
            await transaction.lease_by_request("x"),
        ]

    assert await store.transact(work) == [made["a"], over, None, made["b"], over, None]


async def test_leases_whose_time_is_over_are_due_and_others_are_not(store: SharedStore) -> None:
    now = (await store.overview()).now
    await write(store, scored(1, 2, 3))
    await write(store, leasing(lease("over", 1, created_at=now - 20, expires_at=now - 1)))
    await write(store, leasing(lease("long over", 2, created_at=now - 20, expires_at=now - 5)))
    await write(store, leasing(lease("live", 3, created_at=now, expires_at=now + 600)))

    async def due(limit: int) -> set[str]:
        return {found.lease_id for found in await ask(store, lambda each: each.leases_due(limit))}

    assert await due(9) == {"over", "long over"}
    assert len(await due(1)) == 1
    await write(store, Batch(leases={"over": lease("over", 1, state=LeaseState.ENDED)}, groups={1: ready(1)}))
    assert await due(9) == {"long over"}


async def test_paced_are_groups_in_leases_of_the_current_version_and_if_asked_acked_ones(store: SharedStore) -> None:
    await write(store, scored(1, 2, 3, 4))
    await write(store, leasing(lease("old", 1, policy_version=0)))
    run = RunState(policy_version=1, last_seq=4)
    await write(store, Batch(run=run))
    current = lease("current", 2, 3, 4, policy_version=1)
    await write(store, leasing(current))
    await write(store, Batch(groups={3: acked(3, "current"), 4: ready(4)}))

    async def paced(*, acked: bool) -> list[int]:
        return sorted(await ask(store, lambda transaction: transaction.paced(acked=acked)))

    assert await paced(acked=False) == [2]
    assert await paced(acked=True) == [2, 3]
    await write(store, Batch(run=replace(run, policy_version=2)))
    assert await paced(acked=True) == []


async def test_one_look_is_consistent_while_others_write(handles: Handles) -> None:
    stores = [await handles() for _ in range(3)]
    looker = await handles()
    done = 0

    async def submit(transaction: Transaction) -> None:
        await transaction.hold_run()
        seq = transaction.run.run.last_seq + 1
        await transaction.set_run(replace(transaction.run, run=replace(transaction.run.run, last_seq=seq)))
        await transaction.write(Batch(new_groups={seq: new_group(seq)}))

    async def move(owner: str, transaction: Transaction) -> None:
        await transaction.claimable(1, pending=True)
        moved: dict[int, Group] = {}
        for each in await transaction.claimable(2, pending=True):
            seq = each.group.seq
            moved[seq] = generating(seq) if each.group.state is S.PENDING else dropped(seq)
        await transaction.write(Batch(groups=moved), owner=owner if len(moved) % 2 else None)

    async def works(n: int) -> None:
        nonlocal done
        for _ in range(15):
            await stores[n].transact(submit)
            await stores[n].transact(lambda transaction: move(f"r{n}", transaction))
        done += 1

    async def looks() -> int:
        seen = 0
        while done < 3:
            overview = await looker.overview()
            assert overview.run.run.last_seq == sum(overview.whole.counts.values())
            ended = sum(count for state, count in overview.whole.counts.items() if state.terminal)
            assert ended == sum(overview.run.run.ended.values())
            if overview.oldest is not None:
                assert not overview.oldest.state.terminal
            seen += 1
        return seen

    *_, looked = await asyncio.gather(*(works(n) for n in range(3)), looks())
    assert looked > 0
    assert (await assert_counted(looker)).run.run.last_seq == 45


async def test_the_oldest_outstanding_group_is_seen_with_its_rows(store: SharedStore) -> None:
    assert (await store.overview()).oldest is None
    await write(store, submitted(1, 2, 3))
    await write(store, Batch(groups={1: dropped(1), 2: generating(2)}, rollouts={(2, 1, 1): finished(1)}), owner="a")
    oldest = (await store.overview()).oldest
    assert oldest is not None
    assert (oldest.seq, oldest.waiting, oldest.finished) == (2, (0, 2, 3), {1})


# --- replicas


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


# --- signals


class Heard:
    """The signals a store's watcher was told."""

    def __init__(self, store: SharedStore) -> None:
        self.signals: list[Signal] = []
        store.watch(self.signals.append)

    async def until(self, *signals: Signal) -> None:
        async def heard() -> bool:
            return set(signals) <= set(self.signals)

        await until(heard)


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
