"""Reward functions of the fault tests; copied next to each test's store, where they also log their calls.

A completion scores what it says: `r=0.5;` scores 0.5, and `r=None;`, `r=nan;`, `r=inf;` the odd values. The column
`mode` makes the whole call misbehave.
"""

import asyncio
import json
import os
import time
from pathlib import Path

CALLS = Path(__file__).with_name("calls.jsonl")


def accuracy(prompts, completions, completion_ids, **columns):
    call = {"pid": os.getpid(), "prompts": prompts, "completions": completions, "ids": completion_ids}
    line = json.dumps(call | {"columns": columns}) + "\n"
    with CALLS.open("a") as log:
        log.write(line)
    mode = (columns.get("mode") or [None])[0]
    if mode == "sleep":
        time.sleep(600)
    while mode == "busy":
        pass
    if mode == "raise":
        raise RuntimeError("the judge is ill")
    if mode == "exit":
        raise SystemExit(3)
    if mode == "die":
        os._exit(9)
    if mode == "cancel":
        raise asyncio.CancelledError
    rewards = [_said(ids) for ids in completion_ids]
    return {"short": rewards[:1], "long": [*rewards, 1.0], "none": None, "text": ["1.0"] * len(rewards)}.get(
        mode, rewards
    )


def second(completion_ids, **_):
    """Scores 1.0 what says `s=1`, nobody else."""
    return [1.0 if "s=1" in bytes(ids).decode("utf-8", "replace") else None for ids in completion_ids]


async def thinking(completion_ids, mode=None, **_):
    """An async one: as `accuracy`, in the service's own event loop."""
    if mode and mode[0] == "sleep":
        await asyncio.sleep(600)
    if mode and mode[0] == "cancel":
        raise asyncio.CancelledError
    return [_said(ids) for ids in completion_ids]


def _said(ids):
    text = bytes(i for i in ids if 0 <= i < 256).decode("utf-8", "replace")
    if "r=" not in text:
        return 1.0
    said = text.partition("r=")[2].partition(";")[0]
    return None if said == "None" else float(said)
