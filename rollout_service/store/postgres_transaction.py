"""One transaction of a shared store on PostgreSQL.

What always holds: what is returned of a group, a lease or the run was read after it was locked, unless its docstring
says that it locks nothing; rows of groups are locked by rising number. What is locked stays so until the transaction
ends. Statements are READ COMMITTED: each sees what was committed before it began. The policy version changes in
transactions that are alone: that is what makes a lease within the staleness bound when it commits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rollout_service.core.group import Checkpoint, Group, Lease
from rollout_service.core.model import Prompt
from rollout_service.core.records import Batch, GroupPayload, StoredPrompt
from rollout_service.core.shared import Claimed, SharedRun, Whole
from rollout_service.store import postgres_queries as sql
from rollout_service.store import postgres_read as read
from rollout_service.store.postgres_write import BatchWriter, refusals
from rollout_service.store.shared import Signal

if TYPE_CHECKING:
    from asyncpg import Connection, Record


class PostgresTransaction:
    """A `Transaction` on a connection whose transaction somebody else begins and ends. `begin` comes first."""

    def __init__(self, connection: Connection[Record], *, max_staleness: int) -> None:
        self._connection = connection
        self._writer = BatchWriter(connection, max_staleness=max_staleness, numbered=True)
        self._locked: set[int] = set()
        """Groups whose rows this transaction has locked."""
        self._run = SharedRun()
        self._whole = Whole(counts={})
        self._now = 0.0
        self.signals: set[Signal] = set()

    async def begin(self) -> None:
        """Read the run; it is locked by now, alone or with others."""
        self._run, self._whole, self._now = await read.run(self._connection)

    @property
    def now(self) -> float:
        return self._now

    @property
    def run(self) -> SharedRun:
        return self._run

    @property
    def whole(self) -> Whole:
        return self._whole

    async def hold_run(self) -> None:
        await self._connection.execute(sql.HOLD_RUN)
        self._run, self._whole, _ = await read.run(self._connection)

    async def set_run(self, run: SharedRun) -> None:
        version = self._run.run.policy_version
        with refusals():
            await self._connection.execute(sql.WRITE_SHARED_RUN, *read.shared_run_row(run))
        self._run = replace(run, run=replace(run.run, ended=self._run.run.ended, ends=self._run.run.ends))
        if run.run.policy_version != version:
            await self._writer.guard_again()

    async def groups(self, seqs: Collection[int]) -> Mapping[int, Claimed]:
        await self._lock(seqs)
        return {found.group.seq: found for found in await read.standings(self._connection, seqs)}

    async def claims(self, seqs: Collection[int]) -> Mapping[int, tuple[str | None, int]]:
        rows = await self._connection.fetch(sql.LOCK_GROUPS, list(seqs))
        self._locked.update(row["seq"] for row in rows)
        return {row["seq"]: (row["owner"], row["claim"]) for row in rows}

    async def claims_of(self, replica_id: str) -> Mapping[int, int]:
        return {row["seq"]: row["claim"] for row in await self._connection.fetch(sql.CLAIMS_OF, replica_id)}

    async def claimable(self, limit: int, *, pending: bool) -> Sequence[Claimed]:
        return await self._claimed(await self._locked_by(sql.LOCK_CLAIMABLE, limit, pending))

    async def claimable_to_score(self, limit: int) -> Sequence[Claimed]:
        return await self._claimed(await self._locked_by(sql.LOCK_TO_SCORE, limit))

    async def _claimed(self, seqs: list[int]) -> Sequence[Claimed]:
        if not seqs:
            return []
        found = {claimed.group.seq: claimed for claimed in await read.standings(self._connection, seqs)}
        return [found[seq] for seq in seqs]

    async def ready(self, limit: int, *, oldest: int) -> Sequence[Group]:
        return await self._standings(await self._locked_by(sql.LOCK_READY, limit, oldest))

    async def outdated(self, oldest: int) -> Sequence[Group]:
        return await self._standings(await self._locked_by(sql.LOCK_OUTDATED, oldest))

    async def opened(self) -> Sequence[Group]:
        return await self._standings(await self._locked_by(sql.LOCK_OPENED))

    async def lease(self, lease_id: str) -> Lease | None:
        row = await self._connection.fetchrow(sql.LOCK_LEASE, read.kept(lease_id))
        if row is None:
            return None
        self._locked.update(row["locked"])
        return read.lease_from(row)

    async def lease_by_request(self, request_id: str) -> Lease | None:
        return await read.lease(self._connection, sql.LOCK_LEASE_BY_REQUEST, request_id)

    async def leases_due(self, limit: int) -> Sequence[Lease]:
        rows = await self._connection.fetch(sql.LOCK_LEASES_DUE, self._now, limit)
        return [read.lease_from(row) for row in rows]

    async def live_leases(self) -> Sequence[Lease]:
        return [read.lease_from(row) for row in await self._connection.fetch(sql.LOCK_LIVE_LEASES)]

    async def checkpoints(self) -> Sequence[Checkpoint]:
        return await read.checkpoints(self._connection)

    async def ended_since(self, ends: int) -> Sequence[int]:
        return await read.ended_since(self._connection, ends)

    async def payloads(self, seqs: Sequence[int]) -> Sequence[GroupPayload]:
        return await read.payloads(self._connection, seqs)

    async def paced(self, *, acked: bool) -> Collection[int]:
        return {row["seq"] for row in await self._connection.fetch(sql.FIND_PACED, acked)}

    async def find_prompts(self, keys: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], StoredPrompt]:
        return await read.find_prompts(self._connection, keys)

    async def prompts(self, seqs: Sequence[int]) -> Mapping[int, Prompt]:
        return await read.prompts(self._connection, seqs)

    async def tokens(self, seqs: Collection[int]) -> Mapping[int, int]:
        return await read.tokens(self._connection, seqs)

    async def once(self, replica_id: str, number: int) -> bool:
        return await self._connection.fetchval(sql.ONCE, replica_id, number) is not None

    async def write(self, batch: Batch, *, owner: str | None = None) -> Mapping[int, int]:
        named = batch.groups.keys() | {key[0] for key in batch.rollouts} | {key[0] for key in batch.scores}
        named |= batch.forget_attempts | batch.forget_payloads
        await self._lock(named - batch.new_groups.keys())  # by number; most were locked when they were read
        with refusals():
            return await self._writer.write(batch, owner=owner)

    def signal(self, signal: Signal) -> None:
        self.signals.add(signal)

    async def _lock(self, seqs: Collection[int]) -> None:
        missing = set(seqs) - self._locked
        if missing:
            await self.claims(missing)

    async def _locked_by(self, query: str, *parameters: object) -> list[int]:
        """What a query locked, in its order."""
        seqs = [row["seq"] for row in await self._connection.fetch(query, *parameters)]
        self._locked.update(seqs)
        return seqs

    async def _standings(self, seqs: list[int]) -> list[Group]:
        """Of locked groups, in this order; by another statement than locked them, which may have waited."""
        if not seqs:
            return []
        found = await read.groups(self._connection, seqs)
        return [found[seq] for seq in seqs]
