"""What every store holds, in memory, in SQLite and in PostgreSQL alike."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from rollout_service.core.group import LeaseState
from rollout_service.core.model import GroupState
from rollout_service.core.records import Batch, GroupPayload, RunState, Snapshot, StoredPrompt
from rollout_service.errors import StoreUnavailable
from rollout_service.store import MemoryStore, SqliteStore, Store
from rollout_service.store.postgres import PostgresStore
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
    leased,
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


class Medium:
    """Stores over one content: `crashed` is what a process finds that starts after this one was killed."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind, self._folder = kind, folder
        self._made: list[Store] = []
        self._databases = AsyncExitStack()

    async def store(self) -> Store:
        if self._kind == "memory":
            return await self._opened(MemoryStore(MAX_STALENESS))
        if self._kind == "postgres":
            url = await self._databases.enter_async_context(cluster().database())
            return await self._opened(PostgresStore(url, max_staleness=MAX_STALENESS, pool_size=3))
        return await self._opened(SqliteStore(self._folder / "a.db", max_staleness=MAX_STALENESS))

    async def reopened(self, store: Store) -> Store:
        await store.close()
        await store.open()
        return store

    async def crashed(self, store: Store) -> Store:
        if isinstance(store, MemoryStore):
            return await self._opened(MemoryStore.reopened(store))
        if isinstance(store, PostgresStore):  # what the server has while the first store never closes
            return await self._opened(PostgresStore(store.url, max_staleness=MAX_STALENESS, pool_size=3))
        assert isinstance(store, SqliteStore)
        copy = store.path.with_name(f"crashed-{len(self._made)}.db")
        for suffix in ("", "-wal"):  # what is on disk while the first store never closes
            shutil.copyfile(f"{store.path}{suffix}", f"{copy}{suffix}")
        return await self._opened(SqliteStore(copy, max_staleness=MAX_STALENESS))

    async def _opened(self, store: Store) -> Store:
        self._made.append(store)
        await store.open()
        return store

    async def close(self) -> None:
        for store in self._made:
            await store.close()
        await self._databases.aclose()


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def medium(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Medium]:
    medium = Medium(request.param, tmp_path)
    yield medium
    await medium.close()


@pytest.fixture
async def store(medium: Medium) -> Store:
    return await medium.store()


Again = Callable[[Store], Awaitable[Store]]


@pytest.fixture(params=["as it is", "reopened", "crashed"])
def again(request: pytest.FixtureRequest, medium: Medium) -> Again:
    """The store itself, closed and opened again, or found by another process after a kill.

    To a database, which is another process, all three are the same: conftest leaves the last one.
    """

    async def same(store: Store) -> Store:
        return store

    return {"as it is": same, "reopened": medium.reopened, "crashed": medium.crashed}[request.param]


async def payload(store: Store, seq: int) -> GroupPayload:
    (found,) = await store.payloads([seq])
    return found


# --- what is kept


async def test_a_new_store_loads_as_a_run_where_nothing_happened(store: Store, again: Again) -> None:
    assert await (await again(store)).load() == Snapshot(run=RunState(), groups=(), leases=())


async def test_the_run_is_kept_without_the_counts_that_are_zero(store: Store, again: Again) -> None:
    run = RunState(
        policy_version=7,
        paused=True,
        final=True,
        last_seq=9,
        read_position=5,
        prompts_fingerprint="größe",
        ended={S.ACKED: 3, S.STALE: 0, S.DROPPED: 1},
    )
    await store.commit(Batch(run=run))
    assert (await (await again(store)).load()).run == replace(run, ended={S.ACKED: 3, S.DROPPED: 1})


async def test_a_submitted_group_is_kept_with_its_prompt(store: Store, again: Again) -> None:
    await store.commit(submitted(1, 2))
    store = await again(store)
    assert (await store.load()).groups == (pending(1), pending(2))
    assert await payload(store, 2) == GroupPayload(group=pending(2), prompt=prompt(2), rollouts={}, score=None)


