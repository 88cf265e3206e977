"""What the PostgreSQL store adds to what every store holds: few round trips, large batches in parts, heartbeats that
wait for nobody, and order among transactions that meet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import asyncpg
import pytest

from rollout_service.core.group import Lease, LeaseState
from rollout_service.core.model import GroupState
from rollout_service.core.records import Batch
from rollout_service.core.shared import Replica
from rollout_service.errors import StoreUnavailable
from rollout_service.store import postgres_read, postgres_write
from rollout_service.store.postgres import PostgresStore
from rollout_service.store.postgres_transaction import PostgresTransaction
from rollout_service.store.shared import Signal, Transaction
from tests.contract.store_samples import (
    MAX_STALENESS,
    ROWS,
    acked,
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
WAIT_S = 20.0


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with cluster().database() as url:
        yield url


@pytest.fixture
async def store(url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(url, max_staleness=MAX_STALENESS, pool_size=4)
    await store.open()
    yield store
    await store.close()


def replica(replica_id: str) -> Replica:
    return Replica(replica_id=replica_id, name=f"name of {replica_id}", service="1", rules="r")


async def generated(store: PostgresStore, owner: str, *seqs: int) -> None:
    async def work(tx: Transaction) -> None:
        await tx.write(submitted(*seqs))
        await tx.write(Batch(groups={seq: generating(seq) for seq in seqs}), owner=owner)

    await store.transact(work)


# --- how much it asks


async def test_what_a_replica_commits_takes_eight_round_trips_however_much_it_is(url: str) -> None:
    store = PostgresStore(url, max_staleness=MAX_STALENESS, pool_size=1)
    await store.open()
    asked: list[str] = []

    async def settle(tx: Transaction, first: int) -> None:
        assert isinstance(tx, PostgresTransaction)
        if not asked:
            tx._connection.add_query_logger(lambda query: asked.append(query.query))
        assert await tx.once("a", first)
        assert len(await tx.claims(range(first, first + 20))) == 20
        batch = Batch()
        for seq in range(first, first + 12):
            batch.groups[seq], batch.scores[seq, 1] = ready(seq), score()
            batch.rollouts.update({(seq, 1, row): finished(row) for row in ROWS})
        for seq in range(first + 12, first + 16):
            batch.groups[seq] = settled(seq, S.STALE)
            batch.rollouts[seq, 1, 0] = failed(0)
            batch.forget_payloads.add(seq)
        for seq in range(first + 16, first + 20):
            batch.groups[seq] = pending(seq, attempt=2)
            batch.forget_attempts.add(seq)
        await tx.write(batch, owner="a")

    for first in (1, 21):  # the first time a connection learns the statements
        await generated(store, "a", *range(first, first + 20))
        asked.clear()
        await store.transact(partial(settle, first=first))
        await asyncio.sleep(0)  # the last one is noted in the loop's next turn
    assert (asked[0][:6], asked[-1][-6:]) == ("BEGIN;", "COMMIT")
    assert len(asked) <= 8, asked
    whole = (await store.overview()).whole
    assert {state: count for state, count in whole.counts.items() if count} == {S.READY: 24, S.STALE: 8, S.PENDING: 8}
    await store.close()


async def test_a_lease_and_its_ack_take_few_round_trips(url: str) -> None:
    store = PostgresStore(url, max_staleness=MAX_STALENESS, pool_size=1)
    await store.open()
    asked: list[str] = []

    async def make(tx: Transaction, made: Lease) -> None:
        assert isinstance(tx, PostgresTransaction)
        if not asked:
            tx._connection.add_query_logger(lambda query: asked.append(query.query))
        seqs = [group.seq for group in await tx.ready(8, oldest=0)]
        assert seqs == [seq for seq, _ in made.groups]
        await tx.write(leasing(made))

    async def ack(tx: Transaction, made: Lease) -> None:
        assert await tx.lease(made.lease_id) == made
        seqs = [seq for seq, _ in made.groups]
        assert len(await tx.groups(seqs)) == 8
        batch = Batch(leases={made.lease_id: replace(made, state=LeaseState.ENDED)}, forget_payloads=set(seqs))
        batch.groups.update({seq: acked(seq, made.lease_id) for seq in seqs})
        await tx.write(batch)
        tx.signal(Signal.RUN)

    for first in (1, 21):  # the first time a connection learns the statements
        await store.transact(lambda tx, first=first: tx.write(scored(*range(first, first + 8))))  # type: ignore[misc]  # a default
        made = lease(f"lease-{first}", *range(first, first + 8))
        trips = []
        for asking in (
            store.transact(partial(make, made=made)),
            store.payloads(range(first, first + 8)),
            store.transact(partial(ack, made=made)),
        ):
            asked.clear()
            await asking
            await asyncio.sleep(0)  # the last one is noted in the loop's next turn
            trips.append(len(asked))
    assert trips == [7, 4, 8]
    assert "pg_notify" in asked[-1]
    assert asked[-1].endswith("COMMIT")
    await store.close()


async def test_a_lease_is_locked_with_its_groups(store: PostgresStore, url: str) -> None:
    await store.commit(scored(1, 2, 3))
    await store.commit(leasing(lease("l", 1, 3)))
    other = await asyncpg.connect(url)

    async def look(tx: Transaction) -> list[int]:
        await tx.lease("l")
        rows = await other.fetch("SELECT seq FROM groups ORDER BY seq FOR UPDATE SKIP LOCKED")
        return [row["seq"] for row in rows]

    assert await store.transact(look) == [2]
    await other.close()


async def test_a_group_may_come_in_together_with_its_lease(store: PostgresStore) -> None:
    batch = scored(1, 2)
    made = lease("l", 1, 2)
    batch.groups[1], batch.groups[2] = leased(1, "l"), acked(2, "l")
    batch.leases["l"] = made
    with pytest.raises(StoreUnavailable, match="may not take group 2"):
        await store.commit(batch)
    await store.load()
    batch.groups[2] = leased(2, "l")
    await store.commit(batch)
    loaded = await store.load()
    assert (loaded.groups, loaded.leases) == ((leased(1, "l"), leased(2, "l")), (made,))


async def test_a_batch_of_any_size_is_sent_in_parts(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_write, "MESSAGE_BYTES", 1000)
    monkeypatch.setattr(postgres_read, "ASIDE_BYTES", 1000)
    seqs = range(1, 10)
    await store.commit(scored(*seqs))
    found = await store.payloads(seqs)
    assert [one.group for one in found] == [ready(seq) for seq in seqs]
    assert all(one.rollouts == {row: finished(row) for row in ROWS} and one.score == score() for one in found)
    assert await store.prompts(seqs) == {seq: prompt(seq) for seq in seqs}


# --- replicas


async def test_a_heartbeat_waits_for_no_transaction(store: PostgresStore) -> None:
    await generated(store, "a", 1)
    await store.join(replica("a"), lease_s=60)
    inside, go = asyncio.Event(), asyncio.Event()

    async def hang(tx: Transaction) -> None:
        await tx.claims([1])
        await tx.once("a", 1)
        await tx.hold_run()
        inside.set()
        await go.wait()

    hanging = [asyncio.create_task(store.transact(hang, alone=True)) for _ in range(6)]  # more than the pool has
    await asyncio.wait_for(inside.wait(), WAIT_S)
    assert await asyncio.wait_for(store.beat(replica("a"), lease_s=60), WAIT_S)
    assert not any(task.done() for task in hanging)
    go.set()
    await asyncio.gather(*hanging)


async def test_what_an_expelled_replica_claims_late_is_taken_from_it_too(store: PostgresStore) -> None:
    await generated(store, "a", 1)
    await store.join(replica("a"), lease_s=-1)
    await store.join(replica("b"), lease_s=60)
    assert list(await store.expel()) == ["name of a"]
    before = await store.overview()
    await generated(store, "a", 2)  # it does not know yet
    await generated(store, "b", 3)
    assert not await store.beat(replica("a"), lease_s=60)
    assert list(await store.expel()) == []
    owners = await store.transact(lambda tx: tx.claims([1, 2, 3]))
    assert owners == {1: (None, 1), 2: (None, 1), 3: ("b", 1)}
    after = await store.overview()
    assert (after.run.taken, after.run.revision) == (before.run.taken + 1, before.run.revision + 1)


async def test_nothing_is_taken_where_nobody_is_overdue(store: PostgresStore) -> None:
    await store.join(replica("a"), lease_s=60)
    await generated(store, "a", 1)
    assert list(await store.expel()) == []
    assert (await store.overview()).run.revision == 0


# --- transactions that meet


async def test_transactions_that_lock_in_a_circle_both_come_through(store: PostgresStore) -> None:
    await store.commit(submitted(1, 2))
    met = asyncio.Barrier(2)
    runs = []

    async def lock(tx: Transaction, first: int, second: int) -> None:
        runs.append(first)
        await tx.claims([first])
        if len(runs) <= 2:
            await met.wait()
        await tx.claims([second])

    await asyncio.gather(
        store.transact(lambda tx: lock(tx, 1, 2)),
        store.transact(lambda tx: lock(tx, 2, 1)),
    )
    assert len(runs) == 3  # one of them was run again


async def test_a_store_that_closes_waits_for_the_transactions_under_way(store: PostgresStore) -> None:
    inside, go = asyncio.Event(), asyncio.Event()

    async def work(tx: Transaction) -> None:
        inside.set()
        await go.wait()
        await tx.write(submitted(1))

    under_way = asyncio.create_task(store.transact(work))
    await asyncio.wait_for(inside.wait(), WAIT_S)
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    with pytest.raises(StoreUnavailable, match="not open"):
        await store.load()
    go.set()
    await asyncio.gather(under_way, closing)
    await store.open()
    assert (await store.load()).groups == (pending(1),)


async def test_a_unique_key_that_was_taken_meanwhile_has_the_work_run_again(store: PostgresStore) -> None:
    met = asyncio.Barrier(2)
    seen: list[Any] = []

    async def submit(tx: Transaction, seq: int) -> None:
        known = await tx.find_prompts([("prompt-1", 0)])
        seen.append(known)
        if len(seen) <= 2:
            await met.wait()
        if not known:
            await tx.write(Batch(new_groups={seq: _as(seq, "prompt-1")}))

    await asyncio.gather(*(store.transact(partial(submit, seq=seq)) for seq in (1, 2)))
    assert [bool(known) for known in seen] == [False, False, True]
    assert (await store.overview()).whole.counts[S.PENDING] == 1


def _as(seq: int, prompt_id: str) -> Any:
    return replace(new_group(seq), group=pending(seq, prompt_id=prompt_id))


# --- signals


async def test_after_a_gap_in_notifications_everything_counts_as_signalled(store: PostgresStore, url: str) -> None:
    heard: set[Signal] = set()
    everything = asyncio.Event()

    def hear(signal: Signal) -> None:
        heard.add(signal)
        if heard == set(Signal):
            everything.set()

    store.watch(hear)
    connection = await asyncpg.connect(url)
    await connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    await connection.close()
    await asyncio.wait_for(everything.wait(), WAIT_S)
    await store.commit(submitted(1))


async def test_reading_may_take_longer_than_a_pause_within_a_transaction(url: str) -> None:
    """A pause is broken off after half of the timeout; then the limit is what it was."""
    store = PostgresStore(url, max_staleness=MAX_STALENESS, statement_timeout_s=1.0)
    await store.open()

    async def prepare(*_: object) -> str:
        await asyncio.sleep(0.8)  # the pause itself
        return "read"

    async def work(prepared: str, tx: Transaction) -> tuple[str, str]:
        assert isinstance(tx, PostgresTransaction)
        query = "SELECT current_setting('idle_in_transaction_session_timeout')"
        return prepared, await tx._connection.fetchval(query)

    try:
        assert await store.try_exclusively("prompts", prepare, work) == ("read", "500ms")
    finally:
        await store.close()
