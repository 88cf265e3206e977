"""PostgreSQL busy, slow, restarted, failed over: the replicas wait, say so, lose nothing and go on."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import asyncpg
import pytest

from rollout_service.store import postgres_queries as sql
from tests.durability.lives import Lives
from tests.durability.tale import Plan
from tests.durability.trainer import Habits
from tests.postgres_cluster import UNSYNCED, Cluster
from tests.replicas_chaos import postgres_end
from tests.replicas_chaos.slow_line import SlowLine
from tests.replicas_chaos.standby import Standby
from tests.replicas_chaos.story import LEASE_S, SharedStory
from tests.service import until

SEED = int(os.environ.get("DURABILITY_SEED", "0"))
PLAN = Plan(seed=SEED, habits=Habits(pauses=0.0), pending=18)
WITHIN_S = 60.0
ROUND_TRIP_S = 0.2
FAR_LEASE_S = 10.0
"""A replica's lease where a transaction takes a second: the usual one."""
PATIENT_S = 30.0
"""Of a trainer who knows that every call takes seconds."""


async def test_a_run_locked_for_longer_than_the_lease_costs_no_replica_its_claims(
    herd: list[Lives], postgres: Cluster, tmp_path: Path
):
    lease_s = 2 * LEASE_S
    async with (
        postgres.database() as url,
        SharedStory.told(
            PLAN, herd, tmp_path, url, replica={"lease_s": lease_s}, store={"statement_timeout_s": 30}
        ) as story,
    ):
        await story.begin()
        await story.while_working(story.ended(3))
        before = {member: len(member.log()) for member in story.members}
        connection = await asyncpg.connect(url)
        try:
            async with connection.transaction():
                await connection.execute(sql.LOCK_RUN)  # as a rewind of a large run does
                await asyncio.sleep(2 * lease_s)
        finally:
            await connection.close()
        await story.finish()
        for member in story.members:
            said = member.log()[before[member] :]
            assert "claims_abandoned" not in said, said


async def all_wait(story: SharedStory) -> None:
    """Until every replica says that it cannot commit, and none gave up."""

    async def waiting() -> bool:
        answers = [await member.readyz() for member in story.members]
        return all(status == 503 and "the store cannot commit" in body for status, body in answers)

    await story.while_working(until(waiting, WITHIN_S, "/readyz of every replica says so"))


async def to_the_end(story: SharedStory, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on and ends, in the same processes it began in."""
    states = await story.finish()
    with capsys.disabled():
        print(f"\n{dict(states)}; {await story.identity()}; {story.tally()}")
    assert (story.history.lost, story.history.duplicated) == ([], [])
    for member in story.members:
        assert member.begun == 1, member.name


@pytest.mark.parametrize("how", [postgres_end.stop, postgres_end.crash])
async def test_while_the_database_is_away_they_wait_and_say_so(
    how: postgres_end.End, herd: list[Lives], postgres: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    async with postgres.database() as url, SharedStory.told(PLAN, herd, tmp_path, url) as story:
        await story.begin()
        await story.while_working(story.ended(3))
        await how(postgres)
        try:
            await all_wait(story)
        finally:
            await postgres_end.start(postgres)
        await story.while_working(story.ready())
        await to_the_end(story, capsys)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_far_away_from_the_database_all_is_slower_and_restarted_in_the_middle_nothing_is_lost(
    herd: list[Lives], postgres: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    habits = Habits(pauses=0.0, bumps=0.1, lease_s=60, steer_s=3.0)
    plan = Plan(seed=SEED, n=2, prompts=16, pending=8, max_staleness=10, consumers=2, habits=habits)
    async with postgres.database() as url, SlowLine(url, delay_s=ROUND_TRIP_S) as line:
        far = url.replace(f":{postgres.port}/", f":{line.port}/")
        async with SharedStory.told(plan, herd, tmp_path, url, database=far, replica={"lease_s": FAR_LEASE_S}) as story:
            story.trainer.call_s = PATIENT_S
            await story.begin()
            await story.while_working(story.ended(2))
            await postgres_end.crash(postgres)
            try:
                await all_wait(story)
            finally:
                await postgres_end.start(postgres)
            await story.while_working(story.ready())
            await to_the_end(story, capsys)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_failover_to_a_synchronous_standby_loses_nothing(
    herd: list[Lives], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    primary = Cluster(UNSYNCED)
    try:
        primary.start()
        await primary.execute("CREATE DATABASE run")
        standby = Standby(primary)
        try:
            standby.start()
            await standby.follows()
            both = primary.url("run").replace(f":{primary.port}/", f":{primary.port},127.0.0.1:{standby.port}/")
            async with SharedStory.told(PLAN, herd, tmp_path, standby.url("run"), database=both) as story:
                await story.begin()
                await story.while_working(story.ended(6))
                await postgres_end.crash(primary)
                await all_wait(story)
                await standby.promote()
                await story.while_working(story.ready())
                await to_the_end(story, capsys)
        finally:
            standby.close()
    finally:
        primary.close()
