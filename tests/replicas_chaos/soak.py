"""The long form: `python -m tests.replicas_chaos.soak`. Ends with 0 if and only if nothing was lost or delivered twice.

What always holds: the last line is `kills: K, lost: L, duplicated: D`, K of the random kills, L and D of both runs, and
it agrees with the exit status; each run before it says what became of every prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.durability.lives import Lives
from tests.postgres_cluster import UNSYNCED, Cluster
from tests.replicas_chaos.random_kills import die_at_random, die_every
from tests.replicas_chaos.story import SharedStory

REPLICAS = 3
EVERY_S = 5.0


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--kills", type=int, default=300, help="random SIGKILLs")
    arguments.add_argument("--seconds", type=float, default=120.0, help="of the run with a kill every 5 s")
    arguments.add_argument("--seed", type=int, default=int(os.environ.get("DURABILITY_SEED", "0")))
    given = arguments.parse_args()
    print(f"DURABILITY_SEED={given.seed}", flush=True)
    try:
        return asyncio.run(_soak(given.seed, kills=given.kills, seconds=given.seconds))
    except Exception:  # whatever went wrong is a failed soak, and its last line has to say so
        traceback.print_exc(file=sys.stdout)
        print(f"kills: {given.kills}, but the proof did not come to its end (above)")
        return 1


async def _soak(seed: int, *, kills: int, seconds: float) -> int:
    with ExitStack() as stack:
        cluster = Cluster(UNSYNCED)
        stack.callback(cluster.close)
        cluster.start()
        herd = [stack.enter_context(Lives()) for _ in range(REPLICAS)]
        clock = partial(die_every, herd, cluster=cluster, seed=seed, every_s=EVERY_S, for_s=seconds)
        stories = [await _in_folder(f"a kill every {EVERY_S:g} s", clock)]
        chance = partial(die_at_random, herd, cluster=cluster, seed=seed, kills=kills)
        stories.append(await _in_folder(f"{kills} kills at random", chance))
    lost = sum(len(story.history.lost) for story in stories)
    duplicated = sum(len(story.history.duplicated) for story in stories)
    print(f"kills: {stories[-1].kills}, lost: {lost}, duplicated: {duplicated}", flush=True)
    return 0 if (stories[-1].kills, lost, duplicated) == (kills, 0, 0) else 1


async def _in_folder(what: str, go: Callable[[Path], Awaitable[tuple[SharedStory, Counter[str], str]]]) -> SharedStory:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        story, _, identity = await go(Path(folder))
    print(f"{what}, {time.monotonic() - begun:.0f} s: {story.tally()}\n{identity}", flush=True)
    return story


if __name__ == "__main__":
    sys.exit(main())
