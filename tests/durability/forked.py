"""A service of its own process for one test, forked: `Api` over it, its exit code and what it printed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx

from tests.durability.lives import Lives
from tests.service import Api, free_port, tables, to_toml, until

SERVE = ("serve", "--config", "rollout.toml", "--log-level", "warning")


class Forked(Api):
    """Written into `directory`; `start` and `fails_to_start` may come again after an end."""

    def __init__(self, lives: Lives, directory: Path, engine: str, judge: str, **changes: Any) -> None:
        self.lives, self.directory, self.port = lives, directory, free_port()
        changes["server"] = {"port": self.port} | changes.get("server", {})
        values = tables(directory, [engine], **changes)
        values["rewards"] = [{"name": "judge", "url": judge, "timeout_s": 10.0}]
        super().__init__(values["groups"]["max_staleness"])
        (directory / "rollout.toml").write_text(to_toml(values))

    @property
    def store(self) -> Path:
        return self.directory / "rollout.db"

    async def start(self) -> Forked:
        await self.lives.begin(self.directory, *SERVE)
        if not hasattr(self, "http") or self.http.is_closed:
            self.connect(self.port)
        await until(self._answers, 60, f"an answer; {self.log()[-2000:]}")
        return self

    async def _answers(self) -> bool:
        try:
            return await self.probe("/livez") == 200
        except httpx.TransportError:
            return False

    async def fails_to_start(self, *, obedient: bool = False) -> str:
        """The one line a start that is refused leaves on stderr, with exit code 2."""
        before = len(self.log())
        await self.lives.begin(self.directory, *SERVE, obedient=obedient)
        code = await self.lives.ended()
        said = self.log()[before:]
        assert code == 2, f"{code}: {said}"
        assert "Traceback" not in said
        lines = [line for line in said.splitlines() if line.startswith("rollout-service: error: ")]
        assert len(lines) == 1, said
        return lines[0]

    async def end(self, number: int = signal.SIGTERM) -> int:
        """End it; the exit code."""
        self.lives.signal(number)
        code = await self.lives.ended()
        await self.http.aclose()
        return code

    async def let_go(self) -> None:
        """Whatever state it is in."""
        if self.lives.pid is not None:
            self.lives.signal(signal.SIGKILL)
            await self.lives.ended()
        if hasattr(self, "http"):
            await self.http.aclose()

    def log(self) -> str:
        path = self.directory / "service.log"
        return path.read_text(errors="replace") if path.exists() else ""
