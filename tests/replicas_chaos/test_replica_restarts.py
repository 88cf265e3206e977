"""Replicas ended in order, one after the other, under load: for a new configuration, and for a new version."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import asyncpg
import pytest

from tests.durability.lives import Lives
from tests.durability.tale import Plan
from tests.durability.trainer import Habits
from tests.postgres_cluster import Cluster
from tests.replicas_chaos.member import Member
from tests.replicas_chaos.story import SharedStory
from tests.replicas_chaos.upgrade import folder_of_tomorrow, newest, order

SEED = int(os.environ.get("DURABILITY_SEED", "0"))
PLAN = Plan(seed=SEED, pending=12, habits=Habits(pauses=0.0))
BETWEEN = 3
"""Groups that end from one restart to the next."""
ORDINARY = {"lease_s": 10.0}
"""Long enough for a start on a busy machine, and for a wait for what was not given back to be seen."""
TRIES = 3
"""One at each replica: two of them are there at every moment."""


async def each_in_turn(
    story: SharedStory, restart: Callable[[Member], Awaitable[None]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every replica is restarted while the others work, and the run is led to its end."""
    ended = BETWEEN
    await story.begin()
    await story.while_working(story.ended(ended))
    for member in story.members:
        await restart(member)
        await story.while_working(member.ready())
        ended += BETWEEN
        await story.while_working(story.ended(ended))
    states = await story.finish()
    with capsys.disabled():
        print(f"\n{dict(states)}; {await story.identity()}; {story.tally()}; in a row {story.trainer.in_a_row}")
    assert (story.history.lost, story.history.duplicated) == ([], [])
    assert story.trainer.in_a_row <= TRIES, "another replica answers"
    assert story.taken == 0, "what a replica had it gave back, nobody had to wait for its lease to end"
    for member in story.members:
        assert (member.begun, member.kills) == (2, 0)


async def test_a_rolling_restart_loses_nothing_and_a_retry_cures_every_call(
    herd: list[Lives], postgres: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    async with postgres.database() as url, SharedStory.told(PLAN, herd, tmp_path, url, replica=ORDINARY) as story:

        async def restart(member: Member) -> None:
            await story.while_working(member.restart())

        await each_in_turn(story, restart, capsys)


async def test_a_rolling_upgrade_migrates_while_old_replicas_work_on(
    herd: list[Lives], postgres: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    tomorrow = folder_of_tomorrow(tmp_path / "tomorrow")
    async with postgres.database() as url, SharedStory.told(PLAN, herd, tmp_path, url, replica=ORDINARY) as story:
        first, old, last = story.members

        async def upgrade(member: Member) -> None:
            assert await versions(url) == list(range(1, newest() + (1 if member is first else 2)))
            if member is not old:  # it stays what it was, and starts beside the newer schema
                member.orders = [order(tomorrow)]
            await story.while_working(member.restart())

        await each_in_turn(story, upgrade, capsys)
        assert await versions(url) == list(range(1, newest() + 2))
        assert not last.orders


async def versions(url: str) -> list[int]:
    """Of the schema, all that were applied."""
    connection = await asyncpg.connect(url)
    try:
        return [row["version"] for row in await connection.fetch("SELECT version FROM schema_migrations ORDER BY 1")]
    finally:
        await connection.close()
