"""A run that is killed at moments drawn from a seed, short in the tests and long in the soak."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from tests.durability.lives import Lives
from tests.durability.story import Story
from tests.durability.tale import Plan

WORKS_S = (0.02, 0.9)
"""How long a life works before its kill."""
STARTS = 0.1
"""Share of kills that come before the life answers, up to `STARTING_S` after its start."""
STARTING_S = 0.4


async def die_at_random(lives: Lives, directory: Path, *, seed: int, kills: int) -> Story:
    """The story of `kills` kills at its end. Prints the seed and raises AssertionError where anything is wrong."""
    rng = random.Random(seed)
    async with Story.told(Plan(seed=seed), lives, directory) as story:
        try:
            for _ in range(kills):
                await story.live()
                if rng.random() < STARTS:
                    await asyncio.sleep(rng.uniform(0.0, STARTING_S))
                else:
                    await story.while_working(story.ready())
                    story.work()
                    await story.while_working(asyncio.sleep(rng.uniform(*WORKS_S)))
                await story.kill()
            await story.live()
            await story.while_working(story.ready())
            story.work()
            await story.finish()
        except BaseException:
            print(f"DURABILITY_SEED={seed}; {story.tally()}\n{story.log()[-3000:]}", file=sys.stderr)
            raise
        return story
