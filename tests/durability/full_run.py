"""A dataset from its first prompt to its last over two kills and lossy connections, with a trainer that is slow."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from tests.durability.lives import Lives
from tests.durability.story import Story
from tests.durability.tale import Plan
from tests.durability.trainer import Habits
from tests.tcp_proxy import Faults

KILLS = 2


def plan_of(*, seed: int, prompts: int, retryable_only: bool) -> Plan:
    """`retryable_only`: nothing may be stale, dropped or failed in the end."""
    plan = Plan(
        seed=seed,
        prompts=prompts,
        n=2,
        slots=24,
        latency=0.05,
        pending=48,
        consumers=1,
        server_errors=0.05,
        max_staleness=2,
        lossy=Faults(),
        habits=Habits(hold_s=0.4, max_groups=12, dies=0.02, names_requests=1.0, bumps=0.5, steer_s=2.0),
    )
    # Eight tries: one prompt in a billion meets a fault at all of them.
    return replace(plan, max_staleness=1000, refusals=0.0, max_attempts=8) if retryable_only else plan


async def run(lives: Lives, directory: Path, plan: Plan, *, within_s: float = 120.0) -> tuple[Story, Counter[str]]:
    """The story at its end, checked, and its groups by terminal state."""
    assert plan.prompts is not None
    async with Story.told(plan, lives, directory) as story:
        try:
            await story.live()
            await story.ready()
            story.work()
            for kill in range(1, KILLS + 1):
                await story.while_working(story.ended(plan.prompts * kill // (KILLS + 1)))
                await story.kill()
                await story.live()
                await story.while_working(story.ready())
            return story, await story.finish(within_s)
        except BaseException:
            print(f"seed {plan.seed}; {story.tally()}\n{story.log()[-3000:]}", file=sys.stderr)
            raise


def losses(story: Story) -> str:
    """What the proxies did, for people."""
    counts: Counter[str] = sum((proxy.counts for proxy in story.proxies), Counter())
    return ", ".join(f"{name} {counts[name]}" for name in ("connections", "passed", "drop", "cut", "delay"))
