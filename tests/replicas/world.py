"""Several replicas in one process, over one shared store, on fakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollout_service.core.group import GroupPolicy
from rollout_service.core.model import GroupState
from rollout_service.core.scheduler import Policy
from rollout_service.core.scoring import ScoringRules
from rollout_service.orchestrator import Rules
from rollout_service.replicas import ReplicaOrchestrator, ReplicaSettings
from rollout_service.store.shared import SharedStore
from rollout_service.store.shared_memory import SharedMemory
from tests.fakes import Clock, Engines, Recorder, Runner, Scorer

LEASE_S = 10.0


@dataclass
class Member:
    """One replica and its fakes."""

    door: ReplicaOrchestrator
    store: Any
    runner: Runner
    scorer: Scorer
    engines: Engines
    observer: Recorder


@dataclass
class World:
    """Replicas that share `memory`, unless `make_store` gives another store."""

    policy: Policy = field(default_factory=lambda: Policy(group=GroupPolicy(), slots=16))
    scoring: ScoringRules = field(default_factory=lambda: ScoringRules(weights={"accuracy": 1.0}))
    engine_wait_s: float = 300.0
    clock: Clock = field(default_factory=Clock)
    """The store's, and what the replicas measure spans by."""
    wall: Clock = field(default_factory=Clock)
    """The replicas' own, which somebody may set."""
    make_store: Callable[[], SharedStore] | None = None
    make_runner: Callable[[], Runner] = Runner
    source: Any = None
    digest: Any = None
    lease_s: float = LEASE_S

    def __post_init__(self) -> None:
        self.memory = SharedMemory(self.policy.group.max_staleness, self.clock)
        self.members: list[Member] = []

    async def __aenter__(self) -> World:
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in self.members:
            await member.door.stop()

    async def join(self, *, rules: str = "same", fleet: Any = None) -> Member:
        """One more replica, started."""
        number = len(self.members) + 1
        ids = iter(range(1, 10**9))
        store = self.memory.store() if self.make_store is None else self.make_store()
        runner, scorer, engines, observer = self.make_runner(), Scorer(), Engines(), Recorder()
        door = ReplicaOrchestrator(
            Rules(policy=self.policy, scoring=self.scoring, engine_wait_s=self.engine_wait_s),
            ReplicaSettings(name=f"replica-{number}", lease_s=self.lease_s, rules=rules),
            store=store,
            runner=runner,
            scorer=scorer,
            engines=engines,
            observer=observer,
            healths=lambda: (1, int(engines.capacity > 0)),
            fleet=fleet,
            source=self.source,
            digest=self.digest,
            clock=self.wall,
            steady=self.clock,
            new_id=lambda: f"{number}-{next(ids)}-{id(self)}",
        )
        member = Member(door=door, store=store, runner=runner, scorer=scorer, engines=engines, observer=observer)
        await door.start()
        self.members.append(member)
        return member

    async def counts(self) -> dict[GroupState, int]:
        """Groups by state over the whole run; the identity of design section 3 holds in them."""
        overview = await self.members[0].store.overview()
        counts = dict(overview.whole.counts)
        assert sum(counts.values()) == overview.run.run.last_seq
        return counts