async def test_a_scored_group_is_kept_to_the_last_bit(store: Store, again: Again) -> None:
    await store.commit(scored(1))
    found = await payload(await again(store), 1)
    assert found == GroupPayload(
        group=ready(1), prompt=prompt(1), rollouts={row: finished(row) for row in ROWS}, score=score()
    )
    assert found.rollouts[0].turns[0].logprobs.tobytes() == finished(0).turns[0].logprobs.tobytes()


async def test_every_state_is_kept(store: Store, again: Again) -> None:
    await store.commit(scored(1, 2, 3, 4, 5, 6, 7))
    await store.commit(leasing(lease("l", 3, 4)))
    standings = {
        1: ready(1, error="it failed once", engine="http://e"),
        3: leased(3, "l"),
        4: acked(4, "l", changed_at=3000.5),
        5: settled(5, S.STALE),
        6: dropped(6, version=3),
        7: settled(7, S.FAILED, finished=frozenset(), failed=frozenset(ROWS), payload_bytes=0),
    }
    await store.commit(Batch(groups=standings))
    store = await again(store)
    assert await store.groups([1, 3, 4, 5, 6, 7, 99]) == standings
    assert [group.seq for group in (await store.load()).groups] == [1, 2, 3]


async def test_a_standing_in_the_batch_that_submits_the_group_is_the_one_that_counts(store: Store) -> None:
    batch = submitted(1)
    batch.groups[1] = dropped(1)
    await store.commit(batch)
    assert await store.groups([1]) == {1: dropped(1)}


async def test_rows_of_an_outstanding_group_are_told_from_its_settled_rollouts(store: Store, again: Again) -> None:
    await store.commit(submitted(1))
    await store.commit(Batch(groups={1: generating(1)}, rollouts={(1, 1, 0): finished(0)}))
    await store.commit(Batch(rollouts={(1, 1, 2): failed(2)}))  # the standing is not repeated for every rollout
    store = await again(store)
    seen = generating(
        1,
        waiting=(1, 3),
        running=frozenset(),
        finished=frozenset({0}),
        failed=frozenset({2}),
        payload_bytes=finished(0).payload_bytes,
    )
    assert (await store.load()).groups == (seen,)
    assert await store.groups([1]) == {1: seen}
    assert list(await store.list_groups({S.GENERATING}, after=0, limit=9)) == [seen]
    found = await payload(store, 1)
    assert (found.group, found.rollouts) == (seen, {0: finished(0), 2: failed(2)})


async def test_rows_used_up_by_an_earlier_attempt_do_not_come_back(store: Store, again: Again) -> None:
    await store.commit(submitted(1))
    await store.commit(Batch(groups={1: generating(1, attempt=2, running=frozenset({3}))}))
    (group,) = (await (await again(store)).load()).groups
    assert (group.attempt, group.rows, group.waiting) == (2, (3,), (3,))


async def test_a_group_that_ended_is_read_as_it_was_last_written(store: Store, again: Again) -> None:
    await store.commit(scored(1))
    await store.commit(leasing(lease("l", 1)))
    await store.commit(Batch(groups={1: acked(1, "l")}, forget_payloads={1}))
    store = await again(store)
    assert await payload(store, 1) == GroupPayload(group=acked(1, "l"), prompt=None, rollouts={}, score=None)
    assert (await store.load()).groups == ()


# --- what is removed


async def test_forgetting_attempts_leaves_the_current_one(store: Store, again: Again) -> None:
    await store.commit(scored(1))
    await store.commit(Batch(groups={1: generating(1, attempt=2, version=1)}, forget_attempts={1}))
    assert (await payload(store, 1)).rollouts == {}
    await store.commit(Batch(rollouts={(1, 2, 0): finished(0, "second")}, forget_attempts={1}))
    store = await again(store)
    found = await payload(store, 1)
    assert (found.rollouts, found.score, found.prompt) == ({0: finished(0, "second")}, None, prompt(1))


async def test_an_earlier_attempt_is_not_seen_even_where_it_was_not_forgotten(store: Store) -> None:
    await store.commit(scored(1))
    await store.commit(Batch(groups={1: pending(1, attempt=2)}))
    assert await payload(store, 1) == GroupPayload(
        group=pending(1, attempt=2), prompt=prompt(1), rollouts={}, score=None
    )


