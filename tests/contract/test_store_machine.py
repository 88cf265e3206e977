"""Any sequence of batches, legal or not, with kills between them: SQLite and PostgreSQL do what the in-memory store
does, and what section 4 of the design says about leases and attempts holds after every step."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollout_service.core.group import Group, LeaseState
from rollout_service.core.model import DropReason, GroupState
from rollout_service.core.records import Batch, RunState, Snapshot
from rollout_service.errors import StoreUnavailable
from rollout_service.store import MemoryStore, SqliteStore, Store
from rollout_service.store.postgres import PostgresStore
from tests.contract.store_samples import MAX_STALENESS, ROWS, N, failed, finished, lease, new_group, pending, score
from tests.postgres_cluster import cluster

T = TypeVar("T")
S = GroupState
SHM = "/dev/shm"  # noqa: S108  # mkdtemp makes a folder of its own there
SEQS = st.integers(1, 6)
NOW = st.sampled_from([True, True, False])
"""Whether a step is committed by itself or joins the next one's batch."""
LEASE_IDS = ("l1", "l2", "l3", "l4")
LEASES = st.sampled_from(LEASE_IDS)
REQUESTS = st.sampled_from(["r1", "r2", None, None])


class Stores(RuleBasedStateMachine):
    """The in-memory store beside one that a subclass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.kills = 0
        self.batch = Batch()
        self.memory = MemoryStore(MAX_STALENESS)
        self.other = self.made()
        self.both(lambda store: store.open())
        self.standings: dict[int, Group] = {}
        """As committed, ended ones included."""
        self.ended_acked: set[tuple[int, int]] = set()
        self.version = 0

    def made(self) -> Store:
        """A new one, not open yet."""
        raise NotImplementedError

    def found(self) -> Store:
        """What a process finds that starts after the one with `other` was killed; not open yet."""
        raise NotImplementedError

    def removed(self) -> None:
        """Take away what the stores, which are closed, left behind."""
        raise NotImplementedError

    def sound(self) -> None:
        """Assert what must hold inside the other store."""
        raise NotImplementedError

    def seen(self, answer: Any) -> Any:
        """An answer of either store without what the other one counts in its own way."""
        return answer

    def wait(self, what: Awaitable[T]) -> T:
        async def inside() -> T:
            return await what

        return self.runner.run(inside())

    def both(self, ask: Any) -> list[Any]:
        return [self.wait(ask(store)) for store in (self.memory, self.other)]

    def same(self, ask: Any) -> Any:
        in_memory, in_other = (self.seen(answer) for answer in self.both(ask))
        assert in_memory == in_other
        return in_memory

    def teardown(self) -> None:
        self.both(lambda store: store.close())
        self.removed()
        self.runner.close()

    # --- what a batch is made of

    def standing(self, seq: int) -> Group:
        known = self.batch.new_groups.get(seq)
        return self.batch.groups.get(seq) or (known.group if known else self.standings.get(seq, pending(seq)))

    @initialize(seqs=st.sets(SEQS, min_size=3))
    def begin(self, seqs: set[int]) -> None:
        for seq in seqs:
            self.submit(seq)
        self.commit()

    @rule(seq=SEQS, now=NOW)
    def submit(self, seq: int, now: bool = False) -> None:
        self.batch.new_groups[seq] = new_group(seq)
        self.batch.run = replace(self.batch.run or RunState(policy_version=self.version), last_seq=100)
        self.commit_if(now)

    @rule(seq=SEQS, rows=st.sets(st.sampled_from(ROWS), min_size=1), now=NOW)
    def dispatch(self, seq: int, rows: set[int], now: bool = False) -> None:
        waiting = tuple(row for row in ROWS if row not in rows)
        self.put(seq, S.GENERATING, waiting=waiting, running=frozenset(rows), version=self.version)
        self.commit_if(now)

    @rule(seq=SEQS, state=st.sampled_from([S.SCORING, S.READY, S.READY]), age=st.integers(0, 3), now=NOW)
    def settle_all(self, seq: int, state: GroupState, age: int, now: bool = False) -> None:
        """As a new attempt, because rows of the current one may be settled already."""
        attempt = self.standing(seq).attempt + 1
        self.put(seq, state, attempt=attempt, finished=frozenset(ROWS), version=max(0, self.version - age))
        self.batch.rollouts.update({(seq, attempt, row): finished(row) for row in ROWS})
        self.batch.scores[seq, attempt] = score()
        self.batch.forget_attempts.add(seq)
        self.commit_if(now)

    @rule(seq=SEQS, row=st.integers(0, N), ok=st.booleans(), off=st.sampled_from([0, 0, 0, 0, -1, 1]), now=NOW)
    def settle(self, seq: int, row: int, ok: bool, off: int, now: bool = False) -> None:
        attempt = self.standing(seq).attempt + off
        self.batch.rollouts[seq, attempt, row] = finished(row) if ok else failed(row)
        self.commit_if(now)

    @rule(seq=SEQS, rise=st.sampled_from([1, 1, 1, 0, -1]), rows=st.sets(st.sampled_from(ROWS), min_size=2), now=NOW)
    def again(self, seq: int, rise: int, rows: set[int], now: bool = False) -> None:
        attempt = max(1, self.standing(seq).attempt + rise)
        self.put(seq, S.PENDING, waiting=tuple(sorted(rows)), attempt=attempt, version=None)
        self.batch.forget_attempts.add(seq)
        self.commit_if(now)

    @rule(seq=SEQS, state=st.sampled_from([S.STALE, S.DROPPED, S.FAILED]), forget=st.booleans(), now=NOW)
    def end(self, seq: int, state: GroupState, forget: bool, now: bool = False) -> None:
        self.put(seq, state, reason=DropReason.CANCELLED if state is S.DROPPED else None)
        if forget:
            self.batch.forget_payloads.add(seq)
        self.commit_if(now)

    @rule(seq=SEQS, state=st.sampled_from(list(S)), version=st.none() | st.integers(0, 3), holder=st.none() | LEASES)
    def anything(self, seq: int, state: GroupState, version: int | None, holder: str | None) -> None:
        self.put(seq, state, version=version, lease_id=holder)

    @rule(lease_id=LEASES, request=REQUESTS, seqs=st.sets(SEQS, min_size=1, max_size=2), now=NOW)
    def take(self, lease_id: str, request: str | None, seqs: set[int], now: bool = False) -> None:
        """Of ready groups where there are some, else of groups as they are; some are too old, some held already."""
        seqs = {seq for seq in seqs if self.standing(seq).state is S.READY} or seqs
        attempts = {seq: self.standing(seq).attempt for seq in seqs}
        made = lease(lease_id, *sorted(seqs), request_id=request, policy_version=self.version)
        self.batch.leases[lease_id] = replace(made, groups=tuple(sorted(attempts.items())))
        for seq in seqs:
            if self.standing(seq).state is S.READY:
                self.put(seq, S.LEASED, lease_id=lease_id, finished=frozenset(ROWS))
        self.commit_if(now)

    @rule(seqs=st.sets(SEQS, min_size=1, max_size=2), age=st.integers(0, 3), lease_id=LEASES, request=REQUESTS)
    def deliver(self, seqs: set[int], age: int, lease_id: str, request: str | None) -> None:
        """What a run is made of: groups are scored, then leased."""
        self.commit()
        for seq in seqs & self.standings.keys():
            self.settle_all(seq, S.READY, age)
        self.commit()
        self.take(lease_id, request, seqs, now=True)

    @rule(lease_id=LEASES, ack=st.booleans(), now=NOW)
    def finish(self, lease_id: str, ack: bool, now: bool = False) -> None:
        known = self.batch.leases.get(lease_id) or self.wait(self.memory.lease(lease_id))
        if known is None:
            return  # nobody made it
        self.batch.leases[lease_id] = replace(known, state=LeaseState.ENDED, expires_at=known.expires_at + 1)
        for seq, _ in known.groups:
            if self.standing(seq).lease_id == lease_id:
                self.put(seq, S.ACKED if ack else S.READY, acked_by=lease_id if ack else None, finished=frozenset(ROWS))
                if ack:
                    self.batch.forget_payloads.add(seq)
        self.commit_if(now)

    @rule(rise=st.integers(0, 3), now=NOW)
    def bump(self, rise: int, now: bool = False) -> None:
        self.batch.run = RunState(policy_version=self.version + rise, last_seq=100, ended={S.ACKED: rise})
        self.commit_if(now)

    def put(self, seq: int, state: GroupState, **changed: Any) -> None:
        now = self.standing(seq)
        nothing: frozenset[int] = frozenset()
        plain = {"waiting": (), "running": nothing, "finished": nothing, "failed": nothing}
        plain |= {"lease_id": None, "acked_by": None, "reason": None}
        self.batch.groups[seq] = replace(now, **{**plain, "state": state, **changed})

    # --- what happens to it

    def commit_if(self, now: bool) -> None:
        if now:
            self.commit()

    @rule()
    def commit(self) -> None:
        batch, self.batch = self.batch, Batch()
        before = self.snapshot()
        outcomes = []
        for store in (self.memory, self.other):
            try:
                self.wait(store.commit(batch))
                outcomes.append("committed")
            except StoreUnavailable:
                outcomes.append("refused")
        assert outcomes[0] == outcomes[1]
        event(outcomes[0] + (" with leases" if batch.leases else ""))
        if outcomes[0] == "refused":
            assert self.snapshot() == before
        self.learn()

    @rule()
    def kill(self) -> None:
        self.batch = Batch()
        self.kills += 1
        old: list[Store] = [self.memory, self.other]
        self.memory = MemoryStore.reopened(self.memory)
        self.other = self.found()
        self.both(lambda store: store.open())
        for store in old:
            self.wait(store.close())
        self.learn()

    @rule()
    def reopen(self) -> None:
        self.batch = Batch()
        self.both(lambda store: store.close())
        self.both(lambda store: store.open())
        self.learn()

    def snapshot(self) -> Snapshot:
        loaded: Snapshot = self.same(lambda store: store.load())
        return loaded

    def learn(self) -> None:
        """What is committed now, and that it may follow from what was committed before."""
        now: dict[int, Group] = self.same(lambda store: store.groups(range(1, 7)))
        for seq, was in self.standings.items():
            group = now[seq]  # a group that was submitted is never lost
            assert group.attempt >= was.attempt
            if was.state.terminal and group.attempt == was.attempt:
                assert group.state is was.state
            if was.state is S.ACKED:
                self.ended_acked.add((seq, was.attempt))
            if group.state is S.LEASED:
                assert (seq, group.attempt) not in self.ended_acked
        self.standings = now
        self.version = self.snapshot().run.policy_version

    # --- what holds

    @invariant()
    def they_agree_and_what_is_held_is_held_once(self) -> None:
        loaded, *_, leases = self.same(_everything)
        assert tuple(group for _, group in sorted(self.standings.items()) if not group.state.terminal) == loaded.groups
        known = {made.lease_id: made for made in leases if made is not None}
        for group in loaded.groups:
            if group.state is S.LEASED:
                holder = known[group.lease_id]
                assert holder.state is LeaseState.LIVE
                assert (group.seq, group.attempt) in holder.groups
        self.sound()


async def _everything(store: Store) -> list[Any]:
    """All a store says, leases last."""
    answers = await asyncio.gather(
        store.load(),
        store.payloads(range(1, 7)),
        store.list_groups((), after=0, limit=99),
        store.list_groups({S.READY, S.STALE, S.ACKED}, after=1, limit=3),
        store.find_prompts([(f"prompt-{seq}", 0) for seq in range(1, 7)]),
        store.lease_by_request("r1"),
        store.lease_by_request("r2"),
        *(store.lease(lease_id) for lease_id in LEASE_IDS),
    )
    return [*answers[:-4], answers[-4:]]


ORPHANS = """
SELECT (SELECT count(*) FROM payloads WHERE id NOT IN (SELECT payload_id FROM rollouts))
    + (SELECT count(*) FROM rollouts WHERE payload_id NOT IN (SELECT id FROM payloads))
