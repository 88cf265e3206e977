"""A replicated run whose parts are killed at moments drawn from a seed, short in the tests and long in the soak."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from tests.durability.lives import Lives
from tests.durability.tale import Plan
from tests.durability.trainer import Habits
from tests.postgres_cluster import Cluster
from tests.replicas_chaos import postgres_end
from tests.replicas_chaos.member import Member
from tests.replicas_chaos.story import LEASE_S, SharedStory
from tests.service import until

PAUSE_S = (0.1, 0.7)
"""Between two blows: less than a takeover takes, as a rule."""
STARTING = 0.15
"""Share of kills that may meet a replica while it starts; the others meet one that is ready."""
FREEZE_EVERY, BOTH_EVERY, DATABASE_EVERY = 7, 5, 15
"""Kills between two of the other blows."""
READY_WITHIN_S = 60.0
PENDING = 18
AWAY_S = (0.0, 1.5)
"""How long the database stays away."""
# No pauses: one that was lost on its way to a replica that stands still arrives when it goes on, and stays.
HABITS = Habits(pauses=0.0)


async def die_every(
    lives: Sequence[Lives], directory: Path, cluster: Cluster, *, seed: int, every_s: float, for_s: float
) -> tuple[SharedStory, Counter[str], str]:
    """A replica at a time is killed, by the clock, whatever it is at; as `die_at_random` otherwise."""
    plan = Plan(seed=seed, habits=HABITS, pending=PENDING)
    async with cluster.database() as url, SharedStory.told(plan, lives, directory, url) as story:
        await story.begin()
        begun = time.monotonic()
        for number in range(1, int(for_s / every_s) + 1):
            await story.while_working(asyncio.sleep(begun + number * every_s - time.monotonic()))
            await story.kill(story.rng.choice(story.members))
        ended = await story.finish()
        return story, ended, await story.identity()


async def die_at_random(
    lives: Sequence[Lives], directory: Path, cluster: Cluster, *, seed: int, kills: int
) -> tuple[SharedStory, Counter[str], str]:
    """The story of exactly `kills` kills at its end, its groups by terminal state, and the identity in numbers.

    Raises AssertionError where anything is wrong.
    """
    rng = random.Random(seed)
    plan = Plan(seed=seed, habits=HABITS, pending=PENDING)
    async with cluster.database() as url, SharedStory.told(plan, lives, directory, url) as story:
        blows = _Blows(story, cluster, rng)
        await story.begin()
        try:
            while story.kills < kills:
                await story.while_working(asyncio.sleep(rng.uniform(*PAUSE_S)))
                await blows.next(most=kills - story.kills)
        finally:
            await blows.end()
        ended = await story.finish()
        return story, ended, await story.identity()


class _Blows:
    def __init__(self, story: SharedStory, cluster: Cluster, rng: random.Random) -> None:
        self._story, self._cluster, self._rng = story, cluster, rng
        self._number = 0
        self._going_on: set[asyncio.Task[None]] = set()

    async def next(self, *, most: int) -> None:
        """`most`: kills."""
        self._number += 1
        story, rng = self._story, self._rng
        for task in [task for task in self._going_on if task.done()]:
            self._going_on.discard(task)
            task.result()
        if self._number % FREEZE_EVERY == 0:
            alive = [member for member in story.members if member.alive and not member.frozen]
            if alive:
                self._spawn(story.freeze(rng.choice(alive), LEASE_S * rng.uniform(1.2, 2.0)))
        elif self._number % DATABASE_EVERY == 0:
            self._spawn(self._database_away(rng.random() < 0.5, rng.uniform(*AWAY_S)))
        else:
            count = 2 if self._number % BOTH_EVERY == 0 else 1
            victims = list(story.members) if rng.random() < STARTING else await self._ready()
            await story.kill(*rng.sample(victims, min(count, most, len(victims))))

    async def _ready(self) -> list[Member]:
        """At least one replica at work."""
        story = self._story

        async def found() -> list[Member]:
            members = [member for member in story.members if not member.frozen]
            answers = await asyncio.gather(*(member.readyz() for member in members))
            return [member for member, (status, _) in zip(members, answers, strict=True) if status == 200]

        return await story.while_working(until(found, READY_WITHIN_S, "a replica is ready"))

    async def end(self) -> None:
        """What goes on comes to its end."""
        for done in await asyncio.gather(*self._going_on, return_exceptions=True):
            if isinstance(done, BaseException):
                raise done

    async def _database_away(self, abruptly: bool, for_s: float) -> None:
        if abruptly:
            await postgres_end.kill(self._cluster)
        else:
            await postgres_end.crash(self._cluster)
        await asyncio.sleep(for_s)
        await postgres_end.start(self._cluster)

    def _spawn(self, blow: Coroutine[Any, Any, None]) -> None:
        self._going_on.add(asyncio.create_task(blow))