async def test_forgetting_payloads_leaves_failed_rollouts_for_people(store: Store, again: Again) -> None:
    await store.commit(submitted(1))
    rollouts = {(1, 1, 0): finished(0), (1, 1, 1): failed(1), (1, 1, 2): failed(2)}
    await store.commit(Batch(groups={1: generating(1)}, rollouts=rollouts))
    end = dropped(1, version=0, waiting=(), finished=frozenset({0, 3}), failed=frozenset({1, 2}))
    await store.commit(Batch(groups={1: end}, rollouts={(1, 1, 3): finished(3)}, forget_payloads={1}))
    assert await payload(await again(store), 1) == GroupPayload(
        group=end, prompt=None, rollouts={1: failed(1), 2: failed(2)}, score=None
    )


async def test_a_rollout_of_an_attempt_that_the_same_batch_forgets_is_nothing(store: Store) -> None:
    await store.commit(scored(1))
    batch = Batch(groups={1: pending(1, attempt=2)}, forget_attempts={1})
    batch.rollouts[1, 1, 0] = finished(0, "late")
    batch.scores[1, 1] = score(0.0)
    await store.commit(batch)
    found = await payload(store, 1)
    assert (found.group, found.rollouts, found.score) == (pending(1, attempt=2), {}, None)


async def test_forgetting_what_is_not_there_is_nothing(store: Store) -> None:
    await store.commit(submitted(1))
    await store.commit(Batch(forget_attempts={1, 99}, forget_payloads={98}))
    assert (await store.load()).groups == (pending(1),)


# --- lookups


async def test_known_prompts_are_found_by_identity_and_epoch(store: Store, again: Again) -> None:
    batch = submitted(1)
    second = replace(new_group(2), group=pending(2, prompt_id="prompt-1", epoch=1))
    batch.new_groups[2] = second
    await store.commit(batch)
    found = await (await again(store)).find_prompts([("prompt-1", 0), ("prompt-1", 1), ("prompt-2", 0)])
    assert found == {
        ("prompt-1", 0): StoredPrompt(seq=1, digest=b"digest-1"),
        ("prompt-1", 1): StoredPrompt(seq=2, digest=b"digest-2"),
    }


async def test_an_ended_groups_prompt_is_known_for_ever(store: Store, again: Again) -> None:
    await store.commit(submitted(1))
    await store.commit(Batch(groups={1: dropped(1)}, forget_payloads={1}))
    assert await (await again(store)).find_prompts([("prompt-1", 0)]) == {
        ("prompt-1", 0): StoredPrompt(seq=1, digest=b"digest-1")
    }


async def test_payloads_come_in_the_order_asked_for_and_unknown_ones_are_left_out(store: Store) -> None:
    await store.commit(submitted(1, 2, 3))
    assert [found.group.seq for found in await store.payloads([3, 99, 1])] == [3, 1]


async def test_groups_are_listed_by_state_in_submission_order(store: Store, again: Again) -> None:
    await store.commit(scored(*range(1, 9)))
    await store.commit(Batch(groups={seq: settled(seq, S.STALE) for seq in (2, 5, 8)}))
    await store.commit(Batch(groups={seq: dropped(seq) for seq in (3,)}))
    store = await again(store)

    async def listed(*states: S, after: int = 0, limit: int = 100) -> list[int]:
        return [group.seq for group in await store.list_groups(states, after=after, limit=limit)]

    assert await listed() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert await listed(*S) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert await listed(after=3, limit=2) == [4, 5]
    assert await listed(S.STALE) == [2, 5, 8]
    assert await listed(S.READY, S.STALE, after=1, limit=4) == [2, 4, 5, 6]
    assert await listed(S.DROPPED, S.READY, S.STALE, after=2, limit=3) == [3, 4, 5]
    assert await listed(S.ACKED) == []


# --- leases


