"""What the runs that are killed have in common: simulated engine, reward webhook, trainer, and the end of it all.

What always holds: a run ends only when every prompt has ended, and then its trainer's history is checked against what
the service says of itself.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from rollout_service.simulator import Simulator, SimulatorSettings
from tests.durability.history import Attempt, History
from tests.durability.trainer import Habits, Trainer
from tests.listening import end
from tests.service import TERMINAL
from tests.tcp_proxy import Faults

T = TypeVar("T")


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


def changes(plan: Plan) -> dict[str, Any]:
    """Of the settings, for `tests.service.tables`."""
    return {
        "groups": {
            "num_generations": plan.n,
            "max_staleness": plan.max_staleness,
            "on_stale": plan.on_stale,
            "halt_after_failed_groups": 0,
            "halt_after_unproductive_groups": 0,
        },
        "dispatch": {"max_inflight_rollouts": plan.slots, "max_attempts": plan.max_attempts},
    }


class Tale:
    """Base: a trainer at work against whatever it is that comes and goes."""

    trainer: Trainer

    def __init__(self, plan: Plan, *, host: str = "127.0.0.1") -> None:
        """`host`: where the engine listens."""
        self.plan = plan
        self.rng = random.Random(plan.seed)
        self.history = History(max_staleness=plan.max_staleness)
        self.kills = 0
        self.tasks: list[asyncio.Task[None]] = []
        self.engine = Simulator(
            SimulatorSettings(
                host=host, latency=plan.latency, jitter=0.9, mean_tokens=8, seed=plan.seed, journal_size=10**6
            )
        )
        for share, status in ((plan.server_errors, 503), (plan.refusals, 400)):
            if share:
                self.engine.faults.on(None, probability=share, status=status)
        self.names = iter(f"p-{number}" for number in range(10**9))
        self._kept: list[tuple[frozenset[Attempt], Counter[Attempt]]] = []
        """At each kill: finished rollouts in the store, and how often the engine was asked for each until then."""

    def asked(self) -> Counter[Attempt]:
        """How often the engine was asked for each rollout: its tag is in the request id."""
        return Counter(attempt_of(record.request_id) for record in self.engine.journal.records() if record.request_id)

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
        return await self.check()

    async def check(self) -> Counter[str]:
        """That every prompt ended, and as the trainer knows it."""
        status = await self.trainer.look()
        ended = self.history.finished(status, await self.trainer.groups())
        self._check_nothing_again()
        return ended

    def _check_nothing_again(self) -> None:
        asked = self.asked()
        for finished, before in self._kept:
            again = [rollout for rollout in finished if asked[rollout] > before[rollout]]
            assert not again, f"finished, in the store, and generated again: {again}"

    @property
    def kept(self) -> int:
        """Finished rollouts that were seen in the store at kills."""
        return sum(len(finished) for finished, _ in self._kept)

    def tally(self) -> str:
        """One line for people: what was met and what came of it."""
        history = self.history
        return (
            f"{len(history.prompts)} prompts, {len(history.acked)} acked, {len(history.leases)} leases, "
            f"{history.replays} replays, {sum(n - 1 for n in history.deliveries.values() if n > 1)} redeliveries, "
            f"version {history.version}, {self.kept} finished rollouts kept over {self.kills} kills"
        )

    def verdict(self) -> str:
        """What the proof is about."""
        lost, duplicated = len(self.history.lost), len(self.history.duplicated)
        return f"kills: {self.kills}, lost: {lost}, duplicated: {duplicated}"

    async def rest(self) -> None:
        """The trainer stops wherever it is."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def attempt_of(request_id: str) -> Attempt:
    """Out of `g-7.2.0-...`: group, attempt, row."""
    group, attempt, row = request_id.rpartition("-")[0].split(".")
    return group, int(attempt), int(row)


@asynccontextmanager
async def judge(host: str = "127.0.0.1") -> AsyncIterator[str]:
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
        site = web.TCPSite(runner, host, 0)
        await site.start()
        yield f"http://{host}:{runner.addresses[0][1]}/score"
    finally:
        await end(runner)
