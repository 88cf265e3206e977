"""The command line, for tests of what it says: each command in a process forked from one that has imported everything.

What always holds: arguments, folder, environment, exit code and both outputs are those of `python -m rollout_service`,
and it has ended when its result is there. What only a new interpreter shows (its imports, a signal while it starts) is
not shown: that takes two seconds of processor time a command.
"""

from __future__ import annotations

import asyncio
import atexit
import subprocess
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tests.durability.lives import Lives

_LOCK = threading.Lock()


@cache
def _lives() -> Lives:
    lives = Lives().__enter__()
    atexit.register(lives.__exit__)
    return lives


def run(*arguments: str, cwd: Path, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Ends within a minute, or is killed and raises TimeoutError; one at a time."""
    with _LOCK:
        return _lives().run(*arguments, cwd=cwd, environ=environ)


async def arun(
    *arguments: str, cwd: Path, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`run` beside what the event loop does meanwhile."""
    return await asyncio.to_thread(run, *arguments, cwd=cwd, environ=environ)