async def test_a_lease_is_kept_with_its_groups_in_delivery_order(store: Store, again: Again) -> None:
    made = lease("l", 2, 1, request_id="step-1", consumer="rank0")
    await store.commit(scored(1, 2))
    await store.commit(leasing(made))
    store = await again(store)
    assert await store.lease("l") == made
    assert await store.lease_by_request("step-1") == made
    assert (await store.load()).leases == (made,)
    assert (await store.lease("other"), await store.lease_by_request("step-2")) == (None, None)


async def test_a_renewed_lease_has_its_new_end_and_an_ended_one_is_found_but_not_loaded(
    store: Store, again: Again
) -> None:
    made = lease("l", 1, request_id="step-1")
    await store.commit(scored(1))
    await store.commit(leasing(made))
    await store.commit(Batch(leases={"l": replace(made, expires_at=9999.0)}))
    assert (await store.load()).leases == (replace(made, expires_at=9999.0),)
    ended = replace(made, expires_at=9999.0, state=LeaseState.ENDED)
    await store.commit(Batch(leases={"l": ended}, groups={1: ready(1)}))
    store = await again(store)
    assert (await store.load()).leases == ()
    assert await store.lease_by_request("step-1") == ended


async def test_live_leases_are_loaded_in_the_order_they_were_made(store: Store) -> None:
    await store.commit(scored(1, 2, 3))
    for lease_id, at in (("b", 2000.0), ("c", 2000.0), ("a", 2001.0)):
        await store.commit(leasing(lease(lease_id, {"b": 1, "c": 2, "a": 3}[lease_id], created_at=at)))
    assert [found.lease_id for found in (await store.load()).leases] == ["b", "c", "a"]


async def test_a_group_that_came_back_may_be_leased_again_even_in_the_same_batch(store: Store) -> None:
    first, second = lease("first", 1, 2), lease("second", 1)
    await store.commit(scored(1, 2))
    await store.commit(leasing(first))
    await store.commit(leasing(second))  # the core gave group 1 back and leased it again before it committed
    assert {seq: group.lease_id for seq, group in (await store.groups([1, 2])).items()} == {1: "second", 2: "first"}


async def test_staleness_at_the_bound_is_leased_and_one_more_is_not(store: Store) -> None:
    await store.commit(scored(1, 2, version=3))
    batch = leasing(lease("l", 1), version=3)
    batch.run = RunState(policy_version=3 + MAX_STALENESS, last_seq=2)
    await store.commit(batch)
    batch = leasing(lease("m", 2), version=3)
    batch.run = RunState(policy_version=3 + MAX_STALENESS + 1, last_seq=2)
    with pytest.raises(StoreUnavailable, match="may not take group 2"):
        await store.commit(batch)
    assert (await store.load()).run.policy_version == 3 + MAX_STALENESS


async def test_staleness_is_judged_by_the_version_committed_before_too(store: Store) -> None:
    await store.commit(scored(1, version=3))
    await store.commit(Batch(run=RunState(policy_version=9, last_seq=1)))
    with pytest.raises(StoreUnavailable, match="may not take group 1"):
        await store.commit(leasing(lease("l", 1), version=3))


async def test_a_lease_that_is_over_before_it_was_committed_takes_nothing(store: Store) -> None:
    await store.commit(scored(1))
    void = lease("l", 1, state=LeaseState.VOID)
    await store.commit(Batch(leases={"l": void}, groups={1: pending(1, attempt=2)}))
    assert await store.lease("l") == void


# --- checkpoints


def stale(seq: int, end_number: int) -> Batch:
    return Batch(groups={seq: settled(seq, S.STALE, end_number=end_number)}, forget_payloads={seq})


async def test_checkpoints_are_kept_in_the_order_they_were_made(store: Store, again: Again) -> None:
    first, second = checkpoint("b", 1), checkpoint("a", 2, ends=3)
    await store.commit(Batch(checkpoints={"b": first}))
    await store.commit(Batch(checkpoints={"a": second}))
    store = await again(store)
    assert (await store.load()).checkpoints == (first, second)
    await store.commit(Batch(forget_checkpoints={"b", "unknown"}))
    assert (await store.load()).checkpoints == (second,)


