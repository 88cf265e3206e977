"""One of several services that share a run: the same calls as the one writer's, each a transaction on the shared store.

What always holds: a call that raises has changed nothing, unless the store was lost in the middle of it: then it may be
repeated; a call that returns has its effect in the store; what this replica holds in memory can be lost at any moment.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from rollout_service.core.changes import Counts
from rollout_service.core.model import GroupState, Prompt
from rollout_service.core.scheduler import Scheduler
from rollout_service.core.shared import Replica
from rollout_service.errors import ConfigError, StoreUnavailable
from rollout_service.orchestrator.condition import Condition
from rollout_service.orchestrator.intake import PromptSource
from rollout_service.orchestrator.parts import Clock, Engines, Observer, RolloutRunner, Scorer
from rollout_service.orchestrator.views import StatusView
from rollout_service.orchestrator.workshop import Rules
from rollout_service.replicas import parts
from rollout_service.replicas.checkpoint_calls import CheckpointCalls
from rollout_service.replicas.claims import Claims
from rollout_service.replicas.engines import Fleet, SharedEngines
from rollout_service.replicas.group_calls import GroupCalls
from rollout_service.replicas.heart import Heart
from rollout_service.replicas.intake import Intake
from rollout_service.replicas.lease_calls import DUE_AT_ONCE, LeaseCalls
from rollout_service.replicas.prompt_calls import PromptCalls
from rollout_service.replicas.resident import NO_BUMP, Resident
from rollout_service.replicas.serving import Serving
from rollout_service.replicas.watch import Watch
from rollout_service.store.shared import SharedStore

log = structlog.get_logger(__name__)

EXPIRE_S = 0.5
"""Between two looks for leases whose time is over; an ack or a renewal that comes later is judged by their time."""

GIVE_BACK_S = 10.0
"""How long groups are kept without a healthy engine while other replicas have some: an engine's restart is longer, a
hiccup shorter."""
TURN_S = 2.0
"""Between two replicas that find no engine anywhere: each fails a group, and the first may halt them all."""
LOOK_S = 1.0
"""How long a look for people and for Prometheus may take; then they get the last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSettings:
    """Who this replica is."""

    name: str
    """For people."""
    lease_s: float = 10.0
    """How long its claims outlive its last heartbeat."""
    service: str = ""
    """Version of the service."""
    rules: str = ""
    """What must be equal for all replicas of a run, as JSON in one form."""


