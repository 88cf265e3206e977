"""One run over three replicas on one PostgreSQL, any of which comes and goes; checked at its end from five sides.

What always holds: the trainer's history, the service's own words, the rows in the database, the rules of the schema and
the engine's journal agree, or the run fails. Faults of the services themselves (events named `…_raised`, tracebacks)
fail it, too.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import asyncpg

from rollout_service.simulator.content import EOS
from tests.durability.history import Attempt
from tests.durability.lives import Lives
from tests.durability.tale import Plan, Tale, attempt_of, changes, judge
from tests.replicas_chaos.chooser import Chooser, SharedHistory
from tests.replicas_chaos.member import Member
from tests.replicas_chaos.network import Cable, Network
from tests.service import free_port, tables, to_toml
from tests.store_audit import audit_postgres

T = TypeVar("T")
LEASE_S = 2.0
"""Of a replica: takeovers are quick, and a loaded machine still beats in time."""
STATEMENT_TIMEOUT_S = 6.0
"""A replica that stands still in a transaction keeps its locks for half of this."""
FORGIVEN_S = 5.0
"""For so long after it stood still a replica may ask for what is somebody else's by now: it settles nothing."""
MAX_TOKENS = 64
FINISHED_AND_WANTED = """
SELECT r.seq, r.attempt, r.idx FROM rollouts AS r JOIN groups AS g ON g.seq = r.seq AND g.attempt = r.attempt
WHERE r.ok AND g.state IN ('generating', 'scoring', 'ready', 'leased')
"""
OUR_FAULT = re.compile(r"\w+_raised\b|Traceback|request_failed|rollout_internal_error|engine_check_failed|stop_failed")