async def test_a_removed_checkpoints_name_may_be_used_again_in_the_same_batch(store: Store) -> None:
    await store.commit(Batch(checkpoints={"a": checkpoint("a", 1)}))
    await store.commit(Batch(checkpoints={"a": checkpoint("a", 2)}, forget_checkpoints={"a"}))
    assert (await store.load()).checkpoints == (checkpoint("a", 2),)


async def test_groups_that_ended_are_found_in_the_order_they_ended(store: Store, again: Again) -> None:
    await store.commit(scored(1, 2, 3, 4))
    for end_number, seq in enumerate((3, 1, 4), start=1):
        await store.commit(stale(seq, end_number))
    store = await again(store)
    assert list(await store.ended_since(0)) == [3, 1, 4]
    assert list(await store.ended_since(2)) == [4]
    assert list(await store.ended_since(3)) == []
    assert (await store.groups([1]))[1].end_number == 2


async def test_prompts_are_kept_back_to_the_oldest_checkpoint_and_go_with_it(store: Store, again: Again) -> None:
    async def kept() -> list[int]:
        return [found.group.seq for found in await store.payloads([1, 2, 3, 4]) if found.prompt is not None]

    await store.commit(scored(1, 2, 3, 4))
    await store.commit(stale(1, 1))
    await store.commit(Batch(checkpoints={"first": checkpoint("first", 1, ends=1)}))
    await store.commit(stale(2, 2))
    await store.commit(Batch(checkpoints={"second": checkpoint("second", 2, ends=2)}))
    await store.commit(stale(3, 3))
    store = await again(store)
    assert await kept() == [2, 3, 4]
    assert all(not found.rollouts for found in await store.payloads([1, 2, 3]))
    await store.commit(Batch(forget_checkpoints={"first"}))
    assert await kept() == [3, 4]
    await store.commit(Batch(forget_checkpoints={"second"}))
    assert await kept() == [4]


# --- what is refused


def _two_leases() -> Batch:
    batch = leasing(lease("l", 1))
    batch.leases["m"] = lease("m", 1)
    return batch


def _request_again() -> Batch:
    return leasing(lease("again", 1, request_id="used"))


