"""The long forms: `python -m tests.durability.soak`. Ends with 0 if and only if nothing was lost or delivered twice.

What always holds: the last line is `kills: K, lost: L, duplicated: D`, and it agrees with the exit status.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from tests.durability.full_run import losses, plan_of, run
from tests.durability.lives import Lives
from tests.durability.random_kills import die_at_random
from tests.durability.story import Story

T = TypeVar("T")
FULL_RUN_S = 1800.0


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--kills", type=int, default=300, help="random SIGKILLs")
    arguments.add_argument("--prompts", type=int, default=1000, help="of each full run")
    arguments.add_argument("--seed", type=int, default=int(os.environ.get("DURABILITY_SEED", "0")))
    given = arguments.parse_args()
    print(f"DURABILITY_SEED={given.seed}", flush=True)
    try:
        return asyncio.run(_soak(given.seed, kills=given.kills, prompts=given.prompts))
    except Exception:
        traceback.print_exc(file=sys.stdout)
        print(f"kills: {given.kills}, but the proof did not come to its end (above)")
        return 1


async def _soak(seed: int, *, kills: int, prompts: int) -> int:
    stories: list[Story] = []
    exact = True
    with Lives() as lives:
        for retryable_only in (False, True):
            plan = plan_of(seed=seed + retryable_only, prompts=prompts, retryable_only=retryable_only)
            story, ended = await _in_folder(partial(run, lives, plan=plan, within_s=FULL_RUN_S))
            stories.append(story)
            left = ended["stale"] + ended["dropped"] + ended["failed"]
            exact &= len(story.history.acked) == prompts - left and not (retryable_only and left)
            print(f"{dict(ended)}; {story.tally()}; answers: {losses(story)}", flush=True)
        stories.append(await _in_folder(partial(die_at_random, lives, seed=seed, kills=kills)))
        print(stories[-1].tally())
    if not exact:
        print("acked groups are not the submitted ones minus those reported stale, dropped or failed")
    lost = sum(len(story.history.lost) for story in stories)
    duplicated = sum(len(story.history.duplicated) for story in stories)
    print(f"kills: {stories[-1].kills}, lost: {lost}, duplicated: {duplicated}", flush=True)
    return 0 if exact and (stories[-1].kills, lost, duplicated) == (kills, 0, 0) else 1


async def _in_folder(go: Callable[[Path], Awaitable[T]]) -> T:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            return await go(Path(folder))
        finally:
            print(f"after {time.monotonic() - begun:.0f} s:", flush=True)


if __name__ == "__main__":
    sys.exit(main())
