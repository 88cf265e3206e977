"""A TCP proxy that loses, cuts and delays answers; requests always arrive, as far as the other side takes them.

What always holds: what happens to the next piece of an answer is drawn from the generator given, in order of arrival;
a connection whose answer was lost or cut ends there, on both sides. `counts` says what was done.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from urllib.parse import urlsplit

from tests.listening import Listener, cut

PIECE = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Shares of the pieces of answers that arrive."""

    drop: float = 0.02
    """Nothing of it is passed on: the caller sees its connection end."""
    cut: float = 0.02
    """Half of it is passed on, and then a reset."""
    delay: float = 0.05
    """Passed on, up to `delay_s` later."""
    delay_s: float = 0.2


class Proxy:
    """`async with Proxy("http://127.0.0.1:8000", random.Random(7), Faults()) as proxy: ... proxy.url`.

    The target may come and go: while it is away, connections are accepted and closed.
    """

    def __init__(self, target: str, rng: random.Random, faults: Faults) -> None:
        parts = urlsplit(target)
        assert parts.hostname is not None
        assert parts.port is not None
        self.faults = faults
        self.counts: Counter[str] = Counter()
        self._host, self._port, self._rng = parts.hostname, parts.port, rng
        self._listener = Listener(self._accepted)

    @property
    def url(self) -> str:
        return f"http://{self._listener.address}"

    async def __aenter__(self) -> Proxy:
        await self._listener.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listener.stop()

    def cut_all(self) -> None:
        """End every connection, on both sides."""
        self._listener.cut_all()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.counts["connections"] += 1
        await self._connected(reader, writer)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_target = await asyncio.open_connection(self._host, self._port)
        ways = {
            asyncio.ensure_future(_pump(reader, to_target)),
            asyncio.ensure_future(self._answers(there, writer)),
        }
        try:
            # Either side's end is the end: a caller that has hung up must be seen as one.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            to_target.transport.abort()  # before anything is waited for: a cancellation may come while we do
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            await cut(to_target)

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(PIECE):
            fate = self._draw()
            self.counts[fate] += 1
            if fate == "drop":
                return
            if fate == "cut":
                writer.write(piece[: len(piece) // 2])
                await writer.drain()
                writer.transport.abort()
                return
            if fate == "delay":
                await asyncio.sleep(self._rng.uniform(0.0, self.faults.delay_s))
            writer.write(piece)
            await writer.drain()

    def _draw(self) -> str:
        drawn = self._rng.random()
        for fate, share in (("drop", self.faults.drop), ("cut", self.faults.cut), ("delay", self.faults.delay)):
            if drawn < share:
                return fate
            drawn -= share
        return "passed"


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(PIECE):
        writer.write(piece)
        await writer.drain()
