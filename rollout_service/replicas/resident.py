"""The groups this replica has claimed, and the work for them.

What always holds: only groups that the store says are this replica's, under the claim number known here, are settled by
it; what was decided before a new version, a reset or a rewind is not committed before that was taken into account (a
pause, a halt or claims taken back may pass a commit that is on its way, and bear it); what a new version ends is
aborted at once, because that version is committed; a group leaves when it is no longer generating or scoring, or is
somebody else's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from rollout_service.core.changes import Bumped, Changes, Halt, Moved
from rollout_service.core.group import Group, group_id
from rollout_service.core.lifecycle import StopRollouts
from rollout_service.core.model import GroupState, Prompt
from rollout_service.core.records import Batch
from rollout_service.core.scheduler import Scheduler
from rollout_service.core.shared import SharedRun
from rollout_service.errors import BatchRefused, StoreUnavailable
from rollout_service.orchestrator.batches import absorb, seqs_of, take_out
from rollout_service.orchestrator.parts import Clock, Engines, Observer, RolloutRunner, Scorer
from rollout_service.orchestrator.survivors import Survivors
from rollout_service.orchestrator.workshop import STOP_WORK_S, Rules, Workshop
from rollout_service.replicas import parts
from rollout_service.store.shared import SharedStore, Signal, Transaction

log = structlog.get_logger(__name__)

WORKED_FOR = frozenset({GroupState.GENERATING, GroupState.SCORING})
NO_BUMP = Bumped(version=0, previous=0, stale_groups=0, aborted_rollouts=0)
BREATH_S = 0.01
"""For aborts to have the event loop for themselves, as after the one writer's commit."""
AGAIN_S = 0.2
"""Between two tries of a commit while the database is away; the work goes on meanwhile."""


class Changed(Exception):
    """The run is at another revision than the one a batch was decided at."""

    def __init__(self, run: SharedRun) -> None:
        super().__init__(f"revision {run.revision}")
        self.run = run


class Lost(Exception):
    """Groups in a batch are not this replica's any more."""

    def __init__(self, seqs: set[int]) -> None:
        super().__init__(f"groups {sorted(seqs)}")
        self.seqs = seqs


class Telling:
    """Something to be told of a group once it is committed."""

    __slots__ = ("void",)

    def __init__(self) -> None:
        self.void = False


