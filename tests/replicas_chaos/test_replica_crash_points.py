"""A replica dies right before and right after each kind of commit; the other one finishes the run."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.durability.lives import Lives
from tests.durability.tale import Plan
from tests.durability.trainer import Habits
from tests.postgres_cluster import Cluster
from tests.replicas_chaos.crashing import Kind, Moment, Point, order, report_of
from tests.replicas_chaos.story import SharedStory
from tests.service import until

SEED = int(os.environ.get("DURABILITY_SEED", "0"))
MET_WITHIN_S = 90.0
HABITS = Habits(releases=0.3, dies=0.2, lease_s=2)
RARE = (Kind.CLAIMED, Kind.BUMPED, Kind.MARKED, Kind.TAKEN)
"""Met too seldom for their second time to be waited for."""


async def leave_it_alone(story: SharedStory, kills: int) -> None:
    """The other one dies and stays away, so that nobody else can take its claims; unless it is over already, with the
    claims of an earlier life."""
    mortal, other = story.members

    async def ready_or_over() -> bool:
        return mortal.kills >= kills or ((await mortal.readyz())[0] == 200 and other.alive)

    await story.while_working(until(ready_or_over, MET_WITHIN_S, "it works"))
    if mortal.kills < kills:
        await story.while_working(other.down(signal.SIGKILL))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", list(Kind))
async def test_a_replica_that_dies_around_its_commit_costs_nothing(
    kind: Kind, herd: list[Lives], postgres: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plan = Plan(seed=SEED + list(Kind).index(kind), pending=8, habits=HABITS)
    async with (
        postgres.database() as url,
        SharedStory.told(plan, herd[:2], tmp_path, url, replica={"lease_s": 1.0}) as story,
    ):
        mortal, other = story.members
        if kind is Kind.MARKED:
            story.trainer.mark_share = 1.0
            story.trainer.habits = replace(HABITS, bumps=0.9)
        most = 1 if kind in RARE else 2
        points = [Point(kind=kind, moment=moment, nth=1 + story.rng.randrange(most)) for moment in Moment]
        mortal.orders = [order(point) for point in points]
        mortal.lives_left = len(points)
        await story.begin(until_ready=False)
        met = []
        for kills, point in enumerate(points, 1):
            if kind is Kind.TAKEN:
                await leave_it_alone(story, kills)
            await story.while_working(until(lambda n=kills: mortal.kills == n, MET_WITHIN_S, f"{point}"))
            other.wanted = True
            met.append(json.loads(report_of(mortal.directory).read_text()))
        ended = await story.finish()
        assert [report["point"] for report in met] == [str(point) for point in points]
        assert [report["transaction"] for report in met] == [True, False]
        assert story.history.lost == []
        assert story.history.duplicated == []
        with capsys.disabled():
            print(f"\n{', '.join(map(str, points))}: {dict(ended)}; {await story.identity()}; {story.tally()}")
