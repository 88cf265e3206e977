"""One replica that somebody keeps alive: when its process ends, another begins, as under any supervisor.

What always holds: an end that was neither asked for nor a start without a database is an error; every kill that is
counted ended a process.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import aiohttp

from tests.durability.lives import Lives
from tests.service import until

SIGKILLED = -int(signal.SIGKILL)
REFUSED = 2
"""Exit status of a start that cannot be: without a database, too."""
NO_DATABASE = "rollout-service: error: store.url: "
AGAIN_S = 0.1
LOOK_S = 0.03
"""Between two looks at a replica that is not ready: it needs the processor to become so."""
BEGUN_WITHIN_S = 60.0
SERVE = ("serve", "--config", "rollout.toml", "--log-level", "warning")


class Member:
    """`keep` is to run as a task; everything else may be called from any other."""

    def __init__(self, lives: Lives, directory: Path, port: int, host: str = "127.0.0.1") -> None:
        self.lives, self.directory, self.port, self.host = lives, directory, port, host
        self.orders: list[tuple[str, Any]] = []
        """What comes before the service in the next lives, one each; see `Lives.begin`."""
        self.lives_left: int | None = None
        """After so many no other begins; None: always."""
        self.arguments = SERVE
        self.kills = 0
        self.begun = 0
        """Lives until now."""
        self.frozen = False
        self.wanted = True
        """Whether the next life is to begin."""
        self._obeyed = False
        """Its end was asked for."""

    @property
    def name(self) -> str:
        """As the others see it."""
        return self.directory.name

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def keep(self) -> None:
        """One life after the other. Raises AssertionError at an end nobody wanted."""
        while True:
            while not self.wanted:
                await asyncio.sleep(0.01)
            said = len(self.log())
            self._obeyed = False
            before = self.orders.pop(0) if self.orders else None
            await self.lives.begin(self.directory, *self.arguments, before=before)
            self.begun += 1
            if self.lives_left is not None:
                self.lives_left -= 1
                self.wanted = self.lives_left > 0
            code = await self.lives.ended()
            self.frozen = False
            if code == SIGKILLED:
                self.kills += 1
            elif code == REFUSED and NO_DATABASE in self.log()[said:]:
                await asyncio.sleep(AGAIN_S)
            else:
                assert code == 0, f"ended with {code}:\n{self.log()[-3000:]}"
                assert self._obeyed, f"ended by itself:\n{self.log()[-3000:]}"

    @property
    def alive(self) -> bool:
        return self.lives.pid is not None

    async def kill(self) -> None:
        """Returns when the next life has begun."""
        await self._end(signal.SIGKILL)

    async def restart(self) -> None:
        """In order, by SIGTERM."""
        self._obeyed = True
        await self._end(signal.SIGTERM)

    async def down(self, number: int) -> None:
        """End it by this signal, and have no other begin until `wanted`."""
        self.wanted = False
        self._obeyed = number == signal.SIGTERM
        self.lives.signal(number)
        await until(lambda: not self.alive, BEGUN_WITHIN_S, "the replica ends")

    async def _end(self, number: int) -> None:
        begun = self.begun
        await until(lambda: self.alive, BEGUN_WITHIN_S, "the replica began")
        self.lives.signal(number)
        await until(lambda: self.begun > begun, BEGUN_WITHIN_S, "the next life")

    def freeze(self) -> None:
        """It stands still, connections and all."""
        self.lives.signal(signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        self.lives.signal(signal.SIGCONT)
        self.frozen = False

    async def ready(self) -> None:
        """Until /readyz is 200."""
        await until(self._is_ready, BEGUN_WITHIN_S, "the replica is ready")

    async def _is_ready(self) -> bool:
        if (await self.readyz())[0] == 200:
            return True
        await asyncio.sleep(LOOK_S)
        return False

    async def readyz(self) -> tuple[int, str]:
        """Status and body; 0 where nobody answers."""
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http,
                http.get(f"{self.url}/readyz") as answer,
            ):
                return answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return 0, repr(error)

    def log(self) -> str:
        path = self.directory / "service.log"
        return path.read_text(errors="replace") if path.exists() else ""
