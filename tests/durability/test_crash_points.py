"""The service is killed at named points before and after each kind of commit, and a trainer's history is checked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.durability.crashing import Kind, Moment, Point
from tests.durability.lives import Lives
from tests.durability.story import Story
from tests.durability.tale import Plan

SEED = int(os.environ.get("DURABILITY_SEED", "0"))


@pytest.mark.parametrize("kind", list(Kind))
async def test_killed_around_its_commit_nothing_is_lost_or_delivered_after_its_ack(
    kind: Kind, lives: Lives, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # Whole prompts that wait again are many; rests of partly dispatched groups would be few.
    plan = Plan(seed=SEED + list(Kind).index(kind), on_stale="requeue" if kind is Kind.AGAIN else "drop")
    async with Story.told(plan, lives, tmp_path) as story:
        try:
            for moment in Moment:
                await story.meet(Point(kind=kind, moment=moment, nth=1 + story.rng.randrange(3)))
            await story.live()
            await story.ready()
            ended = await story.finish()
        except BaseException:
            print(f"DURABILITY_SEED={SEED}; {story.tally()}\n{story.log()[-3000:]}")
            raise
        assert story.history.lost == []
        assert story.history.duplicated == []
        for report in story.reports:
            assert report["leases"] >= 1, report
            assert report["in_flight"] >= 1, report
            assert report["transaction"] is report["point"].startswith("before"), report
        with capsys.disabled():
            met = ", ".join(
                f"{r['point']} ({r['leases']} leases, {r['in_flight']} in flight{', open' if r['transaction'] else ''})"
                for r in story.reports
            )
            print(f"\n{met}: {dict(ended)}; {story.tally()}")
