"""What transactions of replicas find in a store they share, and what one look shows.

Each test is one sentence of store/shared.py. Transactions of different replicas run at the same time where a store lets
them and one after the other where it does not; no test depends on which.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace

from rollout_service.core.group import Group, Lease, LeaseState
from rollout_service.core.model import GroupState
from rollout_service.core.records import Batch, GroupPayload, RunState, StoredPrompt
from rollout_service.core.shared import Claimed
from rollout_service.store.shared import SharedStore, Transaction
from tests.contract.shared_stores import Handles, a_while, ask, assert_counted, claimable, write
from tests.contract.store_samples import (
    ROWS,
    acked,
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

S = GroupState


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


async def test_what_only_has_to_be_scored_can_be_claimed_alone(store: SharedStore, other: SharedStore) -> None:
    batch = scored(1, 2, 3, 4, 5)
    batch.groups.update({seq: settled(seq, S.SCORING) for seq in (1, 2, 4)})
    batch.groups[3] = settled(3, S.GENERATING, waiting=(3,), finished=frozenset(ROWS[:3]))
    await write(store, batch)
    await write(store, Batch(groups={1: settled(1, S.SCORING)}), owner="a")

    async def seqs(limit: int) -> list[int]:
        return [each.group.seq for each in await ask(other, lambda each: each.claimable_to_score(limit))]

    assert await seqs(9) == [2, 4]
    assert await seqs(1) == [2]


async def test_replicas_that_claim_at_the_same_time_claim_different_groups(handles: Handles) -> None:
    stores = [await handles() for _ in range(3)]
    await write(stores[0], submitted(*range(1, 31)))

    async def claim(name: str, transaction: Transaction) -> list[int]:
        found = [each.group.seq for each in await transaction.claimable(5, pending=True)]
        await a_while(transaction)
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
