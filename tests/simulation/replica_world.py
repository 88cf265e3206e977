"""Several replicas on a virtual clock over one store in memory; a trainer that asks whichever; faults from one seed.

Replicas are killed, cut off from the store for less and for longer than their claims last, lose answers on the way; the
store is away for all of them; versions rise, fall and are rewound; groups are cancelled, released, never acked.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rollout_service.core.group import GroupPolicy, OnStale
from rollout_service.core.model import (
    FailedRollout,
    FailureReason,
    FinishedRollout,
    FinishReason,
    GroupState,
    RolloutJob,
    ScoreJob,
    Scores,
    Turn,
)
from rollout_service.core.scheduler import Admission, Policy
from rollout_service.core.scoring import ScoringRules
from rollout_service.errors import Conflict, Halted, NotFound, ShuttingDown, StoreUnavailable
from rollout_service.orchestrator import LeaseAnswer, LeaseRequest, LeaseStatus, Rules
from rollout_service.orchestrator.parts import Gate
from rollout_service.replicas import ReplicaOrchestrator, ReplicaSettings
from rollout_service.store.shared import Transaction
from rollout_service.store.shared_memory import SharedMemory, SharedMemoryStore
from tests.fakes import Engines, Recorder, submission
from tests.simulation import virtual

T = TypeVar("T")

FAULTS = ("kill", "cut_short", "cut_long", "lost_answer", "store_away", "bump", "reset", "rewind", "cancel", "release",
          "no_ack", "pause", "join", "leave", "deaf")  # fmt: skip
CHAOS_S = 120.0
LEASE_S = 5.0
PATIENCE_S = 3_000.0
"""Virtual; a run that has not drained by then is stuck."""


class Wrong(AssertionError):
    """Something was promised and not kept."""


class Runner:
    """Rollouts that take their time, sometimes fail, and say whose they are."""

    def __init__(self, random_: random.Random) -> None:
        self._random = random_

    async def run(self, job: RolloutJob, gate: Gate) -> FinishedRollout | FailedRollout:
        await gate.passed()
        await asyncio.sleep(self._random.expovariate(1 / 1.5))
        await gate.passed()
        if self._random.random() < 0.08:
            return FailedRollout(index=job.index, reason=FailureReason.SERVER_ERROR, error="unlucky")
        ids = (int(job.group_id.removeprefix("g-")), job.attempt, job.index)
        turn = Turn(
            prompt_ids=array("i", (1,)),
            output_ids=array("i", ids),
            logprobs=array("f", (-0.5,) * 3),
            finish_reason=FinishReason.STOP,
            text="abc",
            engine="e",
        )
        return FinishedRollout(index=job.index, prompt="p", completion="abc", turns=(turn,))


class FarStore(SharedMemoryStore):
    """A handle whose transactions take a while to begin, and whose answers take a while to arrive."""

    def __init__(self, memory: SharedMemory, random_: random.Random) -> None:
        super().__init__(memory)
        memory.add(self)
        self._random = random_

    async def transact(
        self, work: Callable[[Transaction], Awaitable[T]], *, alone: bool = False, exclusive: str | None = None
    ) -> T:
        await asyncio.sleep(self._random.expovariate(1 / 0.1))
        try:
            return await super().transact(work, alone=alone, exclusive=exclusive)
        finally:
            await asyncio.sleep(self._random.expovariate(1 / 0.1))


class Scorer:
    def __init__(self, random_: random.Random) -> None:
        self._random = random_

    async def score(self, job: ScoreJob) -> Scores:
        await asyncio.sleep(self._random.random())
        return Scores(rewards={"accuracy": [float(r.index) for r in job.rollouts]})


class ReplicaWorld:
    """One run, from its seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        draw = self.random
        self.met: Counter[str] = Counter()
        paced = draw.random() < 0.3
        self.policy = Policy(
            group=GroupPolicy(
                max_staleness=draw.choice((0, 1, 2)),
                on_stale=draw.choice((OnStale.DROP, OnStale.REQUEUE)),
                max_group_attempts=3,
            ),
            slots=draw.choice((3, 8, 20)),
            max_ready_groups=draw.choice((4, 64)),
            admission=Admission.PACE if paced else Admission.SLOTS,
            groups_per_step=3 if paced else 0,
        )
        self.memory = SharedMemory(self.policy.group.max_staleness, self.clock)
        self.members: list[tuple[ReplicaOrchestrator, SharedMemoryStore]] = []
        self.endings: set[asyncio.Task[None]] = set()
        self.ids = iter(range(1, 10**9))
        self.delivered: dict[str, dict[str, tuple[int, ...]]] = {}
        """Lease -> group -> rows of the rollouts it came with."""
        self.acks_asked: set[tuple[str, str]] = set()
        self.calm = False
        """Nothing is harmed any more."""

    def clock(self) -> float:
        return 1_000_000.0 + asyncio.get_running_loop().time()

    async def main(self) -> None:
        for _ in range(3):
            await self.join()
        feeding = asyncio.create_task(self.feed())
        training = asyncio.create_task(self.train())
        while asyncio.get_running_loop().time() < CHAOS_S:
            await asyncio.sleep(self.random.expovariate(1 / 1.0))
            await self.harm()
            self.look()
        self.memory.broken = None
        for _, store in self.members:
            store.cut, store.lost_answers, store.pushes = False, 0, True
        await self.anywhere(lambda door: door.resume())
        self.calm = True
        async with asyncio.timeout(PATIENCE_S):
            await feeding
            await training
        self.look()
        counts = self.memory.content.whole().counts
        if any(count for state, count in counts.items() if not state.terminal):
            raise Wrong(f"exhausted with {counts}")
        for door, _ in self.members:
            await door.stop()
        await asyncio.gather(*self.endings)
        self.check_acks()

    # replicas

    async def join(self) -> None:
        number = next(self.ids)
        store = FarStore(self.memory, self.random)
        door = ReplicaOrchestrator(
            Rules(policy=self.policy, scoring=ScoringRules(weights={"accuracy": 1.0}), engine_wait_s=300),
            ReplicaSettings(name=f"r{number}", lease_s=LEASE_S),
            store=store,
            runner=Runner(self.random),
            scorer=Scorer(self.random),
            engines=Engines(),
            observer=Recorder(),
            healths=lambda: (1, 1),
            clock=self.clock,
            new_id=lambda: f"{number}-{next(self.ids)}",
        )
        await door.start()
        self.members.append((door, store))

    def end(self, at: int, *, killed: bool) -> None:
        door, store = self.members.pop(at)
        store.cut = store.cut or killed  # nothing it does from now on reaches the store: that is a kill

        async def stop() -> None:
            with contextlib.suppress(StoreUnavailable):
                await door.stop()

        task = asyncio.create_task(stop())
        self.endings.add(task)

    async def harm(self) -> None:
        fault = self.random.choice(FAULTS)
        self.met[fault] += 1
        one = self.random.randrange(len(self.members))
        door, store = self.members[one]
        match fault:
            case "kill" | "leave":
                if len(self.members) > 1:
                    self.end(one, killed=fault == "kill")
            case "join":
                if len(self.members) < 4 and self.memory.broken is None:
                    await self.join()
            case "cut_short" | "cut_long":
                store.cut = True
                after = LEASE_S * (0.3 if fault == "cut_short" else 2.5)
                asyncio.get_running_loop().call_later(after, setattr, store, "cut", False)
            case "lost_answer":
                store.lost_answers += self.random.choice((1, 1, 3))
            case "store_away":
                self.memory.broken = "restarting"
                after = self.random.choice((0.5, 3.0, LEASE_S * 2))
                asyncio.get_running_loop().call_later(after, setattr, self.memory, "broken", None)
            case "deaf":
                store.pushes = not store.pushes
            case "bump" | "reset" | "rewind" | "cancel" | "pause":
                with contextlib.suppress(StoreUnavailable, Conflict, NotFound, ShuttingDown):
                    await self.call(door, fault)

    async def call(self, door: ReplicaOrchestrator, what: str) -> None:
        seen = self.memory.content.shared_run().run
        match what:
            case "bump":
                await door.post_version(seen.policy_version + self.random.choice((1, 1, 2)))
            case "reset":
                await door.post_version(max(0, seen.policy_version - 1), reset=True)
            case "rewind":
                if self.random.random() < 0.6:
                    await door.mark(f"m{next(self.ids)}")
                elif marks := await door.checkpoints():
                    await door.rewind(self.random.choice(marks).name)
            case "cancel":
                if seen.last_seq:
                    await door.cancel(f"g-{self.random.randint(1, seen.last_seq)}")
            case "pause":
                await (door.pause() if self.random.random() < 0.5 else door.resume())

    # callers

    async def anywhere(self, call: Callable[[ReplicaOrchestrator], Awaitable[T]]) -> T:
        """Ask one replica after the other until one answers."""
        while True:
            door, _ = self.random.choice(self.members)
            try:
                return await call(door)
            except (StoreUnavailable, ShuttingDown):
                await asyncio.sleep(0.5)

    async def feed(self) -> None:
        for at in range(12):
            some = [submission(f"p{at}-{n}", self.random.choice((2, 4))) for n in range(3)]
            await self.anywhere(lambda door, some=some: door.submit(some))  # type: ignore[misc]  # bound at once
            await asyncio.sleep(self.random.random() * 10)
        await self.anywhere(lambda door: door.submit([], final=True))

    async def train(self) -> None:
        while True:
            request = LeaseRequest(
                max_groups=self.random.choice((1, 3)),
                wait_s=5,
                lease_s=20,
                request_id=f"q{next(self.ids)}" if self.random.random() < 0.5 else None,
            )
            try:
                answer = await self.anywhere(lambda door, request=request: door.lease(request))  # type: ignore[misc]
            except Halted:
                await self.anywhere(lambda door: door.resume())
                continue
            except Conflict:
                continue
            if answer.status is LeaseStatus.EXHAUSTED:
                if self.calm:
                    return
                await asyncio.sleep(1)
                continue
            if answer.lease is not None:
                await self.take(answer)

    async def take(self, answer: LeaseAnswer) -> None:
        lease = answer.lease
        assert lease is not None
        groups = {}
        for payload in answer.payloads:
            group = payload.group
            if lease.policy_version - (group.version or 0) > self.policy.group.max_staleness:
                raise Wrong(f"{group.group_id} of version {group.version} leased at {lease.policy_version}")
            rows = []
            for rollout in payload.rollouts.values():
                if isinstance(rollout, FinishedRollout):
                    ids = tuple(rollout.turns[0].output_ids)
                    if ids != (group.seq, group.attempt, rollout.index):
                        raise Wrong(f"{group.group_id}, attempt {group.attempt}, has a rollout of {ids}")
                    rows.append(rollout.index)
            groups[group.group_id] = tuple(rows)
        before = self.delivered.setdefault(lease.lease_id, groups)
        if any(before[name] != rows for name, rows in groups.items() if name in before):
            raise Wrong(f"lease {lease.lease_id} came with other content: {before}, {groups}")
        await asyncio.sleep(self.random.random())
        what = self.random.random()
        if what < 0.1 and not self.calm:
            self.met["no_ack"] += 1
            return
        with contextlib.suppress(Conflict, NotFound):
            if what < 0.2:
                self.met["release"] += 1
                await self.anywhere(lambda door: door.release(lease.lease_id, None))
            else:
                self.acks_asked |= {(lease.lease_id, name) for name in groups}
                await self.anywhere(lambda door: door.ack(lease.lease_id, None))

    # what must hold

    def look(self) -> None:
        content = self.memory.content
        counts, run = content.whole().counts, content.shared_run().run
        if sum(counts.values()) != run.last_seq:
            raise Wrong(f"{run.last_seq} submitted, {counts}")

    def check_acks(self) -> None:
        for group in self.memory.content.groups.values():
            if group.state is not GroupState.ACKED:
                continue
            if group.acked_by is None or (group.acked_by, group.group_id) not in self.acks_asked:
                raise Wrong(f"{group.group_id} is acked by {group.acked_by}, which nobody asked for")


def simulate(seed: int) -> ReplicaWorld:
    """The whole run. Raises what it finds wrong."""
    world = ReplicaWorld(seed)
    result: Any = virtual.run(world.main())
    assert result is None
    return world