class SharedStory(Tale):
    """Use `async with SharedStory.told(plan, lives, directory, url) as story`."""

    history: SharedHistory
    trainer: Chooser

    def __init__(
        self, plan: Plan, lives: Sequence[Lives], directory: Path, url: str, network: Network | None = None
    ) -> None:
        super().__init__(plan, host="127.0.0.1" if network is None else network.here(Cable.ENGINES))
        self.history = SharedHistory(max_staleness=plan.max_staleness, late=True)
        self.url, self.network = url, network
        """`url`: where the checks find the database."""
        self.members = [
            Member(
                life,
                directory / f"replica-{n + 1}",
                free_port(),
                "127.0.0.1" if network is None else network.there(n, Cable.CALLERS),
            )
            for n, life in enumerate(lives)
        ]
        self.keepers: list[asyncio.Task[None]] = []
        self.marks: list[tuple[frozenset[Attempt], float]] = []
        """At each kill: finished rollouts in the store, and when that was read."""
        self.taken = 0
        """How often claims were taken from a replica, in the end."""
        self.forgiven: list[tuple[float, float]] = []
        """Times in which a replica may not know yet that it was taken for dead."""

    @classmethod
    @asynccontextmanager
    async def told(
        cls,
        plan: Plan,
        lives: Sequence[Lives],
        directory: Path,
        url: str,
        *,
        network: Network | None = None,
        database: str | None = None,
        **more: Any,
    ) -> AsyncIterator[SharedStory]:
        """`network`: the replicas live there; `database`: where they find it, if not at `url`; `more`: settings, table
        by table."""
        story = cls(plan, lives, directory, url, network)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(story.engine)
            judge_url = await stack.enter_async_context(judge(story.engine.settings.host))
            for member in story.members:
                story.configure(member, judge_url, database or url, **more)
            stack.push_async_callback(story._let_go)
            story.trainer = await stack.enter_async_context(
                Chooser([m.url for m in story.members], random.Random(plan.seed + 1), story.history, plan.habits)
            )
            try:
                yield story
            except BaseException:
                print(f"seed {plan.seed}; {story.tally()}\n{await story.rows()}\n{story.logs()}", file=sys.stderr)
                raise

    def configure(self, member: Member, judge_url: str, url: str, **more: Any) -> None:
        member.directory.mkdir(exist_ok=True)
        server = {"port": member.port} | ({} if self.network is None else {"host": "0.0.0.0", "insecure": True})  # noqa: S104  # in a namespace of its own
        values = tables(
            member.directory,
            [self.engine.url],
            **changes(self.plan),
            server=server,
            sampling={"max_tokens": MAX_TOKENS},
            store={"url": url, "pool_size": 4, "statement_timeout_s": STATEMENT_TIMEOUT_S},
            replica={"name": member.name, "lease_s": LEASE_S},
        )
        for table, fields in more.items():
            values[table] = values.get(table, {}) | fields
        values["rewards"] = [{"name": "judge", "url": judge_url, "timeout_s": 10.0}]
        (member.directory / "rollout.toml").write_text(to_toml(values))

    # lives

    async def begin(self, *, until_ready: bool = True) -> None:
        """All replicas are kept alive from now on, and the trainer works; returns when they are ready."""
        self.keep()
        if until_ready:
            await self.while_working(self.ready())
            await self.trainer.look()
        self.work()

    def keep(self) -> None:
        """All replicas are kept alive from now on."""
        self.keepers = [asyncio.create_task(member.keep()) for member in self.members]

    async def ready(self) -> None:
        """Those that are kept alive are."""
        await asyncio.gather(*(member.ready() for member in self.members if member.wanted))

    async def kill(self, *members: Member) -> None:
        """Together, and keep what they left."""
        await self.while_working(_all(member.kill() for member in members))
        self.kills = sum(member.kills for member in self.members)
        with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError):  # if it is away, too
            self.marks.append((await self._finished(), asyncio.get_running_loop().time()))

    async def freeze(self, member: Member, for_s: float) -> None:
        """It stands still, unless it is killed meanwhile."""
        loop = asyncio.get_running_loop()
        member.freeze()
        begun = member.begun
        await asyncio.sleep(for_s)
        if member.begun == begun and member.frozen:
            self.forgiven.append((loop.time(), loop.time() + FORGIVEN_S))
            member.thaw()

    async def while_working(self, waiting: Coroutine[Any, Any, T], *others: asyncio.Task[None]) -> T:
        return await super().while_working(waiting, *self.keepers, *others)

    # the end

    async def finish(self, within_s: float = 120.0) -> Counter[str]:
        await self.while_working(self.ready())
        self.kills = sum(member.kills for member in self.members)
        return await self.while_working(super().finish(within_s))

    async def check(self) -> Counter[str]:
        ended = await super().check()
        await self._check_rows()
        broken = await audit_postgres(self.url, max_staleness=self.plan.max_staleness, at_rest=True)
        assert not broken, broken
        self._check_rollouts()
        for member in self.members:
            faults = [line for line in member.log().splitlines() if OUR_FAULT.search(line)]
            assert not faults, faults
        return ended

    def _check_nothing_again(self) -> None:
        records = [record for record in self.engine.journal.records() if record.request_id]
        times: dict[Attempt, list[float]] = {}
        for record in records:
            if not any(since <= record.arrived <= until for since, until in self.forgiven):
                times.setdefault(attempt_of(record.request_id), []).append(record.arrived)
        for finished, at in self.marks:
            again = [rollout for rollout in finished if any(time > at for time in times.get(rollout, ()))]
            assert not again, f"finished, in the store, and generated again: {again}"

    def _check_rollouts(self) -> None:
        """Every row delivered is what the engine made for that row of that attempt, and for no other."""
        made = self.made()
        for (group, attempt), rows in self.history.tokens.items():
            for row, ids in rows.items():
                assert ids in made.get((group, attempt, row), []), f"{group}, attempt {attempt}, row {row}: {ids}"

    def made(self, request_ids: Collection[str] | None = None) -> dict[Attempt, list[list[int]]]:
        """What the engine makes of its requests, or of these; long ones differ for any two of them."""
        decoder, seed = self.engine.engine.decoder, self.engine.settings.seed
        made: dict[Attempt, list[list[int]]] = {}
        for record in self.engine.journal.records():
            if record.request_id and (request_ids is None or record.request_id in request_ids):
                plan = decoder.plan(f"{seed}:{record.request_id}:0:0", MAX_TOKENS)
                ids = [*plan.content.raw(0, plan.content.length), *([EOS] if plan.finish_reason == "stop" else [])]
                made.setdefault(attempt_of(record.request_id), []).append(ids)
        return made

    async def _check_rows(self) -> None:
        """The database's own rows agree with the trainer."""
        history = self.history
        connection = await asyncpg.connect(self.url)
        try:
            groups = await connection.fetch("SELECT seq, state, acked_by, owner, end_number FROM groups")
            taken = await connection.fetch("SELECT lease_id, seq FROM lease_groups")
            self.taken = await connection.fetchval("SELECT taken FROM run")
            tallies = await connection.fetchrow(
                "SELECT sum(pending + generating + scoring + ready + leased) AS outstanding, sum(acked) AS acked,"
                " sum(stale) AS stale, sum(dropped) AS dropped, sum(failed) AS failed FROM tallies"
            )
        finally:
            await connection.close()
        members = {(row["lease_id"], row["seq"]) for row in taken}
        for row in groups:
            name = f"g-{row['seq']}"
            assert row["owner"] is None, f"{name} ended and belongs to somebody"
            if row["state"] == "acked":
                assert (row["acked_by"], row["seq"]) in members, f"{name} was acked by a lease without it"
                assert history.acked_by.get(name, row["acked_by"]) == row["acked_by"], f"{name}: two acks"
        ends = [row["end_number"] for row in groups]
        assert None not in ends
        assert len(set(ends)) == len(ends), "every end has its own number"
        states = Counter(row["state"] for row in groups)
        assert tallies is not None
        assert {state: int(n) for state, n in tallies.items() if n} == dict(states), "the counters are exact"

    async def _finished(self) -> frozenset[Attempt]:
        connection = await asyncpg.connect(self.url, timeout=2, command_timeout=2)
        try:
            found = await connection.fetch(FINISHED_AND_WANTED)
        finally:
            await connection.close(timeout=2)
        return frozenset((f"g-{seq}", attempt, row) for seq, attempt, row in found)

    async def _let_go(self) -> None:
        await self.rest()
        for keeper in self.keepers:
            keeper.cancel()
        await asyncio.gather(*self.keepers, return_exceptions=True)
        for member in self.members:
            if member.alive:
                member.lives.signal(9)
                await member.lives.ended()

    async def rows(self) -> str:
        """What is in the database, for people."""
        queries = {
            "run": "SELECT * FROM run",
            "replicas": "SELECT replica_id, name, enforced, expires_at - extract(epoch FROM clock_timestamp()) AS left"
            " FROM replicas",
            "groups": "SELECT state, owner, version, rows, count(*), min(seq) FROM groups GROUP BY 1, 2, 3, 4",
            "leases": "SELECT lease_id, state, expires_at - extract(epoch FROM clock_timestamp()) AS left_s FROM leases"
            " WHERE state = 'live'",
            "locks": "SELECT l.locktype, l.mode, l.granted, a.state, a.query FROM pg_locks AS l"
            " JOIN pg_stat_activity AS a USING (pid) WHERE l.locktype = 'advisory'",
        }
        try:
            connection = await asyncpg.connect(self.url, timeout=5)
            found = [
                f"{name}: {[dict(row) for row in await connection.fetch(query)]}" for name, query in queries.items()
            ]
            await connection.close()
        except (OSError, asyncpg.PostgresError, TimeoutError) as error:
            return f"no rows: {error!r}"
        return "\n".join(found)

    def logs(self) -> str:
        return "\n".join(f"--- {member.name}\n{member.log()[-2500:]}" for member in self.members)

    def tally(self) -> str:
        trainer = getattr(self, "trainer", None)
        calls = f", {trainer.lost} calls lost, {trainer.refused} refused" if trainer is not None else ""
        return f"{super().tally()}{calls}, claims taken {self.taken} times"

    @property
    def kept(self) -> int:
        return sum(len(finished) for finished, _ in self.marks)

    async def identity(self) -> str:
        """Submitted = acked + stale + dropped + failed + outstanding, with its numbers; exact, or AssertionError."""
        status = await self.trainer.look()
        counts = status["groups"]
        parts = {state: counts[state] for state in ("acked", "stale", "dropped", "failed")}
        parts["outstanding"] = status["outstanding"]
        assert status["submitted"] == sum(parts.values()), status
        return f"submitted {status['submitted']} = " + " + ".join(f"{name} {n}" for name, n in parts.items())


async def _all(waiting: Any) -> None:
    await asyncio.gather(*waiting)


async def pause(rng: random.Random, least_s: float, most_s: float) -> None:
    """Between two blows."""
    until = time.monotonic() + rng.uniform(least_s, most_s)
    await asyncio.sleep(until - time.monotonic())
