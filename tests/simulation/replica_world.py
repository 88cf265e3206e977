"""Several replicas on a virtual clock over one store in memory; a trainer that asks whichever; faults from one seed.

Replicas are killed, cut off from the store for less and for longer than their claims last, lose answers on the way; the
store is away for all of them; versions rise, fall and are rewound; groups are cancelled, released, acked in parts, by
two trainers whose leases overlap, or never. What is stored is compared with what is told (`replica_books`), and what
each replica works for with what the store says it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from array import array
from collections.abc import Awaitable, Callable, Sequence
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
    TeacherTokens,
    Turn,
)
from rollout_service.core.scheduler import Admission, Policy
from rollout_service.core.scoring import ScoringRules
from rollout_service.errors import Conflict, Halted, NotFound, ShuttingDown, StoreUnavailable
from rollout_service.orchestrator import LeaseAnswer, LeaseRequest, LeaseStatus, Rules
from rollout_service.orchestrator.batches import seqs_of
from rollout_service.orchestrator.parts import Gate
from rollout_service.replicas import ReplicaOrchestrator, ReplicaSettings
from rollout_service.replicas.resident import Changed, Lost
from rollout_service.store.shared import Transaction
from rollout_service.store.shared_memory import SharedMemoryStore
from tests.fakes import Engines, submission
from tests.simulation import virtual
from tests.simulation.replica_books import BookedMemory, BookedRecorder, Books

T = TypeVar("T")

FAULTS = (
    "bump",
    "cancel",
    "cut_long",
    "cut_short",
    "deaf",
    "expelled",
    "join",
    "kill",
    "leave",
    "lost_answer",
    "mark",
    "no_ack",
    "pause",
    "release",
    "reset",
    "rewind",
    "store_away",
)
EVENTS = (
    "acked_in_part",
    "asked_again",
    "began_anew",
    "claims_taken",
    "distilled",
    "empty",
    "forgot_mark",
    "halted",
    "late_commit",
    "pace_relaxed",
    "paced",
    "refused_as_changed",
    "released_in_part",
    "reopened",
    "streak_ended",
)
"""What all that leads to, and runs that are special."""
CHAOS_S = 60.0
LEASE_S = 5.0
PATIENCE_S = 3_000.0
"""Virtual; a run that has not drained by then is stuck."""
ASTRAY_S = 6.0
"""How long a replica may work for other groups than the store says: until a lost claim or signal is noticed."""


class Wrong(AssertionError):
    """Something was promised and not kept."""


class Runner:
    """Rollouts that take their time, sometimes fail, and say whose they are."""

    def __init__(self, random_: random.Random, unlucky: float) -> None:
        """`unlucky`: the part of rollouts that fail."""
        self._random, self._unlucky = random_, unlucky

    async def run(self, job: RolloutJob, gate: Gate) -> FinishedRollout | FailedRollout:
        await gate.passed()
        await asyncio.sleep(self._random.expovariate(1 / 1.5))
        await gate.passed()
        if self._random.random() < self._unlucky:
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

    def __init__(self, memory: BookedMemory, random_: random.Random, name: str) -> None:
        super().__init__(memory)
        memory.add(self)
        self.name = name
        self._books, self._random = memory.books, random_
        self.taken = lambda: 0
        """How many takings of claims its replica knows of."""

    async def transact(
        self, work: Callable[[Transaction], Awaitable[T]], *, alone: bool = False, exclusive: str | None = None
    ) -> T:
        await self._on_the_way()
        self._books.take()
        try:
            result = await super().transact(work, alone=alone, exclusive=exclusive)
        except (Changed, Lost, StoreUnavailable) as error:
            self._books.take()  # of a commit whose answer is lost: whoever comes next must not be held to it
            self._books.met[f"refused_as_{type(error).__name__.lower()}"] += 1
            if isinstance(error, Lost) or (isinstance(error, Changed) and error.run.taken > self.taken()):
                self._books.met["late_commit"] += 1
            await self._on_the_way()
            raise
        ended = self._books.take()  # of this very transaction: nobody else ran since its commit
        await self._on_the_way()
        self._books.owes(self.name, ended)
        return result

    async def _on_the_way(self) -> None:
        """Mostly soon; a slow one lets others overtake."""
        await asyncio.sleep(min(2.0, self._random.expovariate(1.0 if self._random.random() < 0.1 else 10.0)))


class Scorer:
    def __init__(self, random_: random.Random) -> None:
        self._random = random_

    async def score(self, job: ScoreJob) -> Scores:
        await asyncio.sleep(self._random.random())
        taught = TeacherTokens(teacher_id="t", ids=array("i", (1, 2, 3)), logprobs=array("f", (-0.5,) * 3), columns=1)
        return Scores(
            rewards={"accuracy": [float(r.index) for r in job.rollouts]}, teacher=[[taught] for _ in job.rollouts]
        )


class ReplicaWorld:
    """One run, from its seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        draw = self.random
        self.books = Books()
        self.met = self.books.met
        paced = draw.random() < 0.3
        alone = draw.random() < 0.15
        self.met["paced"], self.met["distilled"] = int(paced), int(alone)
        self.unlucky = draw.choice((0.02, 0.08, 0.3))
        self.policy = Policy(
            group=GroupPolicy(
                max_staleness=draw.choice((0, 1, 2)),
                min_group_size=1 if alone else 2,
                on_stale=draw.choice((OnStale.DROP, OnStale.REQUEUE)),
                max_group_attempts=3,
            ),
            slots=draw.choice((3, 8, 20)),
            max_ready_groups=draw.choice((4, 64)),
            admission=Admission.PACE if paced else Admission.SLOTS,
            groups_per_step=3 if paced else 0,
            halt_after_failed_groups=draw.choice((1, 2, 3)),
            halt_after_unproductive_groups=draw.choice((2, 5, 32)),
        )
        self.scoring = ScoringRules(
            weights={"accuracy": 1.0}, min_group_size=self.policy.group.min_group_size, distillation=alone
        )
        self.memory = BookedMemory(self.policy.group.max_staleness, self.clock, self.books)
        self.members: list[tuple[ReplicaOrchestrator, FarStore]] = []
        self.endings: set[asyncio.Task[None]] = set()
        self.ids = iter(range(1, 10**9))
        self.delivered: dict[str, dict[str, tuple[int, ...]]] = {}
        """Lease -> group -> rows of the rollouts it came with."""
        self.acks_asked: set[tuple[str, str]] = set()
        self.known_ids: dict[str, str] = {}
        """Name of a replica -> the id it had at the last look."""
        self.astray: dict[tuple[str, int, int], float] = {}
        """(replica, group, claim) that only one of it and the store knows of -> since when."""
        self.calm = False
        """Nothing is harmed any more."""

    def clock(self) -> float:
        return 1_000_000.0 + asyncio.get_running_loop().time()

    async def main(self) -> None:
        for _ in range(3):
            await self.join()
        feeding = asyncio.create_task(self.feed())
        training = [asyncio.create_task(self.train()) for _ in range(2)]
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
            await asyncio.gather(*training)
        self.look()
        counts = self.memory.content.whole().counts
        if any(count for state, count in counts.items() if not state.terminal):
            raise Wrong(f"exhausted with {counts}")
        for door, _ in self.members:
            await door.stop()
        await asyncio.gather(*self.endings)
        self.look()
        self.check_acks()
        if untold := self.books.untold():
            raise Wrong(f"known to be stored and not told: {untold}")

    # replicas

    async def join(self) -> None:
        number = next(self.ids)
        store = FarStore(self.memory, self.random, f"r{number}")
        door = ReplicaOrchestrator(
            Rules(policy=self.policy, scoring=self.scoring, engine_wait_s=300),
            ReplicaSettings(name=f"r{number}", lease_s=LEASE_S),
            store=store,
            runner=Runner(self.random, self.unlucky),
            scorer=Scorer(self.random),
            engines=Engines(),
            observer=BookedRecorder(self.books),
            healths=lambda: (1, 1),
            clock=self.clock,
            new_id=lambda: f"{number}-{next(self.ids)}",
        )
        store.taken = lambda: door.resident.known.taken
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
        if fault in ("cut_long", "store_away", "pause") and self.random.random() < 0.5:
            return  # these keep everything else from happening
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
            case "expelled":  # as a host that slept: it does not know yet, and goes on
                if len(self.members) > 1 and self.memory.broken is None:
                    self.memory.time_over(door.resident.replica_id)
                    other = self.members[one - 1][1]
                    with contextlib.suppress(StoreUnavailable):
                        await other.expel()
            case "deaf":
                store.pushes = not store.pushes
            case "bump" | "reset" | "mark" | "rewind" | "cancel" | "pause":
                with contextlib.suppress(StoreUnavailable, Conflict, NotFound, ShuttingDown):
                    await self.call(door, fault)

    async def call(self, door: ReplicaOrchestrator, what: str) -> None:
        seen = self.memory.content.shared_run().run
        match what:
            case "bump":
                await door.post_version(seen.policy_version + self.random.choice((1, 1, 2)))
            case "reset":
                await door.post_version(max(0, seen.policy_version - 1), reset=True)
            case "mark":
                await door.mark(f"m{next(self.ids)}")
            case "rewind":
                if marks := await door.checkpoints():
                    name = self.random.choice(marks).name
                    if self.random.random() < 0.3:
                        await door.forget(name)
                        self.met["forgot_mark"] += 1
                    else:
                        self.met["reopened"] += (await door.rewind(name)).reopened_groups > 0
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
            await asyncio.sleep(self.random.random() * 7)
        await self.anywhere(lambda door: door.submit([], final=True))

    async def train(self) -> None:
        while True:
            await asyncio.sleep(self.random.choice((0, 0, 3)))
            request = LeaseRequest(
                max_groups=self.random.choice((1, 3, 6)),
                wait_s=5,
                lease_s=20,
                request_id=f"q{next(self.ids)}" if self.random.random() < 0.5 else None,
            )
            try:
                answer = await self.anywhere(lambda door, request=request: door.lease(request))  # type: ignore[misc]  # a default
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
            self.met["empty"] += answer.status is LeaseStatus.EMPTY
            if answer.lease is None:
                continue
            await self.take(answer)
            if request.request_id is not None and self.random.random() < 0.3:  # as one that lost the answer
                with contextlib.suppress(Conflict, Halted):
                    again = await self.anywhere(lambda door, request=request: door.lease(request))  # type: ignore[misc]  # a default
                    self.met["asked_again"] += 1
                    self.check_content(again)

    async def take(self, answer: LeaseAnswer) -> None:
        lease = answer.lease
        assert lease is not None
        groups = self.check_content(answer)
        await asyncio.sleep(self.random.random())
        what = self.random.random()
        if what < 0.1 and not self.calm:
            self.met["no_ack"] += 1
            return
        part = None
        if len(groups) > 1 and self.random.random() < 0.4:
            part = self.random.sample(sorted(groups), len(groups) // 2)
        with contextlib.suppress(Conflict, NotFound):
            if what < 0.3:
                self.met["release" if part is None else "released_in_part"] += 1
                await self.anywhere(lambda door: door.release(lease.lease_id, part))
                if part is None:
                    return
                await asyncio.sleep(self.random.random() * 15)  # the other trainer may get what was released
                part = None
            self.met["acked_in_part"] += part is not None
            self.acks_asked |= {(lease.lease_id, name) for name in part or groups}
            await self.anywhere(lambda door: door.ack(lease.lease_id, part))

    def check_content(self, answer: LeaseAnswer) -> Sequence[str]:
        """The groups of an answer, which is what the lease said before."""
        lease = answer.lease
        if lease is None:
            return []
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
        if any(before[name] != rows for name, rows in groups.items()):
            raise Wrong(f"lease {lease.lease_id} came with other content: {before}, {groups}")
        return sorted(groups)

    # what must hold

    def look(self) -> None:
        content = self.memory.content
        counts, run = content.whole().counts, content.shared_run().run
        if sum(counts.values()) != run.last_seq:
            raise Wrong(f"{run.last_seq} submitted, {counts}")
        if self.books.wrong:
            raise Wrong("; ".join(self.books.wrong))
        self.look_at_claims()

    def look_at_claims(self) -> None:
        """Each replica works for what the store says it does, or for a moment does not know it yet."""
        now, found = self.clock(), {}
        for door, store in self.members:
            resident = door.resident
            if resident.replica_id != self.known_ids.get(store.name, resident.replica_id):
                self.met["began_anew"] += 1
            self.known_ids[store.name] = resident.replica_id
            if resident.away or store.cut or self.memory.broken is not None or not resident.replica_id:
                continue
            claims = self.memory.content.claims.items()
            mine = {(seq, claim) for seq, (owner, claim) in claims if owner == resident.replica_id}
            on_its_way = set() if resident._commit is None else seqs_of(resident._commit.batch)
            amiss = {(seq, claim) for seq, claim in resident.claims.items() if seq not in on_its_way} - mine
            if not door._claims._one.locked():  # else it may be asking for them in this moment
                amiss |= mine - set(resident.claims.items())
            for seq, claim in amiss:
                key = (resident.replica_id, seq, claim)
                found[key] = self.astray.get(key, now)
        self.astray = found
        if late := {key for key, since in found.items() if now - since > ASTRAY_S}:
            raise Wrong(f"claimed and not worked for, or the other way round: {sorted(late)}")

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
