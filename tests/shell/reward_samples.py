"""Reward functions as people write them, well and badly; and jobs to score with them.

Workers import this module, so it imports nothing heavy. A column `touch` names a file that a function writes its
process id to when it starts.
"""

import asyncio
import concurrent.futures
import ctypes
import os
import re
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollout_service.core.model import FinishedRollout, FinishReason, Prompt, ScoreJob, Turn

FOLDER = str(Path(__file__).parent)


def turn(ids: Sequence[int], text: str = "") -> Turn:
    return Turn(
        prompt_ids=array("i", [1, 2]),
        output_ids=array("i", ids),
        logprobs=array("f", [-0.5] * len(ids)),
        finish_reason=FinishReason.STOP,
        text=text,
        engine="e0",
    )


def job(*completions: Any, prompt: Any = "What?", **columns: Any) -> ScoreJob:
    """A group whose survivors said these completions; survivor i has index 2 i and the ids [i, i + 1]."""
    rollouts = [
        FinishedRollout(index=2 * i, prompt=prompt, completion=said, turns=[turn([i, i + 1])])
        for i, said in enumerate(completions)
    ]
    text = prompt if isinstance(prompt, str) else None
    messages = None if isinstance(prompt, str) else prompt
    row = Prompt(prompt_id="p", text=text, messages=messages, columns=columns, num_generations=2 * len(rollouts))
    return ScoreJob(group_id="g", attempt=1, prompt=row, rollouts=rollouts)


async def until(condition: Callable[[], Any], within_s: float = 20.0) -> None:
    """Returns when the condition holds; fails when it does not in time."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        await asyncio.sleep(0.01)


def told_pid(path: Path) -> int | None:
    """The process id that a function wrote to its `touch` file, once it has."""
    return int(path.read_text()) if path.exists() and path.read_text().endswith("\n") else None


def _touch(columns: dict[str, Any]) -> None:
    for path in columns.get("touch", [])[:1]:
        Path(path).write_text(f"{os.getpid()}\n")


def said(completions, **columns):
    """Each completion is its own reward."""
    return [None if text == "None" else float(text) for text in completions]


def pid(completions, **columns):
    _touch(columns)
    return [float(os.getpid())] * len(completions)


def aligned(prompts, completions, completion_ids, **columns):
    """1.0 for each row in which everything is its own."""
    rows = zip(prompts, completions, completion_ids, columns["answer"], columns["extra"], strict=True)
    scores = [
        float(
            prompt == [{"role": "user", "content": "What?"}]
            and said == [{"role": "assistant", "content": f"c{i}"}]
            and ids == [i, i + 1]
            and all(type(token) is int for token in ids)
            and answer == "42"
            and extra == {"tags": ["a"], "big": 2**100, "small": -(2**70), "f": 0.5, "none": None}
        )
        for i, (prompt, said, ids, answer, extra) in enumerate(rows)
    ]
    columns["extra"][0]["tags"].append("changed")  # rows must not share what can be changed
    prompts[0][0]["content"] = "changed"
    return scores if columns["extra"][1]["tags"] == ["a"] and prompts[1][0]["content"] == "What?" else [-1.0] * 9


def narrow(completion_ids, answer, unknown="fallback"):
    """Has no **kwargs."""
    assert unknown == "fallback"
    return [float(len(ids)) for ids in completion_ids]


def all_turns(completion_ids, **columns):
    return [float(sum(ids)) for ids in completion_ids]


def short(completions, **columns):
    return [1.0]


def misbehave(completions, mode, **columns):
    """Does what the column `mode` says, else scores 1.0."""
    _touch(columns)
    action = {
        "busy": _busy,
        "regex": lambda: re.match(r"(a+)+$", "a" * 64 + "b"),
        "child": lambda: subprocess.run([sys.executable, "-c", _CHILD, columns["child"][0]], check=False),
        "sleep": lambda: time.sleep(600),
        "raise": lambda: _raise(ValueError("reward went \ud800 wrong")),
        "cancel": lambda: _raise(asyncio.CancelledError("stop it")),
        "futures-cancel": lambda: _raise(concurrent.futures.CancelledError()),
        "exit": lambda: sys.exit(3),
        "interrupt": lambda: _raise(KeyboardInterrupt()),
        "os-exit": lambda: os._exit(7),
        "segfault": lambda: ctypes.string_at(0),
        "print": lambda: print("printed by user code\n" * 2000) or os.write(1, b"\x00\x01\x02\xff" * 1000),
        "close-fds": lambda: os.closerange(3, 64),
        "wait": lambda: _wait_for(Path(columns["go"][0])),
        "thread": lambda: time.sleep(0.2),
    }.get(mode[0])
    if action is not None:
        action()
    return [1.0] * len(completions)


_CHILD = "import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()}\\n'); time.sleep(600)"


def _busy():
    while True:
        pass


def _raise(error):
    raise error


def _wait_for(path):
    while not path.exists():
        time.sleep(0.01)


def wrapped(completions, **columns):
    """A plain function that gives back a coroutine."""
    return later(completions=completions, mode=["fine"])


async def later(completions, mode, **columns):
    """The async twin of `misbehave`; runs in the service."""
    _touch(columns)
    await asyncio.sleep(0)
    if mode[0] == "hang":
        await asyncio.Event().wait()
    elif mode[0] == "stubborn":
        for _ in range(3):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                Path(columns["refused"][0]).write_text("refused\n")
                await asyncio.sleep(0)
                break
        await asyncio.Event().wait()
    elif mode[0] == "raise":
        raise ValueError("async went wrong")
    elif mode[0] == "cancel":
        raise asyncio.CancelledError
    elif mode[0] == "cancel-self":
        asyncio.current_task().cancel()
        await asyncio.sleep(0)
    elif mode[0] == "exit":
        sys.exit(3)
    elif mode[0] == "change":
        columns["extra"][0]["tags"].append("changed")
    return [float(os.getpid())] * len(completions)


class Judge:
    async def __call__(self, completions, **columns):
        return [2.0] * len(completions)


judge = Judge()
