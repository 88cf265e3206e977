"""A line to a server on which every answer is under way for a while.

What always holds: nothing is lost or reordered, and answers under way do not hold up each other.
"""

from __future__ import annotations

import asyncio
import random

from tests.tcp_proxy import PIECE, Faults, Proxy


class SlowLine(Proxy):
    """`delay_s` may be changed while it runs."""

    def __init__(self, target: str, *, delay_s: float) -> None:
        super().__init__(target, random.Random(0), Faults(drop=0.0, cut=0.0, delay=0.0))
        self.delay_s = delay_s

    async def __aenter__(self) -> SlowLine:
        await super().__aenter__()
        return self

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        clock = asyncio.get_running_loop().time

        async def arrive() -> None:
            while True:
                due, piece = await under_way.get()
                await asyncio.sleep(due - clock())
                if not piece:
                    return
                writer.write(piece)
                await writer.drain()

        async with asyncio.TaskGroup() as both:
            both.create_task(arrive())
            while piece := await reader.read(PIECE):
                under_way.put_nowait((clock() + self.delay_s, piece))
                self.counts["passed"] += 1
            under_way.put_nowait((clock() + self.delay_s, b""))