"""


class SqliteStores(Stores):
    other: SqliteStore

    def made(self) -> Store:
        # In memory where that is possible: a kill of the process, which is what is tried here, loses nothing there.
        self.folder = Path(tempfile.mkdtemp(dir=SHM if os.access(SHM, os.W_OK) else None))
        return SqliteStore(self.folder / "0.db", max_staleness=MAX_STALENESS)

    def found(self) -> Store:
        path = self.folder / f"{self.kills}.db"
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{self.other.path}{suffix}", f"{path}{suffix}")
        return SqliteStore(path, max_staleness=MAX_STALENESS)

    def removed(self) -> None:
        shutil.rmtree(self.folder)

    def sound(self) -> None:
        orphans = self.wait(self.other._read(lambda connection: connection.execute(ORPHANS).fetchone()))
        assert orphans == (0,)


COUNTED = """
SELECT count(*) FILTER (WHERE state = 'pending') AS pending, count(*) FILTER (WHERE state = 'generating') AS generating,
    count(*) FILTER (WHERE state = 'scoring') AS scoring, count(*) FILTER (WHERE state = 'ready') AS ready,
    count(*) FILTER (WHERE state = 'leased') AS leased,
    coalesce(sum(payload_bytes) FILTER (WHERE state IN ('scoring', 'ready')), 0) AS held_bytes,
    coalesce(sum(prompt_bytes) FILTER (WHERE state IN ('pending', 'generating', 'scoring', 'ready', 'leased')), 0)
        AS prompt_bytes
