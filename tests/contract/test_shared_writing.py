"""What replicas write to a store they share: counters, claims, refusals, numbers of ends.

Each test is one sentence of store/shared.py. Transactions of different replicas run at the same time where a store lets
them and one after the other where it does not; no test depends on which.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rollout_service.core.group import Checkpoint, LeaseState
from rollout_service.core.model import GroupState
from rollout_service.core.records import Batch, RunState
from rollout_service.core.shared import SharedRun
from rollout_service.errors import StoreUnavailable
from rollout_service.store.shared import SharedStore, Transaction
from tests.contract.shared_stores import Handles, Undo, ask, assert_counted, claimed, replica, write
from tests.contract.store_samples import (
    MAX_STALENESS,
    ROWS,
    N,
    acked,
    checkpoint,
    dropped,
    failed,
    finished,
    generating,
    lease,
    leasing,
    new_group,
    pending,
    ready,
    score,
    scored,
    settled,
    submitted,
)

S = GroupState


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
