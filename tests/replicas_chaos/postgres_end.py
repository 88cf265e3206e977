"""The ways a PostgreSQL server ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

from tests.postgres_cluster import Cluster
from tests.service import until

GONE_WITHIN_S = 30.0
End: TypeAlias = Callable[[Cluster], Awaitable[None]]


async def stop(cluster: Cluster) -> None:
    """In order: sessions are told."""
    await asyncio.to_thread(cluster.stop)


async def crash(cluster: Cluster) -> None:
    """As by a crash: an immediate stop."""
    await asyncio.to_thread(cluster.stop, at_once=True)


async def kill(cluster: Cluster) -> None:
    """SIGKILL to the postmaster; its children notice, and the next start is safe when they are gone."""
    pid = cluster.pid()
    children = [child for child, parent in _parents().items() if parent == pid]
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not set(children) & _parents().keys(), GONE_WITHIN_S, "the server's processes end")
    await crash(cluster)


async def start(cluster: Cluster) -> None:
    await asyncio.to_thread(cluster.start)


def _parents() -> dict[int, int]:
    """Pid -> parent's pid of every process that runs."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # it ended meanwhile
            if state != "Z":
                found[int(folder.name)] = int(parent)
    return found