REFUSED = {
    "a lease of a group that is not leased by it": Batch(leases={"l": lease("l", 1)}),
    "a lease of a group in another attempt": Batch(leases={"l": lease("l", 1, attempt=2)}, groups={1: leased(1, "l")}),
    "two leases with one group": _two_leases(),
    "a lease of an unknown group": Batch(leases={"l": lease("l", 99)}),
    "a lease with one group twice": Batch(leases={"l": lease("l", 1, 1)}, groups={1: leased(1, "l")}),
    "a second lease for a request id, though the first has ended": _request_again(),
    "a lease of nothing at all by its bounds": Batch(leases={"l": lease("l", max_groups=0, min_groups=0)}),
    "a group held by a lease that was not made with it": Batch(
        leases={"live-l": lease("live-l", 1, 6)}, groups={1: leased(1, "live-l")}
    ),
    "a group held by a lease that has ended": Batch(groups={5: leased(5, "used-l", attempt=2)}),
    "a lease that ends and holds on": Batch(leases={"live-l": lease("live-l", 6, state=LeaseState.ENDED)}),
    "a holder nobody knows": Batch(groups={1: leased(1, "nobody")}),
    "an ack by a lease nobody knows": Batch(groups={1: acked(1, "nobody")}),
    "a rollout of an earlier attempt": Batch(rollouts={(3, 1, 0): finished(0)}),
    "a rollout of a later attempt": Batch(rollouts={(3, 3, 1): finished(1)}),
    "a rollout of an earlier attempt beside the standing that ended it": Batch(
        groups={2: pending(2, attempt=2)}, rollouts={(2, 1, 1): finished(1)}
    ),
    "a rollout of a row that was used up": Batch(rollouts={(3, 2, 0): finished(0)}),
    "a rollout of a row the group does not have": Batch(rollouts={(2, 1, N): finished(N)}),
    "a rollout of an unknown group": Batch(rollouts={(99, 1, 0): failed(0)}),
    "a second rollout of a settled row": Batch(rollouts={(1, 1, 0): finished(0, "other tokens")}),
    "a score of an earlier attempt": Batch(scores={(3, 1): score()}),
    "a score of an unknown group": Batch(scores={(99, 1): score()}),
    "an attempt that falls": Batch(groups={3: pending(3)}),
    "a standing of a group that was never submitted": Batch(groups={99: pending(99)}),
    "a group that ended and goes on": Batch(groups={4: ready(4)}),
    "an acked group that is leased again": leasing(lease("l", 5)),
    "a group submitted twice": submitted(1),
    "a prompt submitted as another group": Batch(
        new_groups={9: replace(new_group(9), group=pending(9, prompt_id="prompt-1"))}
    ),
    "a group without a number": Batch(new_groups={0: new_group(0)}),
    "a pending group with a version": Batch(groups={2: pending(2, version=0)}),
    "a generating group without a version": Batch(groups={2: replace(generating(2), version=None)}),
    "a ready group without a version": Batch(groups={1: replace(ready(1), version=None)}),
    "a negative version": Batch(groups={2: generating(2, version=-1)}),
    "a ready group with rows in wait": Batch(groups={2: replace(generating(2), state=S.READY)}),
    "a row in two places": Batch(groups={2: generating(2, failed=frozenset({1}))}),
    "a row the prompt does not have": Batch(groups={2: generating(2, running=frozenset({N}))}),
    "a ready group that is held": Batch(groups={1: ready(1, lease_id="used-l")}),
    "a leased group nobody holds": Batch(groups={1: replace(ready(1), state=S.LEASED)}),
    "an acked group without its lease": Batch(groups={1: replace(ready(1), state=S.ACKED)}),
    "a drop without a reason": Batch(groups={2: replace(dropped(2), reason=None)}),
    "a reason without a drop": Batch(groups={2: pending(2, reason=dropped(2).reason)}),
    "more tries than attempts": Batch(groups={2: pending(2, tries=2)}),
    "attempt zero": Batch(new_groups={9: replace(new_group(9), group=pending(9, attempt=0, tries=0))}),
    "an end of a group that goes on": Batch(groups={1: ready(1, end_number=1)}),
    "a checkpoint made twice": Batch(checkpoints={"made": checkpoint("made", 9)}),
    "two checkpoints with one number": Batch(checkpoints={"other": checkpoint("other", 1)}),
    "more groups ended than were submitted": Batch(run=RunState(last_seq=1, ended={S.ACKED: 1, S.STALE: 1})),
    "a negative policy version": Batch(run=RunState(policy_version=-1, last_seq=5)),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_batch_that_may_not_be_is_refused_and_nothing_of_it_is_done(
    name: str, store: Store, medium: Medium
) -> None:
    await store.commit(scored(1, 2, 3, 4, 5, 6))
    await store.commit(leasing(lease("used-l", 5, request_id="used")))
    await store.commit(leasing(lease("live-l", 6)))
    await store.commit(Batch(checkpoints={"made": checkpoint("made", 1)}))
    ended = {"used-l": lease("used-l", 5, request_id="used", state=LeaseState.ENDED)}
    standings = {2: generating(2), 3: generating(3, attempt=2, running=frozenset({1, 2, 3})), 4: settled(4, S.STALE)}
    await store.commit(Batch(groups={**standings, 5: acked(5, "used-l")}, leases=ended, forget_attempts={3}))
    before = await store.load()
    listed = await store.list_groups((), after=0, limit=99)

    refused = REFUSED[name]
    company = Batch(
        run=refused.run or RunState(policy_version=1, last_seq=9),
        new_groups={8: new_group(8), **refused.new_groups},
        groups={1: ready(1, error="changed"), **refused.groups},
        rollouts=refused.rollouts,
        scores=refused.scores,
        leases=refused.leases,
        checkpoints=refused.checkpoints,
        forget_payloads={4},
    )
    with pytest.raises(StoreUnavailable):
        await store.commit(company)
    assert await store.load() == before
    assert await (await medium.crashed(store)).load() == before
    assert await store.list_groups((), after=0, limit=99) == listed
    assert await store.payloads([8]) == []
    assert (await payload(store, 4)).rollouts.keys() == set(ROWS)
    assert await store.lease("l") is None

    company = Batch(new_groups={8: new_group(8)}, groups={1: ready(1, error="changed")})  # the same without it
    await store.commit(company)
    assert (await store.groups([8]))[8] == pending(8)


async def test_after_a_refused_batch_nothing_is_committed_until_the_store_was_loaded(store: Store) -> None:
    await store.commit(submitted(1))
    with pytest.raises(StoreUnavailable):
        await store.commit(submitted(1))
    with pytest.raises(StoreUnavailable, match="until the store was loaded again"):
        await store.commit(submitted(2))
    assert await store.find_prompts([("prompt-2", 0)]) == {}
    await store.load()
    await store.commit(submitted(2))
    assert len(await store.find_prompts([("prompt-1", 0), ("prompt-2", 0)])) == 2


# --- order


async def test_commits_asked_for_behind_a_refused_one_are_refused_with_it(store: Store) -> None:
    await store.commit(submitted(1))
    asked = [submitted(2), submitted(1), submitted(3)]
    outcomes = await asyncio.gather(*(store.commit(batch) for batch in asked), return_exceptions=True)
    assert isinstance(outcomes[1], StoreUnavailable)
    assert isinstance(outcomes[2], StoreUnavailable)
    known = {seq for seq in (2, 3) if await store.find_prompts([(f"prompt-{seq}", 0)])}
    assert known == (set() if isinstance(outcomes[0], StoreUnavailable) else {2})


async def test_commits_and_reads_take_effect_in_the_order_they_were_asked_for(store: Store) -> None:
    await store.commit(submitted(1))
    seen = []
    for step in range(40):
        group = pending(1, error=f"step {step}")
        seen += [
            asyncio.create_task(store.commit(Batch(groups={1: group}))),
            asyncio.create_task(store.groups([1])),
            asyncio.create_task(store.payloads([1])),
            asyncio.create_task(store.list_groups({S.PENDING}, after=0, limit=1)),
        ]
    answers = await asyncio.gather(*seen)
    for step in range(40):
        _, standings, payloads, listed = answers[4 * step : 4 * step + 4]
        errors = {standings[1].error, payloads[0].group.error, listed[0].error}  # type: ignore[index,union-attr]  # by position
        assert errors == {f"step {step}"}


async def test_a_read_does_not_see_what_was_forgotten_behind_it(store: Store) -> None:
    await store.commit(scored(1))
    found, _ = await asyncio.gather(
        store.payloads([1]), store.commit(Batch(groups={1: settled(1, S.STALE)}, forget_payloads={1}))
    )
    assert found[0].rollouts.keys() == set(ROWS)
    assert (await payload(store, 1)).rollouts == {}


async def test_giving_up_the_wait_does_not_take_a_commit_back(store: Store) -> None:
    wait = asyncio.create_task(store.commit(submitted(1)))
    await asyncio.sleep(0)  # it was asked for
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    assert (await store.load()).groups == (pending(1),)


async def test_a_batch_of_nothing_is_committed(store: Store) -> None:
    await store.commit(Batch())
    assert await store.load() == Snapshot(run=RunState(), groups=(), leases=())


# --- open and closed


async def test_a_store_that_is_not_open_is_unavailable(store: Store) -> None:
    await store.close()
    await store.close()
    for call in (
        store.load(),
        store.commit(submitted(1)),
        store.groups([1]),
        store.payloads([1]),
        store.find_prompts([("prompt-1", 0)]),
        store.list_groups((), after=0, limit=1),
        store.lease("l"),
        store.lease_by_request("r"),
    ):
        with pytest.raises(StoreUnavailable, match="not open"):
            await call


async def test_closing_finishes_what_was_asked_for(store: Store, medium: Medium) -> None:
    asked = [asyncio.create_task(store.commit(submitted(seq))) for seq in (1, 2, 3)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*asked)
    await store.open()
    assert len((await store.load()).groups) == 3
