"""What the PostgreSQL store reads stays small beside a run that is long: its plans are made once by a connection, over
tables that were empty or held only what had ended, and are still the right ones when the tables have grown."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rollout_service.core.group import LeaseState
from rollout_service.core.model import GroupState
from rollout_service.core.records import Batch
from rollout_service.core.shared import Replica
from rollout_service.store.postgres import PostgresStore
from rollout_service.store.postgres_transaction import PostgresTransaction
from rollout_service.store.shared import Transaction
from tests.contract.store_samples import (
    MAX_STALENESS,
    ROWS,
    acked,
    finished,
    generating,
    lease,
    leased,
    ready,
    score,
    settled,
    submitted,
)
from tests.postgres_cluster import cluster

S = GroupState
VERSION = 300
OLD = 100_000
"""Groups that ended before."""
FIRST = 1_000_000
"""Above the numbers of all of them."""
MORE = 2_000_000
"""Above the number of every group that is worked for: of many that are outstanding."""
LOT = 8

# As a run leaves them: nothing but their standings and leases. Each rule and reference holds, so that none is checked.
END_MANY = f"""
SET LOCAL session_replication_role = replica;
INSERT INTO leases (lease_id, request_id, max_groups, min_groups, lease_s, policy_version, created_at, expires_at,
    state)
