"""One run of a real service process over many lives: simulated engine, reward webhook, trainer; every life is checked.

What always holds: before a new life begins, what the one before left on disk was read from a copy; a rollout found
finished there is never asked of the engine again in that attempt.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

from tests.durability.crashing import Point, order, report_of
from tests.durability.history import Attempt, Json
from tests.durability.lives import Lives
from tests.durability.tale import Plan, Tale, changes, judge
from tests.durability.trainer import Trainer
from tests.service import free_port, tables, to_toml, until
from tests.tcp_proxy import Faults, Proxy

FINISHED_AND_WANTED = """
SELECT r.seq, r.attempt, r.idx FROM rollouts AS r JOIN groups AS g ON g.seq = r.seq AND g.attempt = r.attempt
WHERE r.ok = 1 AND g.state IN ('generating', 'scoring', 'ready', 'leased')
"""
READY_WITHIN_S = 60.0
"""From the start of a life to its first answer, on a machine with more to do than this."""
MET_WITHIN_S = 60.0
SIGKILLED = -int(signal.SIGKILL)


class Story(Tale):
    """Use `async with Story.told(plan, lives, directory) as story`."""

    def __init__(self, plan: Plan, lives: Lives, directory: Path) -> None:
        super().__init__(plan)
        self.lives, self.directory = lives, directory
        self.reports: list[Json] = []
        """What each life that ended at its point found there."""
        self.proxies: list[Proxy] = []

    @classmethod
    @asynccontextmanager
    async def told(cls, plan: Plan, lives: Lives, directory: Path) -> AsyncIterator[Story]:
        story = cls(plan, lives, directory)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(story.engine)
            judge_url = await stack.enter_async_context(judge())
            engine_url, port = story.engine.url, free_port()
            url = f"http://127.0.0.1:{port}"
            if plan.lossy is not None:
                engine_url = await story._through(stack, engine_url, plan.lossy, 1)
                url = await story._through(stack, url, plan.lossy, 2)
            story._configure(engine_url, judge_url, port)
            story.trainer = await stack.enter_async_context(
                Trainer(url, random.Random(plan.seed + 1), story.history, plan.habits)
            )
            stack.push_async_callback(story._let_go)
            yield story

    async def _through(self, stack: AsyncExitStack, url: str, faults: Faults, number: int) -> str:
        proxy = Proxy(url, random.Random(self.plan.seed + 100 * number), faults)
        self.proxies.append(await stack.enter_async_context(proxy))
        return proxy.url

    def _configure(self, engine_url: str, judge_url: str, port: int) -> None:
        values = tables(self.directory, [engine_url], **changes(self.plan), server={"port": port})
        values["rewards"] = [{"name": "judge", "url": judge_url, "timeout_s": 10.0}]
        (self.directory / "rollout.toml").write_text(to_toml(values))

    # lives

    async def live(self, point: Point | None = None) -> None:
        """Begin a life, which ends by itself where a point is given."""
        arguments = ("serve", "--config", "rollout.toml", "--log-level", "warning")
        before = None if point is None else order(point)
        await self.lives.begin(self.directory, *arguments, before=before)

    async def ready(self) -> None:
        """The life answers, and what it says of itself fits what was seen before."""
        await until(lambda: self._answers(), READY_WITHIN_S, "the service answers")
        await self.trainer.look()

    async def _answers(self) -> bool:
        try:
            status, _ = await self.trainer.once("GET", "/livez")
        except Exception:
            await asyncio.sleep(0.01)
            return False
        return status == 200

    async def kill(self) -> None:
        self.lives.signal(signal.SIGKILL)
        await self.killed()

    async def killed(self, *others: asyncio.Task[None]) -> None:
        """Wait for the end of a life by SIGKILL, and keep what it left."""
        code = await self.while_working(self.lives.ended(), *others)
        assert code == SIGKILLED, f"ended with {code}:\n{self.log()[-3000:]}"
        self.kills += 1
        report = report_of(self.directory)
        if report.exists():
            self.reports.append(json.loads(report.read_text()))
            report.unlink()
        self._kept.append((self._on_disk(), self.asked()))

    async def meet(self, point: Point) -> None:
        """A whole life, which ends at `point`; the trainer works on from the first one's start."""
        await self.live(point)
        look = asyncio.create_task(self.ready())
        self.work()
        try:
            async with asyncio.timeout(MET_WITHIN_S):
                await self.killed(look)
        finally:
            look.cancel()
            await asyncio.wait({look})

    def _on_disk(self) -> frozenset[Attempt]:
        """Finished rollouts of groups that go on, from a copy, so that the next life finds the file as it was left."""
        with tempfile.TemporaryDirectory() as folder:
            for name in ("rollout.db", "rollout.db-wal"):
                if (self.directory / name).exists():
                    shutil.copyfile(self.directory / name, Path(folder, name))
            if not Path(folder, "rollout.db").exists():
                return frozenset()  # killed before it made its store
            with closing(sqlite3.connect(Path(folder, "rollout.db"))) as connection:
                if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'rollouts'").fetchone():
                    return frozenset()
                found = connection.execute(FINISHED_AND_WANTED).fetchall()
        return frozenset((f"g-{seq}", attempt, row) for seq, attempt, row in found)

    def log(self) -> str:
        path = self.directory / "service.log"
        return path.read_text(errors="replace") if path.exists() else ""

    async def _let_go(self) -> None:
        await self.rest()
        if self.lives.pid is not None:
            self.lives.signal(signal.SIGKILL)
            await self.lives.ended()
