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
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from rollout_service.simulator import Simulator, SimulatorSettings
from tests.durability.crashing import Point
from tests.durability.history import Attempt, History, Json
from tests.durability.lives import Lives, report_of
from tests.durability.trainer import Habits, Trainer
from tests.service import TERMINAL, free_port, tables, to_toml, until
from tests.tcp_proxy import Faults, Proxy

T = TypeVar("T")
FINISHED_AND_WANTED = """
SELECT r.seq, r.attempt, r.idx FROM rollouts AS r JOIN groups AS g ON g.seq = r.seq AND g.attempt = r.attempt
WHERE r.ok = 1 AND g.state IN ('generating', 'scoring', 'ready', 'leased')
"""
READY_WITHIN_S = 60.0
"""From the start of a life to its first answer, on a machine with more to do than this."""
MET_WITHIN_S = 60.0
SIGKILLED = -int(signal.SIGKILL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run is like."""

    seed: int
    n: int = 4
    slots: int = 10
    max_staleness: int = 1
    on_stale: str = "drop"
    latency: float = 0.08
    """Mean seconds of a completion, spread by 90 %."""
    server_errors: float = 0.03
    """Share of engine requests answered 503: tried again."""
    refusals: float = 0.02
    """Share answered 400: the rollout fails."""
    max_attempts: int = 3
    consumers: int = 3
    pending: int = 12
    """Groups outstanding that the run keeps up while it goes on."""
    prompts: int | None = None
    """How many there are; None: as many as it takes until `finish`."""
    habits: Habits = field(default_factory=Habits)
    lossy: Faults | None = None
    """Of the connections between trainer and service, and between service and engine."""


class Story:
    """Use `async with Story.told(plan, lives, directory) as story`."""

    def __init__(self, plan: Plan, lives: Lives, directory: Path) -> None:
        self.plan, self.lives, self.directory = plan, lives, directory
        self.rng = random.Random(plan.seed)
        self.history = History(max_staleness=plan.max_staleness)
        self.kills = 0
        self.reports: list[Json] = []
        """What each life that ended at its point found there."""
        self.tasks: list[asyncio.Task[None]] = []
        self.engine = Simulator(
            SimulatorSettings(latency=plan.latency, jitter=0.9, mean_tokens=8, seed=plan.seed, journal_size=10**6)
        )
        self.names = iter(f"p-{number}" for number in range(10**9))
        self.trainer: Trainer
        self.proxies: list[Proxy] = []
        self._kept: list[tuple[frozenset[Attempt], Counter[Attempt]]] = []
        """At each kill: finished rollouts on disk, and how often the engine was asked for each until then."""

    @classmethod
    @asynccontextmanager
    async def told(cls, plan: Plan, lives: Lives, directory: Path) -> AsyncIterator[Story]:
        story = cls(plan, lives, directory)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(story.engine)
            for share, status in ((plan.server_errors, 503), (plan.refusals, 400)):
                if share:
                    story.engine.faults.on(None, probability=share, status=status)
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
        plan = self.plan
        values = tables(
            self.directory,
            [engine_url],
            groups={
                "num_generations": plan.n,
                "max_staleness": plan.max_staleness,
                "on_stale": plan.on_stale,
                "halt_after_failed_groups": 0,
                "halt_after_unproductive_groups": 0,
            },
            dispatch={"max_inflight_rollouts": plan.slots, "max_attempts": plan.max_attempts},
            server={"port": port},
        )
        values["rewards"] = [{"name": "judge", "url": judge_url, "timeout_s": 10.0}]
        (self.directory / "rollout.toml").write_text(to_toml(values))

    # lives

    async def live(self, point: Point | None = None) -> None:
        """Begin a life, which ends by itself where a point is given."""
        arguments = ("serve", "--config", "rollout.toml", "--log-level", "warning")
        await self.lives.begin(self.directory, *arguments, point=point)

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
        self._kept.append((self._on_disk(), self._asked()))

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

    async def while_working(self, waiting: Coroutine[Any, Any, T], *others: asyncio.Task[None]) -> T:
        """The result of `waiting`, unless a task of the trainer (or another one) fails before."""
        waiter = asyncio.ensure_future(waiting)
        tasks: set[asyncio.Future[Any]] = {waiter, *self.tasks, *others}
        try:
            while not waiter.done():
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            waiter.cancel()
        return waiter.result()

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

    def _asked(self) -> Counter[Attempt]:
        """How often the engine was asked for each rollout: its tag is in the request id."""
        return Counter(_attempt(record.request_id) for record in self.engine.journal.records() if record.request_id)

    def log(self) -> str:
        path = self.directory / "service.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # the trainer

    def work(self) -> None:
        """Consumers, steering and a stream of prompts begin, once; they go on over every kill."""
        if self.tasks:
            return
        jobs = [self.trainer.consume(f"rank{rank}") for rank in range(self.plan.consumers)]
        self.tasks = [asyncio.create_task(job) for job in (*jobs, self.trainer.steer(), self._feed())]

    async def _feed(self) -> None:
        left = self.plan.prompts
        while self.trainer.steering if left is None else left > 0:
            status = await self.trainer.get("/status")
            if status["outstanding"] < self.plan.pending:
                count = self.rng.randint(2, 5) if left is None else min(left, self.plan.pending)
                left = None if left is None else left - count
                await self.trainer.submit([next(self.names) for _ in range(count)], final=left == 0)
            await asyncio.sleep(0.05)

    async def ended(self, count: int) -> None:
        """Wait until that many groups have ended, whichever way."""
        counts: dict[str, int] = {}
        while sum(counts.get(state, 0) for state in TERMINAL) < count:
            await asyncio.sleep(0.02)
            counts = (await self.trainer.get("/status"))["groups"]

    async def finish(self, within_s: float = 120.0) -> Counter[str]:
        """No more kills, and no more prompts than planned: wait until all is over, and check it.

        How many groups there are of each terminal state.
        """
        async with asyncio.timeout(within_s):
            if self.plan.prompts is None:
                self.trainer.steering = False
                await asyncio.gather(*self.tasks[-2:])
                await self.trainer.submit([next(self.names)], final=True)
            await asyncio.gather(*self.tasks[:-2])
            self.trainer.steering = False
            await asyncio.gather(*self.tasks)
        status = await self.trainer.look()
        ended = self.history.finished(status, await self.trainer.groups())
        self._check_nothing_again()
        return ended

    def _check_nothing_again(self) -> None:
        asked = self._asked()
        for finished, before in self._kept:
            again = [rollout for rollout in finished if asked[rollout] > before[rollout]]
            assert not again, f"finished, on disk, and generated again: {again}"

    def tally(self) -> str:
        """One line for people: what was met and what came of it."""
        history = self.history
        return (
            f"{len(history.prompts)} prompts, {len(history.acked)} acked, {len(history.leases)} leases, "
            f"{history.replays} replays, {sum(n - 1 for n in history.deliveries.values() if n > 1)} redeliveries, "
            f"version {history.version}, {sum(len(finished) for finished, _ in self._kept)} finished rollouts kept "
            f"over {self.kills} kills"
        )

    def verdict(self) -> str:
        """What the proof is about."""
        lost, duplicated = len(self.history.lost), len(self.history.duplicated)
        return f"kills: {self.kills}, lost: {lost}, duplicated: {duplicated}"

    async def _let_go(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.lives.pid is not None:
            self.lives.signal(signal.SIGKILL)
            await self.lives.ended()


def _attempt(request_id: str) -> Attempt:
    """Out of `g-7.2.0-...`: group, attempt, row."""
    group, attempt, row = request_id.rpartition("-")[0].split(".")
    return group, int(attempt), int(row)


@asynccontextmanager
async def judge() -> AsyncIterator[str]:
    """A reward webhook: a completion scores by its tokens."""

    async def score(request: web.Request) -> web.Response:
        try:
            fields = await request.json()
        except ConnectionResetError:  # the service was killed while it asked
            return web.Response()
        return web.json_response({"rewards": [sum(ids) % 7 / 7 for ids in fields["completion_ids"]]})

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/score", score)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/score"
    finally:
        await runner.cleanup()