class ReplicaOrchestrator(PromptCalls, LeaseCalls, GroupCalls, CheckpointCalls):
    """The door of this room. All methods belong to the event loop that ran `start`."""

    def __init__(
        self,
        rules: Rules,
        settings: ReplicaSettings,
        *,
        store: SharedStore,
        runner: RolloutRunner,
        scorer: Scorer,
        engines: Engines,
        observer: Observer,
        healths: Callable[[], tuple[int, int]] = lambda: (0, 0),
        fleet: Fleet | None = None,
        source: PromptSource | None = None,
        digest: Callable[[Prompt], bytes] | None = None,
        clock: Clock = time.time,
        steady: Clock = time.monotonic,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        """`healths`: engines in all, and healthy ones, for the other replicas to know. `fleet`: where engines come and
        go.

        `steady`: seconds, by a clock that nobody sets.
        """
        if (source is None) is not (digest is None):
            raise ValueError("a prompt source and the digest of its prompts come together")
        resident = Resident(
            rules,
            store=store,
            runner=runner,
            scorer=scorer,
            engines=engines,
            observer=observer,
            clock=clock,
            on_turn=self._turned,
            on_lost_store=self._lost_store,
        )
        super().__init__(store, rules, observer, resident)
        self._settings, self._engines, self._healths, self._clock = settings, engines, healths, clock
        self._steady = steady
        self._fingerprint = "" if source is None else source.fingerprint
        self._claims = Claims(store, resident, self._policy, observer)
        self._serving = Serving(store, self._policy, observer, new_id, self._give_back, self.expire)
        self.heart = Heart(store, resident, self._describe, lease_s=settings.lease_s, new_id=new_id)
        self.shared_engines = None if fleet is None else SharedEngines(store, fleet)
        """Adds and removes engines, for all replicas; None without a fleet."""
        self.watch = Watch(
            store,
            resident,
            self.heart,
            on_pending=self._claims.look,
            on_ready=self._serving.look,
            on_engines=(lambda: None) if self.shared_engines is None else self.shared_engines.heard,
        )
        self._intake = (
            Intake(source, digest, store, rules, observer) if source is not None and digest is not None else None
        )
        self._without, self._nowhere = Condition(), Condition()
        """No engine is healthy here; nor at any other replica."""
        self._paced: Collection[int] = ()
        """As of the last look for people."""
        self._housekeeping: asyncio.Task[None] | None = None
        self._prepared = False

    # life

    async def prepare(self) -> None:
        """Open the store, and read which engines are not to be contacted. Raises ConfigError."""
        if self._prepared:
            return
        await self._store.open()
        self._prepared = True
        if self.shared_engines is not None:
            with _at_the_start():
                await self.shared_engines.read()

    async def start(self) -> None:
        """Prepare, where nobody did, join the others, claim. Raises ConfigError."""
        await self.prepare()
        with _at_the_start():
            await self.heart.start()
            await self.watch.start()
            if self.shared_engines is not None:
                await self.shared_engines.start()
        self._serving.start()
        self._claims.start()
        if self._intake is not None:
            self._intake.start()
        self._housekeeping = asyncio.create_task(self._keep_house(), name="housekeeping")

    async def stop(self) -> None:
        """End within seconds: waiting callers get `empty`, in flight is aborted, claims are given back."""
        self._closing = True
        if self.shared_engines is not None:
            await self.shared_engines.stop()
        if self._intake is not None:
            await self._intake.stop()
        await self._claims.stop()
        await self._serving.stop()
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
        await self._resident.stop()
        await self.watch.stop()
        if self._giving is not None:
            self._giving.cancel()
        try:
            await self.heart.stop()
        except (StoreUnavailable, TimeoutError) as error:
            log.warning("claims_not_given_back", error=str(error), detail="others take them when the heartbeat ends")
        await self._store.close()
        self._prepared = False

    def engines_changed(self) -> None:
        """An engine came, went, or changed its health or capacity."""
        self._resident.touch()

    @property
    def resident(self) -> Resident:
        """The groups this replica works for."""
        return self._resident

    @property
    def _file_is_open(self) -> bool:
        return self._intake is not None and not self._intake.done

    def _turned(self) -> None:
        if self._resident.free > 0:
            self._claims.slots_are_free()

    def _lost_store(self, why: str) -> None:
        self.heart.lost_store(why)

    def _describe(self, replica_id: str) -> Replica:
        engines, healthy = self._healths()
        resident = self._resident
        revision, bump = resident.last_bump
        if revision != self.watch.enforced:
            bump = NO_BUMP  # of another revision than the one that is reported
        return Replica(
            replica_id=replica_id,
            name=self._settings.name,
            service=self._settings.service,
            rules=self._settings.rules,
            prompts=self._fingerprint,
            slots=self._policy.slots,
            in_flight=resident.core.in_flight,
            engines=engines,
            healthy_engines=healthy,
            enforced=self.watch.enforced,
            stale_groups=bump.stale_groups,
            aborted_rollouts=bump.aborted_rollouts,
        )

    # now and then

    async def _keep_house(self) -> None:
        while True:
            try:
                while await self.expire() == DUE_AT_ONCE:
                    pass
                await self._watch_engines()
            except StoreUnavailable as error:
                log.debug("housekeeping_waits", error=str(error))  # the heartbeat says it aloud
            except Exception:  # a fault of ours must not keep leases from ending
                log.exception("housekeeping_raised")
            await asyncio.sleep(EXPIRE_S)

    async def _watch_engines(self) -> None:
        """With groups to generate and no healthy engine anywhere for `engine_wait_s`, fail one (design 3.2.5).

        Where other replicas have engines, they get the groups held here.
        """
        overview = self.watch.overview
        run, counts = overview.run, overview.whole.counts
        here, others = self._engines.healthy_capacity() > 0, self._others_have_engines()
        stopped = run.halt is not None or run.run.paused or run.run.policy_version < self._policy.wait_for_version
        wanted = counts[GroupState.PENDING] > 0 or self._resident.core.wants_engine
        generating = any(group.state is GroupState.GENERATING for group in self._resident.core.groups.values())
        if self._without.lasted(not here and others and generating, GIVE_BACK_S, self._steady()):
            self.heart.lost_store("no engine is healthy here, and other replicas have some")
        # one after the other, so that the halt of the first is known to the next
        patience = self._rules.engine_wait_s + self._rank() * TURN_S
        if self._nowhere.lasted(wanted and not stopped and not here and not others, patience, self._steady()):
            if not self._resident.core.wants_engine:
                await self._claims.claim_one()
            self._resident.give_up_waiting()

    def _rank(self) -> int:
        """How many living replicas come before this one, by their ids."""
        overview, me = self.watch.overview, self._resident.replica_id
        return sum(seen.expires_at > overview.now and seen.replica.replica_id < me for seen in overview.replicas)

    def _others_have_engines(self) -> bool:
        overview, me = self.watch.overview, self._resident.replica_id
        return any(
            seen.replica.healthy_engines
            for seen in overview.replicas
            if seen.expires_at > overview.now and seen.replica.replica_id != me
        )

    # looking

    async def refresh(self) -> None:
        """Bring `status` up to date, as far as the store answers."""
        try:
            async with asyncio.timeout(LOOK_S):
                await self.watch.look()
                if self._policy.pace_bound is not None:
                    self._paced = await self._store.transact(lambda tx: parts.paced(tx, self._policy))
        except (StoreUnavailable, TimeoutError) as error:
            log.debug("status_is_old", error=str(error))  # it says itself that the store cannot be reached

    def status(self) -> StatusView:
        """The whole run, as of the last look."""
        overview = self.watch.overview
        run, whole = overview.run.run, overview.whole
        alive = [seen for seen in overview.replicas if seen.expires_at > overview.now]
        resident = self._resident
        others = [seen.replica for seen in alive if seen.replica.replica_id != resident.replica_id]
        return StatusView(
            policy_version=run.policy_version,
            max_staleness=self._policy.group.max_staleness,
            counts=Counts(submitted=run.last_seq, groups=whole.counts),
            slots_total=self._policy.slots,
            slots_used=resident.core.in_flight,
            other_slots_total=sum(replica.slots for replica in others),
            other_slots_used=sum(replica.in_flight for replica in others),
            paused=run.paused,
            halt=overview.run.halt,
            final=run.final,
            blocked=self._blocked(),
            oldest=overview.oldest,
            store_ok=self.heart.error is None,
            store_error=self.heart.error,
            leases=overview.leases,
            waiting_lease_calls=len(self._serving.line),
            read_position=run.read_position,
            now=self._clock(),
            replicas=overview.replicas,
            store_now=overview.now,
            closing=self._closing,
            replica_id=resident.replica_id,
        )

    def _blocked(self) -> str | None:
        overview = self.watch.overview
        core = Scheduler(parts.without_halts(self._policy))
        core.load_part(overview.run, overview.whole, parts.NOTHING, paced=self._paced)
        blocked = core.blocked()
        return None if blocked is None else str(blocked)


@contextmanager
def _at_the_start() -> Iterator[None]:
    """A store that cannot be had then is one that was configured wrongly."""
    try:
        yield
    except StoreUnavailable as error:
        raise ConfigError(f"store.url: {error}") from error