SELECT 'old-' || i, 'old-' || i, 8, 1, 600, i % {VERSION}, i, i + 600, 'ended'
FROM generate_series(1, {OLD // LOT}) AS i;
INSERT INTO groups (seq, prompt_id, epoch, digest, num_generations, prompt_bytes, state, attempt, tries, version, rows,
    payload_bytes, acked_by, end_number, submitted_at, changed_at)
SELECT 1000 + i, 'old-' || i, 0, '', 4, 9, 'acked', 1, 1, i % {VERSION}, 'ffff', 9, 'old-' || (i - 1) / {LOT} + 1,
    1000 + i, i, i
FROM generate_series(1, {OLD}) AS i;
INSERT INTO lease_groups (lease_id, position, seq, attempt)
SELECT 'old-' || (i - 1) / {LOT} + 1, (i - 1) % {LOT}, 1000 + i, 1 FROM generate_series(1, {OLD}) AS i;
SELECT setval('group_ends', 1000 + {OLD})
"""  # noqa: S608 - numbers of this module

ADD_MORE = f"""
SET LOCAL session_replication_role = replica;
INSERT INTO groups (seq, prompt_id, epoch, digest, num_generations, prompt_bytes, state, attempt, tries, version, rows,
    payload_bytes, submitted_at, changed_at)
SELECT {MORE} + i, 'more-' || i, 0, '', 4, 9, CASE WHEN i > 2000 THEN 'pending' ELSE 'ready' END, 1, 1,
    CASE WHEN i > 2000 THEN NULL ELSE {VERSION} END, CASE WHEN i > 2000 THEN 'wwww' ELSE 'ffff' END, 0, i, i
FROM generate_series(1, 8000) AS i;
INSERT INTO prompts SELECT seq, '' FROM groups WHERE seq > {MORE};
INSERT INTO scores SELECT seq, 1, '' FROM groups WHERE seq > {MORE} AND state = 'ready';
INSERT INTO rollouts SELECT seq, 1, i, true, 9, 9, '' FROM groups, generate_series(0, 3) AS i
WHERE seq > {MORE} AND state = 'ready'
"""  # noqa: S608 - numbers of this module

END_MORE = f"""
SET LOCAL session_replication_role = replica;
DELETE FROM rollouts WHERE seq > {MORE}; DELETE FROM scores WHERE seq > {MORE};
DELETE FROM prompts WHERE seq > {MORE}; DELETE FROM groups WHERE seq > {MORE}
"""  # noqa: S608 - numbers of this module

# A vacuum of the server's own would have everything planned anew.
NO_VACUUM = "; ".join(
    f"ALTER TABLE {table} SET (autovacuum_enabled = off)"
    for table in ("run", "tallies", "groups", "prompts", "rollouts", "scores", "leases", "lease_groups", "batches")
)

TELL_PLANS = """
LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0; SET auto_explain.log_analyze = on;
SET auto_explain.log_buffers = on; SET auto_explain.log_timing = off; SET auto_explain.log_format = json;
SET auto_explain.log_nested_statements = on; SET auto_explain.log_level = notice
"""


@dataclass
class Reads:
    """Pages of 8 KiB that each statement touched at most, in memory or not; those that triggers run are among them."""

    pages: dict[str, int] = field(default_factory=dict)

    def hear(self, _connection: object, message: Any) -> None:
        _, found, plan = str(message.message).partition("plan:\n")
        if found:
            told = json.loads(plan)
            text, top = " ".join(told["Query Text"].split()), told["Plan"]
            pages = top["Shared Hit Blocks"] + top["Shared Read Blocks"]
            self.pages[text] = max(pages, self.pages.get(text, 0))

    def more_than(self, few: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """What reads several times as much as it did: before and now. Indexes of a large table have more levels, and
        removed rows stay in them until a vacuum."""
        return {text: (few.get(text, 0), now) for text, now in self.pages.items() if now > 4 * few.get(text, 0) + 40}


@pytest.fixture
async def store() -> AsyncIterator[PostgresStore]:
    """Of one connection."""
    async with cluster().database() as url:
        store = PostgresStore(url, max_staleness=MAX_STALENESS, pool_size=1)
        await store.open()
        yield store
        await store.close()


async def execute(store: PostgresStore, *scripts: str) -> None:
    """On its connection."""

    async def work(tx: Transaction) -> None:
        assert isinstance(tx, PostgresTransaction)
        await tx._connection.execute("SET LOCAL auto_explain.log_min_duration = -1")
        for script in scripts:
            await tx._connection.execute(script)

    await store.transact(work, alone=True)


async def reads_of(store: PostgresStore) -> Reads:
    """What is read on its connection from now on."""
    reads = Reads()

    async def work(tx: Transaction) -> None:
        assert isinstance(tx, PostgresTransaction)
        tx._connection.add_log_listener(reads.hear)
        await tx._connection.execute(TELL_PLANS)

    await store.transact(work)
    return reads


async def work_for(store: PostgresStore, first: int, *, others: bool = False) -> None:
    """Two lots of groups come in, of which one is worked for, leased and acked; whatever replicas ask is asked.

    `others`: there are other outstanding groups, so that what looks at all of them is left out.
    """
    seqs = list(range(first, first + LOT))

    async def submit(tx: Transaction) -> None:
        await tx.hold_run()
        await tx.set_run(replace(tx.run, run=replace(tx.run.run, policy_version=VERSION)))
        assert not await tx.find_prompts([(f"prompt-{seq}", 0) for seq in seqs])
        await tx.write(submitted(*range(first, first + 2 * LOT)))

    async def claim(tx: Transaction) -> None:
        found = await tx.claimable(LOT, pending=True)
        assert [claimed.group.seq for claimed in found] == seqs
        await tx.write(Batch(groups={seq: generating(seq, version=VERSION) for seq in seqs}), owner="a")
        assert len(await tx.prompts(seqs)) == len(await tx.claims_of("a")) == LOT

    async def settle(tx: Transaction) -> None:
        assert len(await tx.claims(seqs)) == LOT
        assert await tx.once("a", first)
        batch = Batch(groups={seq: ready(seq, version=VERSION) for seq in seqs})
        batch.rollouts.update({(seq, 1, row): finished(row) for seq in seqs for row in ROWS})
        batch.scores.update({(seq, 1): score() for seq in seqs})
        await tx.write(batch)

    async def make_lease(tx: Transaction) -> None:
        assert await tx.lease_by_request(made.lease_id) is None
        assert len(await tx.ready(LOT, oldest=VERSION)) == LOT
        groups = {seq: leased(seq, made.lease_id, version=VERSION) for seq in seqs}
        await tx.write(Batch(leases={made.lease_id: made}, groups=groups))

    async def ack(tx: Transaction) -> None:
        assert await tx.lease(made.lease_id) == made
        assert len(await tx.groups(seqs)) == len(await tx.tokens(seqs)) == LOT
        batch = Batch(leases={made.lease_id: replace(made, state=LeaseState.ENDED)})
        batch.groups.update({seq: acked(seq, made.lease_id, version=VERSION) for seq in seqs})
        batch.forget_payloads.update(seqs)
        await tx.write(batch)

    async def keep_house(tx: Transaction) -> None:
        assert not await tx.leases_due(LOT)
        assert len(await tx.live_leases()) == 1
        assert len(await tx.paced(acked=True)) >= LOT
        assert not await tx.outdated(VERSION)
        if not others:
            assert len(await tx.opened()) == LOT
        assert not await tx.checkpoints()

    made = lease(f"lease-{first}", *seqs, policy_version=VERSION, request_id=f"lease-{first}", expires_at=9e9)
    await store.transact(submit)
    await store.transact(claim)
    await store.transact(settle)
    await store.transact(make_lease)
    assert len(await store.payloads(seqs)) == LOT
    await store.transact(keep_house, alone=True)
    assert (await store.overview()).leases == 1
    if not others:
        assert len((await store.load()).groups) == 2 * LOT
    await store.list_groups([S.LEASED, S.FAILED], after=0, limit=LOT)
    await store.list_groups([], after=first, limit=LOT)
    await store.transact(ack)
    await store.ended_since(int((await store.groups(seqs))[first].end_number or 0))
    await store.expel()
    rest = range(first + LOT, first + 2 * LOT)
    await store.transact(lambda tx: tx.write(Batch(groups={seq: settled(seq, S.FAILED) for seq in rest})))


async def test_plans_that_were_made_for_small_tables_read_no_more_of_large_ones(store: PostgresStore) -> None:
    await store.join(Replica(replica_id="a", name="a", service="1", rules="r"), lease_s=600)
    await execute(store, NO_VACUUM, "ANALYZE")
    reads = await reads_of(store)
    await work_for(store, 1)  # planned now, for tables that are known to be empty
    few, reads.pages = reads.pages, {}
    assert len(few) > 40
    await execute(store, END_MANY, ADD_MORE)
    reads.pages.clear()
    await work_for(store, FIRST, others=True)
    assert not reads.more_than(few)

    await execute(store, END_MORE, "ANALYZE")
    await work_for(store, FIRST + 1000)  # planned anew, for a run of which nothing is outstanding
    await execute(store, ADD_MORE)
    reads.pages.clear()
    await work_for(store, FIRST + 2000, others=True)
    assert not reads.more_than(few)