Tellings = dict[int, list[Telling]]
"""By seq."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopted:
    """Groups claimed in one transaction."""

    groups: Sequence[Group]
    claims: Mapping[int, int]
    prompts: Mapping[int, Prompt]


@dataclass(kw_only=True, slots=True)
class _Commit:
    """A batch on its way into the store; the next one is being filled meanwhile."""

    number: int
    """The same however often it is tried."""
    batch: Batch
    revision: int
    """Of the run, as it was known when the batch was decided."""
    counted: list[Moved]
    """Moves in it that may count towards a halt."""
    tellings: Tellings
    """Of its groups: void once they were lost and this is sure not to be committed for them."""
    halt: Halt | None = None
    """Made by its last try."""
    said: bool = False
    """That it waits."""
    lost: set[int] = field(default_factory=set)
    """Groups lost since it was tried last: to be taken out of it before it is tried again."""


class Resident(Workshop):
    """Satisfies `Commits` for its own committer: a batch goes out as one fenced transaction."""

    def __init__(
        self,
        rules: Rules,
        *,
        store: SharedStore,
        runner: RolloutRunner,
        scorer: Scorer,
        engines: Engines,
        observer: Observer,
        clock: Clock,
        on_turn: Callable[[], None],
        on_lost_store: Callable[[str], None],
    ) -> None:
        """`on_turn`: after every turn, slots may be free. `on_lost_store`: a commit failed for good."""
        super().__init__(
            # Groups are opened by the transactions that claim them; one that goes back to pending is everybody's.
            replace(rules, policy=parts.opening_nothing(parts.without_halts(rules.policy))),
            store=store,
            commits=self,
            runner=runner,
            scorer=scorer,
            engines=engines,
            observer=observer,
            clock=clock,
        )
        self._shared_store = store
        self._halts = rules.policy.halts
        self._on_turn, self._on_lost_store = on_turn, on_lost_store
        self.replica_id = ""
        self.known = SharedRun()
        """The run as it was taken into account last."""
        self.taken = 0
        """Of the newest run there is word of: what was claimed before may be somebody else's; nobody looks again."""
        self.claims: dict[int, int] = {}
        """Seq -> claim number of every group held."""
        self.away = True
        """Nothing is worked for: not joined yet, cut off from the store, or expelled."""
        self.until = 0.0
        """Time of the event loop from which on others may take the claims over."""
        self._number = 0
        """Of the last commit."""
        self._commit: _Commit | None = None
        self._moves: list[Moved] = []
        """Those in the batch being filled that may count towards a halt."""
        self._tellings: Tellings = {}
        """Of the batch being filled."""
        self._following = asyncio.Lock()
        self._aborting = False
        """What stops now was decided by a commit already: the run's."""
        self.last_bump = 0, NO_BUMP
        """The last revision that was followed, and what it cost the groups here."""

    # coming and going

    def begin(self, replica_id: str, run: SharedRun) -> None:
        """Work under this id from now on, with nothing claimed."""
        self.replica_id, self._number = replica_id, 0
        self._empty()
        self.known, self.taken = run, run.taken
        self.core.follow(run, now=self._clock())
        self.away = False
        self.committer.start()
        self.turn()

    def _empty(self) -> None:
        self.core = Scheduler(self._rules.policy)
        self.survivors = Survivors()
        self.prompts = type(self.prompts)()
        self.claims.clear()
        self._outcomes.clear()
        self._scores.clear()
        self._opening.clear()
        self._moves.clear()
        self._tellings.clear()
        self.last_bump = 0, NO_BUMP

    async def abandon(self, why: str) -> None:
        """Abort everything; nothing of it may be settled by this replica again under its present claims."""
        if self.away:
            return
        self.away = True
        self._gate.set(False)
        held = len(self.claims)
        await self.committer.stop(StoreUnavailable(why))
        await self.work.stop_all(within_s=STOP_WORK_S)
        self._empty()
        log.error("claims_abandoned", groups=held, error=why)

    async def stop(self) -> None:
        """Dispatch ends, what is in flight is aborted, what was decided is committed."""
        self.closing = True
        self._gate.set(False)
        await self.work.stop_all(within_s=STOP_WORK_S)
        if not self.away:
            try:
                self.collect()
                await asyncio.wait_for(self.committer.committed(), STOP_WORK_S)
            except (StoreUnavailable, TimeoutError) as error:
                log.error("last_commit_failed", error=str(error))
        await self.committer.stop()

    def deals_with(self, seqs: Collection[int]) -> bool:
        """Whether anything of these groups is still held or on its way into the store, under an earlier claim."""
        own = self.claims.keys() | seqs_of(self.committer.batch)
        if self._commit is not None:
            own |= seqs_of(self._commit.batch)
        return not own.isdisjoint(seqs)

    def adopt(self, adopted: Adopted) -> None:
        """Work for groups that were claimed just now, and with which nothing here `deals`."""
        for group in adopted.groups:
            self.claims[group.seq] = adopted.claims[group.seq]
            self.prompts.add(group.seq, adopted.prompts[group.seq])
        self.core.adopt(adopted.groups, now=self._clock())
        for group in adopted.groups:
            if group.state is GroupState.SCORING:
                self._start_scoring(group)
        self.turn()

    # the turn

    @property
    def free(self) -> int:
        """Rollouts that could be dispatched now, had we the groups."""
        if self.away or self.closing:
            return 0
        slots = min(self._rules.policy.slots, self._engines.healthy_capacity())
        waiting = sum(len(group.waiting) for group in self.core.groups.values())
        return slots - self.core.in_flight - waiting

    def turn(self) -> None:
        self._turn_planned = False
        if self.closing or self.away:
            return
        self.core.dispatch(now=self._clock(), capacity=self._engines.healthy_capacity())
        self._set_gate()
        self.collect()
        self.committer.flush()
        self._on_turn()

    def give_up_waiting(self) -> None:
        """No engine was healthy for as long as rollouts may wait, here and at the other replicas."""
        self._give_up_waiting(self._clock())

    def _collected(self, changes: Changes) -> None:
        for seq, group in changes.groups.items():
            if group.state not in WORKED_FOR and seq in self.claims:
                self._after_commit(partial(self._leave, seq, self.claims[seq]))

    def _leave(self, seq: int, claim: int) -> None:
        """It is everybody's now."""
        if self.claims.get(seq) != claim:
            return
        del self.claims[seq]
        for group in self.core.lose([seq]):
            self.survivors.end(seq, group.attempt)
        self.prompts.discard(seq)

    def _moved(self, moved: Moved) -> None:
        self._moves.append(moved)
        super()._moved(moved)

    def _after_commit_of(self, seq: int, run: Callable[[], None]) -> None:
        telling = Telling()
        self._tellings.setdefault(seq, []).append(telling)

        def unless_lost() -> None:
            if not telling.void:
                run()

        self._after_commit(unless_lost)

    # the run changed

    async def follow(self, run: SharedRun) -> None:
        """Take into account what somebody else made of the run; its consequences are committed soon after."""
        async with self._following:
            if self.away or run.revision <= self.known.revision:
                return
            self.taken = max(self.taken, run.taken)  # first: a claim may be on its way back while we ask
            lost = await self._taken() if run.taken != self.known.taken else set()
            if self.away:
                return
            in_flight = self.core.in_flight
            self._drop(lost)
            self.collect()
            bumped = self.core.follow(run, now=self._clock())
            self._aborting = True
            self.collect()
            self._aborting = False
            self.last_bump = run.revision, replace(bumped, aborted_rollouts=in_flight - self.core.in_flight)
            self.known = run
            if in_flight > self.core.in_flight:
                await asyncio.sleep(BREATH_S)
            self.turn()

    def _plan_stop(self, effect: StopRollouts) -> None:
        if self._aborting:
            self._stop_rollouts(effect)
        else:
            super()._plan_stop(effect)

    async def _taken(self) -> set[int]:
        """Groups held here that are somebody else's now. Raises StoreUnavailable."""
        before = dict(self.claims)
        mine = await self._shared_store.transact(lambda tx: tx.claims_of(self.replica_id))
        return {seq for seq, claim in before.items() if mine.get(seq) != claim and self.claims.get(seq) == claim}

    def _drop(self, seqs: Collection[int]) -> None:
        """Stop working for groups that are not ours any more, and forget all that was decided about them."""
        if not seqs:
            return
        self.collect()  # what they changed until now, so that it can be taken out
        take_out(self.committer.batch, seqs)
        self._moves = [moved for moved in self._moves if moved.after.seq not in seqs]
        if self._commit is not None:
            self._commit.lost.update(seqs)
        _cancel(self._tellings, seqs)
        for seq in seqs:
            self.claims.pop(seq, None)
            self.prompts.discard(seq)
        for group in self.core.lose(seqs):
            self.survivors.end(group.seq, group.attempt)
            self.work.stop_scoring(group)
            self._observer.rollouts_aborted(self.work.stop_rollouts(group, group.running))
        self.core.take_changes()
        log.info("claims_taken", groups=[group_id(seq) for seq in sorted(seqs)])

    # commits

    async def commit(self, batch: Batch) -> None:
        """Commit `batch` for the groups in it that are still ours. Raises StoreUnavailable once the claims may be over.

        A connection that is lost may have committed it: the batch's number tells when it is tried again.
        """
        self._number += 1
        commit = _Commit(
            number=self._number,
            batch=batch,
            revision=self.known.revision,
            counted=self._moves,
            tellings=self._tellings,
        )
        self._moves, self._tellings, self._commit = [], {}, commit
        try:
            while not await self._tried(commit):
                pass
        finally:
            self._commit = None

    async def _tried(self, commit: _Commit) -> bool:
        """As `_try`; a store that is away is waited for."""
        try:
            return await self._try(commit)
        except BatchRefused:
            raise  # begin again from what is stored
        except StoreUnavailable as error:
            if self.away or asyncio.get_running_loop().time() + AGAIN_S >= self.until:
                raise
            if not commit.said:
                log.warning("commit_waits", error=str(error))
            commit.said = True
            await asyncio.sleep(AGAIN_S)
            return False

    async def _try(self, commit: _Commit) -> bool:
        """Whether its batch is committed; else it was brought up to date and is to be tried again."""
        try:
            halt = await self._shared_store.transact(partial(self._write, commit))
        except Changed as changed:
            await self.follow(changed.run)
        except Lost as lost:
            self._drop(lost.seqs)
        else:
            if halt is not None:
                log.error("halted", reason=halt.reason, group_id=halt.group_id, error=halt.error)
                self._observer.halted(halt)
            return True
        # first: one that was lost may have been claimed again since
        take_out(commit.batch, commit.lost)
        commit.counted = [moved for moved in commit.counted if moved.after.seq not in commit.lost]
        _cancel(commit.tellings, commit.lost)  # only now: until it was refused it may have been committed
        commit.lost.clear()
        # what following decided goes out with this batch, whose decisions it corrects
        absorb(commit.batch, self.committer.batch)
        commit.counted += self._moves
        for seq, tellings in self._tellings.items():
            commit.tellings.setdefault(seq, []).extend(tellings)
        self._moves, self._tellings = [], {}
        commit.revision = self.known.revision
        return False

    async def _write(self, commit: _Commit, tx: Transaction) -> Halt | None:
        batch = commit.batch
        touched = seqs_of(batch)
        held = await tx.claims(touched)
        if not await tx.once(self.replica_id, commit.number):
            return commit.halt  # an earlier try made it, and its answer was lost
        if tx.run.revision != commit.revision:
            raise Changed(tx.run)
        lost = {seq for seq in touched if held.get(seq) != (self.replica_id, self.claims.get(seq))}
        if lost:
            raise Lost(lost)
        halt = await parts.count_streak(tx, commit.counted, self._halts)
        await tx.write(batch, owner=self.replica_id)
        states = {group.state for group in batch.groups.values()}
        if states & {GroupState.READY, GroupState.STALE, GroupState.DROPPED, GroupState.FAILED}:
            tx.signal(Signal.READY)
        if states & {GroupState.PENDING, GroupState.STALE, GroupState.DROPPED, GroupState.FAILED}:
            tx.signal(Signal.PENDING)  # to be claimed, or room to open more
        commit.halt = halt
        return halt

    def _on_failure(self, error: StoreUnavailable) -> None:
        if not self.closing:
            self._observer.commit_failed(str(error))
            self._on_lost_store(str(error))


def _cancel(tellings: Tellings, seqs: Collection[int]) -> None:
    for seq in seqs:
        for telling in tellings.pop(seq, ()):
            telling.void = True