FROM groups
"""


class PostgresStores(Stores):
    """Its counts of ended groups follow the groups, and not only what the run's row was written with."""

    other: PostgresStore

    def made(self) -> Store:
        self.databases = AsyncExitStack()
        self.url = self.wait(self.databases.enter_async_context(cluster().database()))
        return self.found()

    def found(self) -> Store:
        return PostgresStore(self.url, max_staleness=MAX_STALENESS, pool_size=2)

    def removed(self) -> None:
        self.wait(self.databases.aclose())

    def seen(self, answer: Any) -> Any:
        if isinstance(answer, Snapshot):
            return replace(answer, run=replace(answer.run, ended={}))
        return [self.seen(part) for part in answer] if isinstance(answer, list) else answer

    def sound(self) -> None:
        """The counters are what a count finds."""
        whole = self.wait(self.other.overview()).whole
        counted = dict(self.wait(self.other._look(lambda connection: connection.fetchrow(COUNTED))))
        assert (whole.held_bytes, whole.prompt_bytes) == (counted.pop("held_bytes"), counted.pop("prompt_bytes"))
        assert {state: count for state, count in whole.counts.items() if not state.terminal} == counted


SETTINGS = settings(
    phases=[Phase.reuse, Phase.generate, Phase.shrink],  # explaining a failure traces every line: far too slow
    max_examples=25,
    stateful_step_count=20,
    deadline=None,  # every commit syncs a real disk, or asks a server
    suppress_health_check=[HealthCheck.too_slow],
)
SqliteStores.TestCase.settings = SETTINGS
PostgresStores.TestCase.settings = settings(SETTINGS, max_examples=12)  # every look is a few round trips to a server
TestSqlite = SqliteStores.TestCase
TestPostgres = PostgresStores.TestCase
