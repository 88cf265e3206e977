"""Replicas that are cut off from the database, from the engines, from each other."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from rollout_service.simulator.engine import PauseMode
from rollout_service.simulator.journal import Record
from tests.durability.lives import Lives
from tests.durability.tale import Plan, attempt_of
from tests.durability.trainer import Habits
from tests.postgres_cluster import UNSYNCED, Cluster
from tests.replicas_chaos.member import Member
from tests.replicas_chaos.network import Cable, Network
from tests.replicas_chaos.story import LEASE_S, SharedStory
from tests.service import until

SEED = int(os.environ.get("DURABILITY_SEED", "0"))
REPLICAS = 3
N = 4
WITHIN_S = 60.0
CUTS = 5
SHORT = 3
"""Completions of so few tokens are alike."""
CAREFUL = Habits(pauses=0.0, dies=0.0, releases=0.0, names_requests=1.0, lease_s=30)
QUIET = Plan(seed=SEED, n=N, slots=2 * N, max_staleness=1000, server_errors=0.0, refusals=0.0, habits=CAREFUL)
"""Every prompt is acked in the end, and one replica has room for two."""
Tell = Callable[..., AbstractAsyncContextManager[SharedStory]]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(REPLICAS) as made:
        yield made


@pytest.fixture(scope="module")
def far(network: Network) -> Iterator[list[Lives]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Lives(*network.around(n))) for n in network.replicas]


@pytest.fixture(scope="module")
def there(network: Network) -> Iterator[Cluster]:
    """A PostgreSQL at the end of the cables."""
    made = Cluster({**UNSYNCED, "listen_addresses": f"127.0.0.1,{network.here(Cable.DATABASE)}"})
    with (made.folder / "data" / "pg_hba.conf").open("a") as rules:
        rules.write(f"host all all {network.range} trust\n")
    made.start()
    yield made
    made.close()


@pytest.fixture
def tell(network: Network, far: list[Lives], there: Cluster, tmp_path: Path) -> Iterator[Tell]:
    @asynccontextmanager
    async def tell(plan: Plan, **more: Any) -> AsyncIterator[SharedStory]:
        async with there.database() as url:
            at = url.replace("127.0.0.1", network.here(Cable.DATABASE))
            async with SharedStory.told(plan, far, tmp_path, url, network=network, database=at, **more) as story:
                yield story

    try:
        yield tell
    finally:
        for n in network.replicas:
            for cable in Cable:
                network.heal(n, cable)
        network.part(parted=False)


async def owners(story: SharedStory) -> dict[str, str]:
    """Group -> name of the replica that has it."""
    connection = await asyncpg.connect(story.url)
    try:
        rows = await connection.fetch(
            "SELECT g.seq, r.name FROM groups AS g JOIN replicas AS r ON r.replica_id = g.owner"
        )
    finally:
        await connection.close()
    return {f"g-{row['seq']}": row["name"] for row in rows}


async def full(story: SharedStory, members: list[Member]) -> dict[str, str]:
    """`owners`, once exactly these replicas have groups and use every slot."""
    names = {member.name for member in members}

    async def found() -> dict[str, str] | None:
        held, engine = await owners(story), story.engine.engine
        return held if set(held.values()) == names and engine.running + engine.waiting == len(names) * 2 * N else None

    held: dict[str, str] = await story.while_working(until(found, WITHIN_S, f"all of {names} work"))
    return held


async def begin_full(story: SharedStory, members: list[Member], names: Iterator[str]) -> dict[str, str]:
    """Two groups for each of `members` in flight at an engine that stands still; who has which."""
    story.engine.engine.pause(PauseMode.KEEP, clear_cache=False, done=lambda: None)
    await story.trainer.submit([next(names) for _ in range(2 * len(members))])
    return await full(story, members)


def resume(story: SharedStory) -> None:
    story.engine.engine.resume()


def asked_for(story: SharedStory, groups: Collection[str]) -> list[Record]:
    records = story.engine.journal.records()
    return [record for record in records if record.request_id and attempt_of(record.request_id)[0] in groups]


async def not_ready(story: SharedStory, member: Member, why: str) -> None:
    async def refused() -> bool:
        status, body = await member.readyz()
        return status == 503 and why in body

    await story.while_working(until(refused, WITHIN_S, f"/readyz says {why!r}"))


async def to_the_end(story: SharedStory, last: str) -> None:
    """Everything there is is leased and acked, and the run is checked."""
    await story.trainer.submit([last], final=True)
    async with asyncio.timeout(WITHIN_S):
        await story.while_working(story.trainer.consume("rank0"))
    ended = await story.check()
    assert ended == {"acked": len(story.history.prompts)}
    assert (story.history.lost, story.history.duplicated) == ([], [])


async def test_cut_off_from_the_database_it_aborts_before_others_take_over_and_settles_nothing(
    tell: Tell, network: Network
):
    async with tell(QUIET, replica={"lease_s": 2 * LEASE_S}) as story:
        engine, victim = story.engine, story.members[0]
        story.keep()
        await story.while_working(story.ready())
        engine.faults.on("held", hang=True)
        names = (f"{'held' if n % 2 else 'late'}-{n}" for n in range(100))
        held = await begin_full(story, story.members, names)
        engine.faults.clear()
        hanging = {record.request_id for record in engine.journal.records() if record.fault}
        groups = [group for group, name in held.items() if name == victim.name]
        before = {record.request_id for record in asked_for(story, groups)}
        assert len(before) == 2 * N
        assert len(before & hanging) == N, "one group that will be answered late, one that will not"
        engine.engine.abort(
            id
            for record in engine.journal.records()
            for id in record.abort_ids
            if record.request_id in hanging - before
        )

        network.cut(0, Cable.DATABASE)
        resume(story)  # the answers come to one that can commit nothing
        await not_ready(story, victim, "the store cannot commit")

        def taken_over() -> bool:
            return len({r.request_id for r in asked_for(story, groups)} - before) == 2 * N

        await story.while_working(until(taken_over, WITHIN_S, "others ask for all of its rows"))
        records = asked_for(story, groups)
        ended = [record.ended for record in records if record.request_id in before]
        again = min(record.arrived for record in records if record.request_id not in before)
        assert None not in ended
        assert max(at for at in ended if at is not None) < again, "aborted before it was taken over"
        assert victim.begun == 1

        network.heal(0, Cable.DATABASE)
        await story.while_working(victim.ready())
        await story.while_working(until(lambda: engine.engine.running == 0, WITHIN_S, "all is generated"))
        held = await begin_full(story, story.members, names)
        assert victim.name in held.values(), "it works again, and was not started again"
        resume(story)
        await to_the_end(story, next(names))
        assert victim.begun == 1
        late = story.made(before)
        for (group, _), rows in story.history.tokens.items():
            for row, ids in ((row, ids) for row, ids in rows.items() if len(ids) > SHORT):
                assert ids not in late.get((group, 1, row), []), (
                    f"{group} row {row} was settled by one that had lost it"
                )


async def test_cut_off_from_the_engines_it_takes_no_more_work_and_others_do(tell: Tell, network: Network):
    async with tell(QUIET) as story:
        engine, victim = story.engine, story.members[1]
        others = [member for member in story.members if member is not victim]
        story.keep()
        await story.while_working(story.ready())
        network.cut(1, Cable.ENGINES)
        await not_ready(story, victim, "no engine is healthy")
        names = (f"p-{n}" for n in range(100))
        await begin_full(story, others, names)
        resume(story)
        await story.while_working(until(lambda: engine.engine.running == 0, WITHIN_S, "all is generated"))
        network.heal(1, Cable.ENGINES)
        await story.while_working(victim.ready())
        await begin_full(story, story.members, names)
        resume(story)
        await to_the_end(story, next(names))
        assert victim.begun == 1


async def test_groups_of_one_that_lost_its_engines_are_generated_by_others(tell: Tell, network: Network):
    async with tell(QUIET) as story:
        victim = story.members[1]
        story.keep()
        await story.while_working(story.ready())
        names = (f"p-{n}" for n in range(100))
        held = await begin_full(story, story.members, names)
        assert victim.name in held.values()
        network.cut(1, Cable.ENGINES)
        resume(story)
        await to_the_end(story, next(names))  # it is cut off still


@pytest.mark.long
async def test_cut_off_from_each_other_nothing_changes(tell: Tell, network: Network):
    plan = Plan(seed=SEED, prompts=40, habits=Habits(pauses=0.1))
    async with tell(plan) as story:
        await story.begin()
        neighbour = story.members[1]
        network.part()
        await story.while_working(story.ended(20))
        assert not network.reaches(0, neighbour.host, neighbour.port)
        await story.finish()
        assert (story.history.lost, story.history.duplicated) == ([], [])
        for member in story.members:
            assert member.begun == 1


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_cuts_from_the_database_at_any_moment_lose_nothing(
    tell: Tell, network: Network, capsys: pytest.CaptureFixture[str]
):
    plan = Plan(seed=SEED, pending=18, habits=Habits(pauses=0.0))
    async with tell(plan) as story:
        await story.begin()
        for _ in range(CUTS):
            n = story.rng.randrange(REPLICAS)
            network.cut(n, Cable.DATABASE)
            await story.while_working(asyncio.sleep(story.rng.uniform(0.2, 2.0) * LEASE_S))
            network.heal(n, Cable.DATABASE)
            await story.while_working(story.members[n].ready())
        ended = await story.finish()
        with capsys.disabled():
            print(f"\n{dict(ended)}; {await story.identity()}; {story.tally()}")
        assert (story.history.lost, story.history.duplicated) == ([], [])
        for member in story.members:
            assert member.begun == 1
