"""The one writer: an event goes into the core, what the core changed goes into a batch, effects leave after its commit.

What always holds: only this class calls the core's changing methods or fills a batch; nothing it decides is visible
outside before its commit, except further rows of an attempt whose opening is committed; after a failed commit the core
is thrown away and read again from the store, and until that succeeds nothing is dispatched or accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import structlog

from rollout_service.core.changes import Bumped, Changes, Halt
from rollout_service.core.group import Checkpoint, Group, LeaseState
from rollout_service.core.model import Prompt
from rollout_service.core.records import Batch, NewGroup, RunState, Snapshot
from rollout_service.core.scheduler import Scheduler
from rollout_service.errors import ShuttingDown, StoreUnavailable
from rollout_service.orchestrator.condition import Condition
from rollout_service.orchestrator.parts import Clock, Engines, Observer, RolloutRunner, Scorer
from rollout_service.orchestrator.prompt_memory import PromptMemory
from rollout_service.orchestrator.serving import Serving
from rollout_service.orchestrator.survivors import Survivors
from rollout_service.orchestrator.views import LeaseStatus
from rollout_service.orchestrator.workshop import STOP_WORK_S, Rules, Workshop
from rollout_service.store.protocol import Store

log = structlog.get_logger(__name__)

RELOAD_FIRST_S, RELOAD_MOST_S = 0.25, 5.0
"""Between two tries to reach the store again: quick for a hiccup, seldom enough not to load a full disk."""


class Writer(Workshop):
    """Everything that changes state passes here, on one event loop."""

    def __init__(
        self,
        rules: Rules,
        *,
        store: Store,
        runner: RolloutRunner,
        scorer: Scorer,
        engines: Engines,
        observer: Observer,
        clock: Clock,
        steady: Clock,
        new_id: Callable[[], str],
    ) -> None:
        """`steady`: seconds, by a clock that nobody sets; `clock`: of the day, as leases need it over restarts."""
        super().__init__(
            rules,
            store=store,
            commits=store,
            runner=runner,
            scorer=scorer,
            engines=engines,
            observer=observer,
            clock=clock,
        )
        self._steady = steady
        self._engines_missing = Condition()
        """Work could be given out, and no engine is healthy."""
        self.run = RunState()
        self._serving = Serving(self, observer, new_id)
        self.line = self._serving.line
        self.broken: StoreUnavailable | None = None
        self.turned = asyncio.Event()
        """Set after every turn, for the prompts file to look whether there is room."""
        self._said_exhausted = False
        self.version = 0
        """The policy version that is on disk."""
        self.returns = 0
        """How often it was lowered since the start: the same number then stands for other weights."""
        self._halted: Halt | None = None
        """The halt that was said outside; a reload must not forget it."""
        self._timer: asyncio.TimerHandle | None = None
        self._reload_task: asyncio.Task[None] | None = None

    # life

    async def start(self) -> None:
        await self._store.open()
        self._take(await self._store.load())
        await self.prompts.load(self._store, self.core.groups)
        self.committer.start()
        self.turn()

    async def stop(self) -> None:
        """Dispatch ends, what is in flight is aborted, callers are answered, what was decided is committed."""
        self.closing = True
        self._gate.set(False)
        if self._timer is not None:
            self._timer.cancel()
        if self._reload_task is not None:
            self._reload_task.cancel()
        for waiter in self.line:  # those granted are answered by the commit of their lease
            self.line.settle(waiter, LeaseStatus.EMPTY)
        await self.work.stop_all(within_s=STOP_WORK_S)
        if self.broken is None:
            try:
                await asyncio.wait_for(self._last_commits(), STOP_WORK_S)
            except (StoreUnavailable, TimeoutError) as error:
                log.error("last_commit_failed", error=str(error))
        self.line.settle_all(LeaseStatus.EMPTY)
        await self.committer.stop()
        await self._store.close()

    async def _last_commits(self) -> None:
        self.collect()
        await self.committer.committed()
        self.collect()  # leases that were granted to nobody came back with the first one
        await self.committer.committed()

    def require_open(self) -> None:
        """Raises where a call could not be made durable."""
        if self.closing:
            raise ShuttingDown("the service is ending; ask again after its restart")
        if self.broken is not None:
            raise StoreUnavailable(f"the store cannot commit: {self.broken}")

    def _take(self, snapshot: Snapshot) -> None:
        self.prompts = PromptMemory()
        self.core = Scheduler(self._rules.policy)
        self.run = snapshot.run
        self.core.load(snapshot, now=self._clock())
        self.core.halt = self._halted or self.core.halt
        self._show_version(self.core.version)  # a reset may have become durable though its commit was lost on the way

    # the turn

    def turn(self) -> None:
        """After an event: end what is over, serve waiting callers, dispatch, hand what changed to the committer."""
        self._turn_planned = False
        if self.closing or self.broken is not None:
            return
        now = self._clock()
        core = self.core
        core.expire(now=now)
        self._serving.serve(now)  # before dispatch: what goes out makes room for groups to open
        capacity = self._engines.healthy_capacity()
        core.dispatch(now=now, capacity=capacity)
        missing = capacity == 0 and core.wants_engine
        if self._engines_missing.lasted(missing, self._rules.engine_wait_s, self._steady()):  # design 3.2.5
            self._give_up_waiting(now)
        if core.exhausted is not self._said_exhausted:
            self._said_exhausted = core.exhausted
            if core.exhausted:
                log.info("exhausted", **{str(state): n for state, n in core.counts.groups.items() if n})
        self._set_gate()
        self.collect()
        self.committer.flush()
        self._arm(now)
        self.turned.set()

    def submit(self, new: Mapping[int, NewGroup]) -> None:
        """Take new groups, numbered from the core's `last_seq` + 1 on."""
        self.core.submit(entry.group for entry in new.values())
        self.committer.batch.new_groups.update(new)
        for seq, entry in new.items():
            self.prompts.add(seq, entry.prompt)
            self.prompts.keys[entry.group.prompt_id, entry.group.epoch] = (seq, entry.digest)

    def read_to(self, position: int, fingerprint: str | None = None) -> None:
        """The prompts file was read up to `position`; committed with what was made of it."""
        self.run = replace(
            self.run,
            read_position=position,
            prompts_fingerprint=self.run.prompts_fingerprint if fingerprint is None else fingerprint,
        )
        self.committer.batch.run = self.run = self.core.run_state(self.run)

    def reopen(self, checkpoint: Checkpoint, ended: Mapping[int, tuple[Group, Prompt]]) -> Bumped:
        """Rewind the core to `checkpoint`; `ended`: every group that ended since, with its prompt."""
        self.seal_leases()
        groups = [group for group, _ in ended.values()]
        bumped = self.core.rewind(checkpoint, groups, now=self._clock(), unsent=self._opening)
        self._tell_version(bumped)
        for seq, (_, prompt) in ended.items():
            self.prompts.add(seq, prompt)
        self.committer.batch.forget_payloads.difference_update(ended)  # they are needed again
        return bumped

    def post_version(self, version: int, *, reset: bool) -> Bumped:
        """Raises VersionTooLow."""
        self.seal_leases()
        bumped = self.core.post_version(version, now=self._clock(), reset=reset, unsent=self._opening)
        self._tell_version(bumped)
        return bumped

    def _tell_version(self, bumped: Bumped) -> None:
        if bumped.version != bumped.previous:
            self._after_commit(partial(self._observer.version_posted, bumped))

    def seal_leases(self) -> None:
        """Have leases not yet handed to the store commit before what comes next.

        A lease is made at its commit: one that shared the transaction of a bump could be stale in it (design 3.1.5).
        """
        self.collect()
        if self.committer.batch.leases:
            self.committer.seal()

    def _collected(self, changes: Changes) -> None:
        if changes.run:
            self.run = self.committer.batch.run = self.core.run_state(self.run)
            self._after_commit(partial(self._show_version, self.core.version))
        for lease in changes.leases.values():
            if lease.state is not LeaseState.LIVE:
                self._after_commit(partial(self._observer.lease_ended, lease, self._clock() - lease.created_at))

    def _show_version(self, version: int) -> None:
        self.returns += version < self.version
        self.version = version

    def resume(self) -> None:
        """Clear a pause and a halt; only the commit of it makes a reload forget the halt."""
        self.core.resume()
        self.collect()
        self._after_commit(self._forget_halt)

    def _forget_halt(self) -> None:
        if self.core.halt is None:
            self._halted = None

    def _show_halt(self, halt: Halt) -> None:
        self._halted = halt
        self._observer.halted(halt)

    # time

    def _arm(self, now: float) -> None:
        """Wake up for the next lease that expires or the end of waiting for an engine."""
        expiry = self.core.next_expiry()
        waits = (
            None if expiry is None else expiry - now,
            self._engines_missing.left(self._rules.engine_wait_s, self._steady()),
        )
        wait = min((seconds for seconds in waits if seconds is not None), default=None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wait is not None:
            # never 0: a clock that rounds down would have the loop spin until the moment is really there
            self._timer = asyncio.get_running_loop().call_later(max(0.001, wait), self.turn)

    # a store that fails

    def _on_failure(self, error: StoreUnavailable) -> None:
        """Nothing since the last commit happened: stop all work, and begin again from what is on disk."""
        if self.broken is not None or self.closing:
            return
        log.error("store_failed", error=str(error))
        self._observer.commit_failed(str(error))
        self.broken = error
        self._gate.set(False)
        self.line.settle_all(StoreUnavailable(f"the store cannot commit: {error}"))
        self._reload_task = asyncio.create_task(self._reload(), name="reload")

    async def _reload(self) -> None:
        await self.committer.stop(self.broken)
        await self.work.stop_all(within_s=STOP_WORK_S)
        pause = RELOAD_FIRST_S
        while True:
            try:
                self._take(await self._store.load())
                await self.prompts.load(self._store, self.core.groups)
                await self._store.commit(probe_batch(self.run))
                break
            except StoreUnavailable as error:
                self.broken = error
            except Exception as error:  # a fault of ours: say so and keep trying, for the store holds the truth
                log.exception("reload_raised")
                self.broken = StoreUnavailable(repr(error))
            await asyncio.sleep(pause)
            pause = min(2 * pause, RELOAD_MOST_S)
        self.survivors = Survivors()
        self._outcomes.clear()
        self._scores.clear()
        self._opening.clear()
        self.committer.start()
        self.broken = None
        log.info("store_back", outstanding=self.core.outstanding, policy_version=self.core.version)
        self.turn()


def probe_batch(run: RunState) -> Batch:
    """A commit that changes nothing, to learn whether the store commits."""
    return Batch(run=run)
