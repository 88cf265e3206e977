"""A whole run on a virtual clock: real orchestrator, fleet, retries, memory store; scripted engines, trainer, faults.

One seed draws everything: latencies, 5xx, hangs, cut connections, bad answers, engines that go down, are removed and
added again, or ignore aborts, bumps, lost answers, trainers that die with a lease, releases, cancels, pauses, commits
that fail, kills. The trainer keeps a history and the world checks it: see `History`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from rollout_service.core.group import GroupPolicy, OnStale
from rollout_service.core.model import FinishReason, GroupState, ScoreJob, Scores, Turn
from rollout_service.core.scheduler import Admission, Policy
from rollout_service.core.scoring import ScoringRules
from rollout_service.engines import Fleet, FleetSettings
from rollout_service.engines import fleet as fleet_module
from rollout_service.engines.faults import (
    AbortedAnswer,
    BadAnswer,
    RequestTimeout,
    StaleConnection,
    StatusFault,
    TransportFault,
)
from rollout_service.engines.info import AbortMode, EngineInfo
from rollout_service.engines.vllm import EngineSpec
from rollout_service.errors import Conflict, Halted, NotFound, QueueFull, ShuttingDown, StoreUnavailable, Unavailable
from rollout_service.orchestrator import LeaseAnswer, LeaseRequest, LeaseStatus, Orchestrator, Rules
from rollout_service.rollouts import SingleTurn, SingleTurnSettings
from rollout_service.settings.registration import read_pattern
from rollout_service.store import MemoryStore
from tests.fakes import Recorder, submission
from tests.simulation import virtual

FAULTS = (
    "status_500",
    "status_400",
    "hang",
    "cut",
    "stale_connection",
    "bad_answer",
    "engine_abort",
    "ignored_abort",
    "engine_down",
    "engine_leaves",
    "bump",
    "lost_answer",
    "dead_trainer",
    "release",
    "cancel",
    "pause",
    "failed_commit",
    "kill",
    "reward_fault",
    "rewind",
    "reset",
)
END_OF_TIME_S = 50_000.0
"""Virtual seconds after which a run counts as stuck."""


class Lost(Exception):
    """The service was killed during the call: the caller learns nothing."""


class ScriptedEngine:
    """Stands in for rollout_service.engines.vllm.VllmEngine; its world says what each request meets."""

    world: World

    def __init__(
        self,
        spec: EngineSpec,
        *,
        id: str,
        clients: Any,
        events: Any,
        clock: Callable[[], float],
        model_name: Callable[[str], str],
        cache_salt: Callable[[], str | None],
        tracer: Any,
    ) -> None:
        self.id, self.url = id, spec.url
        self.info: EngineInfo | None = None
        self.in_flight = 0
        self.limit = spec.max_inflight

    async def learn(self, model: str) -> EngineInfo:
        if self.url in self.world.down:
            raise TransportFault("connection refused")
        self.info = EngineInfo(
            model="m", max_model_len=None, logprobs_mode="processed_logprobs", vocab_size=None, abort=AbortMode.CLOSE
        )
        return self.info

    async def abort(self, rollouts: Any) -> None:
        await asyncio.sleep(self.world.rng.choice((0.0, 0.01, 1.0)))

    async def is_back(self, model: str) -> bool:
        return await self.learn(model) is not None

    async def probe(self, timeout_s: float) -> str | None:
        return "connection refused" if self.url in self.world.down else None

    async def control(self, method: str, path: str, body: Any = None, *, timeout_s: float) -> bytes:
        raise StatusFault(404, "Not Found")

    async def detokenize(self, ids: array[int]) -> str | None:
        return None

    async def close(self) -> None:
        pass

    async def generate(self, request: Any, request_id: str, *, timeout_s: float, fresh: bool = False) -> Turn:
        world = self.world
        assert request_id not in world.request_ids, "an engine request has an id of its own"
        world.request_ids.add(request_id)
        self.in_flight += 1
        assert self.in_flight <= self.limit, "an engine is never given more than it takes"
        fate = world.fate()
        try:
            await asyncio.sleep(world.rng.uniform(0.01, 3.0) if fate != "hang" else timeout_s)
            if self.url in world.down:
                raise TransportFault("connection reset")
            world.meet(fate)
        except asyncio.CancelledError:
            if not world.draw("ignored_abort", 0.8):
                raise
        finally:
            self.in_flight -= 1
        ids = array("i", (world.rng.randrange(100) for _ in range(world.rng.randrange(1, 5))))
        return Turn(
            prompt_ids=array("i", (1,)),
            output_ids=ids,
            logprobs=array("f", [-1.0] * len(ids)),
            finish_reason=FinishReason.STOP,
            text=str(ids.tolist()),
            engine=self.id,
        )


class NoClients:
    """Scripted engines speak no HTTP."""

    async def close(self) -> None:
        pass


@dataclass
class History:
    """What the trainer saw, and what must hold of it."""

    max_staleness: int
    versions: list[int] = field(default_factory=lambda: [0])
    """Confirmed posts, in order."""
    content: dict[tuple[str, int], str] = field(default_factory=dict)
    """(group, attempt) -> digest of what was delivered."""
    lease_seen: dict[str, float] = field(default_factory=dict)
    """Lease id -> when it was made."""
    acked: dict[str, float] = field(default_factory=dict)
    """Group -> when its ack was confirmed."""
    maybe_acked: set[str] = field(default_factory=set)
    """Groups an ack was sent for whose answer was lost."""
    delivered: Counter[str] = field(default_factory=Counter)

    def lease(self, answer: LeaseAnswer, known_version: int) -> None:
        lease = answer.lease
        assert lease is not None
        new = lease.lease_id not in self.lease_seen
        self.lease_seen.setdefault(lease.lease_id, lease.created_at)
        for payload in answer.payloads:
            group = payload.group
            assert group.version is not None
            staleness = answer.policy_version - group.version
            assert 0 <= staleness <= self.max_staleness, f"{group.group_id} leased at staleness {staleness}"
            if new and lease.created_at > self.acked.get(group.group_id, float("inf")):
                raise AssertionError(f"{group.group_id} was delivered again after its ack")
            digest = hashlib.sha256(repr((sorted(payload.rollouts.items()), payload.score)).encode()).hexdigest()
            key = (group.group_id, group.attempt)
            assert self.content.setdefault(key, digest) == digest, f"{key} came back with other content"
            self.delivered[group.group_id] += 1
        if new and lease.request_id is None:
            assert answer.policy_version >= known_version, "a lease made after a bump knows the new version"

    def went_back(self, version: int, acked: dict[str, float]) -> None:
        """The trainer returned to where `version` was current and `acked` was all that was acked."""
        self.versions.append(version)
        self.acked = dict(acked)

    def posted(self, version: int) -> None:
        assert version >= self.versions[-1], "the version never falls"
        self.versions.append(version)


class World:
    """One seed's run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.met: Counter[str] = Counter()
        self.trace: list[tuple[float, str]] = []
        self.enabled = frozenset(fault for fault in FAULTS if rng.random() < 0.45)
        self.down: set[str] = set()
        self.request_ids: set[str] = set()
        self.prompts = rng.randint(5, 14)
        self.n = rng.randint(1, 4)
        self.max_staleness = rng.randint(0, 2)
        self.history = History(max_staleness=self.max_staleness)
        self.marks: dict[str, tuple[int, dict[str, float]]] = {}
        """Checkpoint -> version and acks at that moment."""
        self.going_back = False
        self.killed = asyncio.Event()
        self.ids = iter(range(10**9))
        self.policy = Policy(
            group=GroupPolicy(
                max_staleness=self.max_staleness,
                min_group_size=min(2, self.n),
                on_stale=rng.choice(list(OnStale)),
                max_group_attempts=2,
            ),
            slots=rng.randint(1, 12),
            max_ready_groups=rng.randint(2, 8),
            admission=rng.choice(list(Admission)),
            groups_per_step=2,
            halt_after_failed_groups=rng.choice([0, 1, 2]),
            halt_after_unproductive_groups=rng.choice([0, 4]),
        )
        self.specs = [EngineSpec(url=f"http://e{i}", max_inflight=rng.randint(2, 8)) for i in range(rng.randint(1, 2))]
        self.store = MemoryStore(self.max_staleness)

    # drawing

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def draw(self, fault: str, probability: float) -> bool:
        happens = self.rng.random() < probability
        if fault not in self.enabled or not happens:
            return False
        self.note(fault)
        return True

    def note(self, fault: str) -> None:
        self.met[fault] += 1
        self.trace.append((self.now(), fault))

    def fate(self) -> str:
        for fault in ("status_500", "status_400", "hang", "cut", "stale_connection", "bad_answer", "engine_abort"):
            if self.draw(fault, 0.04 if fault != "status_400" else 0.02):
                return fault
        return "ok"

    @staticmethod
    def meet(fate: str) -> None:
        match fate:
            case "status_500":
                raise StatusFault(500, "boom", param=None, retry_after_s=None)
            case "status_400":
                raise StatusFault(400, "unlucky", param=None, retry_after_s=None)
            case "hang":
                raise RequestTimeout("no answer")
            case "cut":
                raise TransportFault("connection reset")
            case "stale_connection":
                raise StaleConnection("idle connection closed")
            case "bad_answer":
                raise BadAnswer("half a body")
            case "engine_abort":
                raise AbortedAnswer("finish_reason abort")

    async def score(self, job: ScoreJob) -> Scores:
        await asyncio.sleep(self.rng.uniform(0.0, 1.0))
        if self.draw("reward_fault", 0.1):
            kind = self.rng.randrange(3)
            if kind == 0:
                raise RuntimeError("reward went wrong")
            if kind == 1:
                return Scores(rewards={}, cancelled="cancelled by user code")
            return Scores(rewards={"r": [None] * len(job.rollouts)}, errors={"r": "timeout"})
        return Scores(rewards={"r": [float(sum(r.turns[0].output_ids)) for r in job.rollouts]})

    # the service

    async def begin(self) -> None:
        self.observer = Recorder()
        self.fleet = Fleet(
            self.specs,
            FleetSettings(
                model="",
                max_attempts=2,
                request_timeout_s=20.0,
                engine_wait_s=15.0,
                probe_interval_s=2.0,
                temperature=1.0,
                allow_raw_logprobs=False,
                addable=tuple(read_pattern(f"{spec.url}:80") for spec in self.specs),
            ),
            on_change=lambda: self.door.engines_changed(),
            clock=self.now,
        )
        runner = SingleTurn(self.fleet, SingleTurnSettings(rollout_timeout_s=60.0), clock=self.now)
        self.door = Orchestrator(
            Rules(
                policy=self.policy,
                scoring=ScoringRules(weights={"r": 1.0}, min_group_size=self.policy.group.min_group_size),
                engine_wait_s=15.0,
            ),
            store=self.store,
            runner=runner,
            scorer=self,
            engines=self.fleet,
            observer=self.observer,
            clock=self.now,
            steady=self.now,
            new_id=lambda: f"l{next(self.ids)}",
        )
        await self.fleet.start()
        await self.door.start()
        assert self.going_back or self.door.version >= self.history.versions[-1], "a restart loses no version"

    async def kill(self) -> None:
        """As kill -9 does: what was not committed at this instant never happens."""
        self.note("kill")
        store = MemoryStore.reopened(self.store)
        self.killed.set()
        writer = self.door.writer
        writer.closing = True
        await writer.work.stop_all(within_s=60.0)
        await writer.committer.stop()
        if writer._timer is not None:
            writer._timer.cancel()
        if writer._reload_task is not None:
            writer._reload_task.cancel()
        await self.fleet.stop()
        self.store = store
        self.killed = asyncio.Event()
        await self.begin()

    async def call(self, method: Callable[..., Awaitable[Any]], *args: Any, **more: Any) -> Any:
        """A call from outside: lost with the service, or with its answer."""
        task = asyncio.ensure_future(method(*args, **more))
        killed = asyncio.ensure_future(self.killed.wait())
        try:
            await asyncio.wait({task, killed}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Lost
            result = task.result()
        finally:
            task.cancel()
            killed.cancel()
        if self.draw("lost_answer", 0.08):
            raise Lost
        return result

    async def insist(self, method: str, *args: Any, **more: Any) -> Any:
        """Ask until there is an answer, as a client does that retries idempotent calls."""
        while True:
            try:
                return await self.call(getattr(self.door, method), *args, **more)
            except (Lost, StoreUnavailable, QueueFull):
                await asyncio.sleep(0.5)
            except Unavailable:
                await asyncio.sleep(0.5)

    # who uses it

    async def submit(self) -> None:
        rows = [submission(f"p{i}", self.n) for i in range(self.prompts)]
        while rows:
            chunk, rows = rows[:3], rows[3:]
            await self.insist("submit", chunk)
            await asyncio.sleep(self.rng.uniform(0, 5))
        await self.insist("submit", [], final=True)

    async def train(self) -> None:
        step = 0
        while True:
            step += 1
            named = self.rng.random() < 0.6
            ask = LeaseRequest(
                max_groups=self.rng.randint(1, 3),
                min_groups=1,
                wait_s=self.rng.randint(0, 10),
                lease_s=self.rng.randint(5, 30),
                request_id=f"s{step}" if named else None,
            )
            answer = await self.lease(ask)
            if answer is None or answer.status is LeaseStatus.EMPTY:
                await asyncio.sleep(0.2)
                continue
            if answer.status is LeaseStatus.EXHAUSTED:
                return
            await self.use(answer)

    async def lease(self, ask: LeaseRequest) -> LeaseAnswer | None:
        for _ in range(5):
            known = self.history.versions[-1]
            try:
                answer: LeaseAnswer = await self.call(self.door.lease, ask)
            except Halted:
                await self.insist("resume")
            except Lost:
                if ask.request_id is None:
                    return None  # whatever was leased comes back when it expires
            except Conflict:
                return None  # it was made, its answer lost, and it has expired since
            except Unavailable:
                await asyncio.sleep(0.5)
            else:
                if answer.lease is not None:
                    self.history.lease(answer, known)
                return answer
        return None

    async def use(self, answer: LeaseAnswer) -> None:
        assert answer.lease is not None
        lease_id = answer.lease.lease_id
        groups = [payload.group.group_id for payload in answer.payloads]
        if self.draw("dead_trainer", 0.1):
            await asyncio.sleep(40)
            return
        if self.draw("release", 0.15):
            await self.insist("release", lease_id, self.rng.sample(groups, 1))
            return
        await asyncio.sleep(self.rng.uniform(0.0, 8.0))
        await self.ack(lease_id, groups)
        if self.draw("bump", 0.5):
            version = self.history.versions[-1] + self.rng.randint(1, 2)
            try:
                await self.insist("post_version", version)
            except Conflict:  # a lost answer of an earlier, higher post
                version = self.door.version
            self.history.posted(version)

        if self.rng.random() < 0.3:
            await self.mark(f"m{next(self.ids):06}")
        if self.marks and self.draw("rewind", 0.1):
            await self.go_back("rewind", self.rng.choice(sorted(self.marks)))
        if self.history.versions[-1] and self.draw("reset", 0.2):
            await self.go_back("reset", "")

    async def mark(self, name: str) -> None:
        version, acked = self.history.versions[-1], dict(self.history.acked)
        try:
            await self.insist("mark", name)
        except Conflict:  # made, its answer lost, and a group ended before it was asked for again
            return
        self.marks[name] = (version, acked)

    async def go_back(self, how: str, name: str) -> None:
        """To a checkpoint, or only to a lower version."""
        self.going_back = True
        if how == "rewind":
            await self.insist("rewind", name)
            version, acked = self.marks[name]
            self.marks = {known: mark for known, mark in self.marks.items() if known <= name}
        else:
            version, acked = self.history.versions[-1] - 1, self.history.acked
            await self.insist("post_version", version, reset=True)
        self.history.went_back(version, acked)
        self.going_back = False

    async def ack(self, lease_id: str, groups: list[str]) -> None:
        self.history.maybe_acked.update(groups)
        try:
            await self.insist("ack", lease_id, groups)
        except (Conflict, NotFound):
            return
        for group in groups:
            self.history.acked.setdefault(group, self.now())

    async def engine_leaves(self) -> None:
        """An operator takes an engine out, and adds it again a while later."""
        spec = self.rng.choice(self.specs)
        drain_s, later = self.rng.choice([0.0, 1.0, 10.0]), self.rng.uniform(0.0, 10.0)
        with contextlib.suppress(ShuttingDown):
            (id_,) = [engine["id"] for engine in self.fleet.describe() if engine["url"] == spec.url]
            gone = await self.fleet.remove_engine(id_, drain_s=drain_s)
            assert gone["leaving"]
            await asyncio.sleep(later)
            added, new = await self.fleet.add_engine(spec.url, spec.max_inflight)
            assert new
            assert added["id"] != id_

    async def chaos(self) -> None:
        while True:
            await asyncio.sleep(self.rng.uniform(1.0, 12.0))
            if self.draw("engine_down", 0.25):
                url = self.rng.choice(self.specs).url
                self.down.add(url)
                await asyncio.sleep(self.rng.uniform(1.0, 10.0))
                self.down.discard(url)
            if self.draw("engine_leaves", 0.25):
                await self.engine_leaves()
            if self.draw("pause", 0.15):
                await self.insist("pause")
                await asyncio.sleep(self.rng.uniform(1.0, 10.0))
                await self.insist("resume")
            if self.draw("cancel", 0.15):
                with contextlib.suppress(Lost, NotFound, Conflict, Unavailable):
                    await self.call(self.door.cancel, f"g-{self.rng.randint(1, self.prompts)}")
            if self.draw("failed_commit", 0.15):
                self.store.fail_commits = StoreUnavailable("disk full")
                store = self.store
                await asyncio.sleep(self.rng.uniform(0.1, 3.0))
                store.fail_commits = None
            if self.draw("kill", 0.2):
                # a kill in the list was noted by `kill` as well: count it once
                self.met["kill"] -= 1
                await self.kill()

    async def main(self) -> World:
        random.seed(self.seed)  # the fleet's backoff jitter
        ScriptedEngine.world = self
        await self.begin()
        chaos = asyncio.create_task(self.chaos())
        try:
            async with asyncio.timeout(END_OF_TIME_S):
                await asyncio.gather(self.submit(), self.train())
            if chaos.done():
                await chaos
        finally:
            chaos.cancel()
            await asyncio.wait({chaos})
        await self.check_the_end()
        await self.door.stop()
        await self.fleet.stop()
        return self

    async def check_the_end(self) -> None:
        status = self.door.status()
        counts = status.counts
        assert counts.submitted == self.prompts == sum(counts.groups.values()), counts
        assert counts.outstanding == 0, counts
        assert status.slots_used == 0
        groups = {group.group_id: group for group in await self.door.groups([], after=0, limit=1000)}
        assert len(groups) == self.prompts, "every prompt is there"
        assert all(group.state.terminal for group in groups.values()), "every prompt ended"
        by_state = Counter(group.state for group in groups.values())
        assert {state: n for state, n in counts.groups.items() if n} == dict(by_state), "counters agree with the rows"
        acked = {name for name, group in groups.items() if group.state is GroupState.ACKED}
        assert set(self.history.acked) <= acked <= self.history.maybe_acked, "a confirmed ack is kept, no other made"
        assert status.policy_version >= self.history.versions[-1]


def simulate(seed: int) -> World:
    """Run one seed to its end. Raises AssertionError where something did not hold."""

    async def go() -> World:
        return await World(seed).main()

    with (
        patch.object(fleet_module, "VllmEngine", ScriptedEngine),
        patch.object(fleet_module, "EngineClients", NoClients),
    ):
        return virtual.run(go())
