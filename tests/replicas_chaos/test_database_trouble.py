"""PostgreSQL busy, slow, full, restarted, failed over: the replicas wait, say so, lose nothing and go on."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import asyncpg

from rollout_service.store import postgres_queries as sql
from tests.durability.lives import Lives
from tests.durability.tale import Plan
from tests.durability.trainer import Habits
from tests.postgres_cluster import Cluster
from tests.replicas_chaos.story import LEASE_S, SharedStory

SEED = int(os.environ.get("DURABILITY_SEED", "0"))
PLAN = Plan(seed=SEED, habits=Habits(pauses=0.0), pending=18)


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
