"""The one writer: an event goes into the core, what the core changed goes into a batch, effects leave after its commit.

What always holds: only this class calls the core's changing methods or fills a batch; nothing it decides is visible
outside before its commit, except further rows of an attempt whose opening is committed; after a failed commit the core
is thrown away and read again from the store, and until that succeeds nothing is dispatched or accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import structlog

from rollout_service.core.changes import Bumped, Halt, Moved
from rollout_service.core.group import Checkpoint, Group, LeaseState, group_id
from rollout_service.core.lifecycle import EventKind, StartRollouts, StartScoring, StopRollouts, StopScoring
from rollout_service.core.model import (
    DropReason,
    FailedRollout,
    FailureReason,
    FinishedRollout,
    GroupState,
    Prompt,
    ScoreJob,
    Scores,
)
from rollout_service.core.records import Batch, GroupScore, NewGroup, RunState, Snapshot
from rollout_service.core.scheduler import Policy, Scheduler
from rollout_service.core.scoring import ScoringRules, judge, with_own_rewards
from rollout_service.errors import ShuttingDown, StoreUnavailable
from rollout_service.orchestrator.committer import Committer
from rollout_service.orchestrator.gate import PauseGate
from rollout_service.orchestrator.parts import Clock, Engines, Observer, RolloutRunner, Scorer
from rollout_service.orchestrator.prompt_memory import PromptMemory
from rollout_service.orchestrator.serving import Serving
from rollout_service.orchestrator.survivors import Survivors
from rollout_service.orchestrator.views import LeaseStatus
from rollout_service.orchestrator.work import Outcome, RolloutKey, Work
from rollout_service.store.protocol import Store

log = structlog.get_logger(__name__)

RELOAD_FIRST_S, RELOAD_MOST_S = 0.25, 5.0
"""Between two tries to reach the store again: quick for a hiccup, seldom enough not to load a full disk."""
READ_TRIES = 6
"""For the survivors of one group: about 8 s of a medium that cannot be read, then the group is unscorable."""
STOP_WORK_S = 3.0
"""How long ended rollouts may take to close their connections; a stop as a whole has 10 s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What a run is configured with."""

    policy: Policy
    scoring: ScoringRules
    engine_wait_s: float


class Writer:
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
        new_id: Callable[[], str],
    ) -> None:
        self._rules, self._store, self._engines = rules, store, engines
        self._observer, self._clock = observer, clock
        self.core = Scheduler(rules.policy)
        self.run = RunState()
        self.prompts = PromptMemory()
        self._serving = Serving(self, observer, new_id)
        self.line = self._serving.line
        self.broken: StoreUnavailable | None = None
        self.closing = False
        self.turned = asyncio.Event()
        """Set after every turn, for the prompts file to look whether there is room."""
        self._said_exhausted = False
        self._gate = PauseGate()
        self.work = Work(
            runner,
            scorer,
            self._gate,
            abort=engines.abort,
            settled=self._settled,
            scored=self._scored,
        )
        self.committer = Committer(store, on_failure=self._on_failure, on_commit=observer.committed)
        self.survivors = Survivors()
        self._outcomes: dict[RolloutKey, Outcome] = {}
        """Settled since the last `collect`: they go into the batch together with what they did to their groups."""
        self._scores: dict[tuple[int, int], GroupScore] = {}
        """The same for scores."""
        self._opening: dict[tuple[int, int], int | None] = {}
        """(seq, attempt) of groups whose first dispatch has not left, and the version it was decided at."""
        self.version = 0
        """The policy version that is on disk."""
        self.returns = 0
        """How often it was lowered since the start: the same number then stands for other weights."""
        self._halted: Halt | None = None
        """The halt that was said outside; a reload must not forget it."""
        self._turn_planned = False
        self._timer: asyncio.TimerHandle | None = None
        self._engine_missed_since: float | None = None
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

    def now(self) -> float:
        """Unix seconds."""
        return self._clock()

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
        self._watch_engines(capacity, now)
        if core.exhausted is not self._said_exhausted:
            self._said_exhausted = core.exhausted
            if core.exhausted:
                log.info("exhausted", **{str(state): n for state, n in core.counts.groups.items() if n})
        if core.stopped:
            self._gate.set(False)
        elif not self._gate.is_open:
            self._after_commit(self._open_gate)
        self.collect()
        self.committer.flush()
        self._arm(now)
        self.turned.set()

    def _open_gate(self) -> None:
        if not self.core.stopped and not self.closing:
            self._gate.set(True)

    def touch(self) -> None:
        """Take a turn soon; many calls in one pass of the loop share it."""
        if not self._turn_planned:
            self._turn_planned = True
            asyncio.get_running_loop().call_soon(self.turn)

    async def settled(self) -> None:
        """Return once everything that has happened so far is durable. Raises StoreUnavailable."""
        if self._turn_planned:
            self.turn()
        await self.committer.committed()

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

    def collect(self) -> None:
        """Move what the core changed into the batch, and plan its effects."""
        changes = self.core.take_changes()
        batch = self.committer.batch
        batch.rollouts.update(self._outcomes)
        batch.scores.update(self._scores)
        self._outcomes.clear()
        self._scores.clear()
        batch.groups.update(changes.groups)
        batch.leases.update(changes.leases)
        for name in changes.forgotten:
            batch.checkpoints.pop(name, None)
            batch.forget_checkpoints.add(name)
        batch.checkpoints.update(changes.checkpoints)
        if changes.run:
            self.run = batch.run = self.core.run_state(self.run)
            self._after_commit(partial(self._show_version, self.core.version))
        if changes.new_attempts:
            batch.forget_attempts |= changes.new_attempts
            self._forget_uncommitted(changes.new_attempts)
        for lease in changes.leases.values():
            if lease.state is not LeaseState.LIVE:
                batch.forget_payloads.update(seq for seq, _ in lease.groups if seq not in self.core.groups)
                self._after_commit(partial(self._observer.lease_ended, lease, self._clock() - lease.created_at))
        for effect in changes.effects:
            match effect:
                case StartRollouts():
                    self._plan_start(effect)
                case StopRollouts():
                    self.committer.after_commit_first(partial(self._stop_rollouts, effect))
                case StartScoring():
                    self._after_commit(partial(self._start_scoring, effect.group))
                case StopScoring():
                    self._after_commit(partial(self.work.stop_scoring, effect.group))
                case Moved():
                    self._moved(effect)
                case Halt():
                    log.error("halted", **{"reason": effect.reason, "group_id": effect.group_id, "error": effect.error})
                    self._after_commit(partial(self._show_halt, effect))

    def _forget_uncommitted(self, seqs: set[int]) -> None:
        """Settled rollouts of attempts that are over already need not be written at all."""
        batch, groups = self.committer.batch, self.core.groups
        for seq, attempt, index in [key for key in batch.rollouts if key[0] in seqs]:
            if seq in groups and groups[seq].attempt != attempt:
                del batch.rollouts[seq, attempt, index]
        for seq, attempt in [key for key in batch.scores if key[0] in seqs]:
            if seq in groups and groups[seq].attempt != attempt:
                del batch.scores[seq, attempt]

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

    def _after_commit(self, run: Callable[[], None]) -> None:
        self.committer.after_commit(run)

    def _plan_start(self, effect: StartRollouts) -> None:
        """The first dispatch of an attempt waits for its own commit; further rows only for that one (design 4.4)."""
        key = (effect.group.seq, effect.group.attempt)
        if effect.first:
            self._opening[key] = effect.group.version
        if key in self._opening:
            self._after_commit(partial(self._start_rollouts, effect))
        else:
            self._start_rollouts(effect)

    def _start_rollouts(self, effect: StartRollouts) -> None:
        group = effect.group
        key = (group.seq, group.attempt)
        if self._opening.get(key) == group.version:
            self._opening.pop(key, None)
        current = self.core.groups.get(group.seq)
        if self.closing or current is None or (current.attempt, current.version) != (group.attempt, group.version):
            return  # decided otherwise since; its stop follows and finds nothing to do
        self.work.start_rollouts(group, current.running.intersection(effect.rows), self.prompts[group.seq])

    def _stop_rollouts(self, effect: StopRollouts) -> None:
        self._observer.rollouts_aborted(self.work.stop_rollouts(effect.group, effect.rows))

    # rollouts and scores come back

    def _settled(self, key: RolloutKey, outcome: Outcome, seconds: float) -> None:
        seq, attempt, index = key
        now = self._clock()
        if isinstance(outcome, FinishedRollout):
            counted = self.core.finish(seq, attempt, index, outcome.payload_bytes, now=now)
            if counted:
                self.survivors.add(seq, attempt, outcome)
            else:
                self._observer.tokens_wasted(outcome.output_tokens, "late")
        else:
            counted = self.core.fail(seq, attempt, index, outcome.reason, outcome.error, outcome.engine, now=now)
            if counted:
                log.warning(
                    "rollout_failed",
                    group_id=group_id(seq),
                    attempt=attempt,
                    index=index,
                    reason=outcome.reason,
                    engine=outcome.engine,
                    error=outcome.error,
                )
        if counted:
            self._outcomes[key] = outcome
            self._after_commit(partial(self._observer.rollout_settled, outcome, seconds, group_id=group_id(seq)))
            self.touch()

    def _start_scoring(self, group: Group) -> None:
        if self._is_scored(group) and not self.closing:
            self.work.start_scoring(group, partial(self._score_job, group))

    def _is_scored(self, group: Group) -> bool:
        current = self.core.groups.get(group.seq)
        return current is not None and current.attempt == group.attempt and current.state is GroupState.SCORING

    async def _score_job(self, group: Group) -> ScoreJob | None:
        """None where a bump or a cancellation came first: what scoring needs is gone, and its stop is on the way."""
        pause = RELOAD_FIRST_S
        for last in (False,) * (READ_TRIES - 1) + (True,):
            if not self._is_scored(group):
                return None
            try:
                rollouts = await self.survivors.of(group, self._store)
                break
            except Exception as error:
                if not self._is_scored(group):
                    return None
                if last or not isinstance(error, StoreUnavailable):
                    raise  # costs this group only
            await asyncio.sleep(pause)
            pause = min(2 * pause, RELOAD_MOST_S)
        if not self._is_scored(group):
            return None
        return ScoreJob(
            group_id=group.group_id,
            attempt=group.attempt,
            prompt=self.prompts[group.seq],
            rollouts=rollouts,
        )

    def _scored(self, group: Group, job: ScoreJob, scores: Scores) -> None:
        indexes = [rollout.index for rollout in job.rollouts]
        score: GroupScore | None = None
        drop: DropReason | None = DropReason.REWARD_CANCELLED
        error = scores.cancelled
        if error is None:
            try:
                score, drop = judge(with_own_rewards(scores, job.rollouts), indexes, self._rules.scoring)
            except Exception as fault:  # ours; it costs this group, which must not wait for ever
                log.exception("scoring_raised", group_id=group.group_id)
                drop, error = DropReason.UNSCORABLE, repr(fault)
            if drop is DropReason.UNSCORABLE and error is None:
                error = "; ".join(f"{name}: {why}" for name, why in scores.errors.items()) or "no reward scored it"
        if not self.core.scored(group.seq, group.attempt, drop, error, now=self._clock()):
            return
        if drop is None and score is not None:
            self._scores[group.seq, group.attempt] = score
            self.survivors.scored(group.seq, group.attempt, score.mean)
        self.touch()

    # what moved

    def _moved(self, moved: Moved) -> None:
        seq, before, after = moved.after.seq, moved.before, moved.after
        if before.attempt != after.attempt or after.state.terminal:
            tokens = self.survivors.end(seq, before.attempt)
            wasted = _why_wasted(moved)
            if tokens and wasted is not None:
                self._after_commit(partial(self._observer.tokens_wasted, tokens, wasted))
        if after.state.terminal:
            self.prompts.discard(seq)
            holder = before.lease_id or after.acked_by
            if holder not in self.core.leases:  # else its payload stays for a replay of the lease, until that ends
                self.committer.batch.forget_payloads.add(seq)
            self._after_commit(partial(self.prompts.forget_key, (after.prompt_id, after.epoch)))
        self._after_commit(partial(self._observer.group_moved, moved))

    # time

    def _arm(self, now: float) -> None:
        """Wake up for the next lease that expires or the end of waiting for an engine."""
        moments = [self.core.next_expiry()]
        if self._engine_missed_since is not None:
            moments.append(self._engine_missed_since + self._rules.engine_wait_s)
        due = min((moment for moment in moments if moment is not None), default=None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            # never 0: a clock that rounds down would have the loop spin until the moment is really there
            self._timer = asyncio.get_running_loop().call_later(max(0.001, due - now), self.turn)

    def _watch_engines(self, capacity: int, now: float) -> None:
        """With work to give out and no healthy engine for `engine_wait_s`, say so loudly (design 3.2.5)."""
        if capacity > 0 or not self.core.wants_engine:
            self._engine_missed_since = None
            return
        if self._engine_missed_since is None:
            self._engine_missed_since = now
        elif now - self._engine_missed_since >= self._rules.engine_wait_s:
            self._engine_missed_since = None
            self._give_up_waiting(now)

    def _give_up_waiting(self, now: float) -> None:
        wrong = self._engines.unhealthy()
        words = "; ".join(f"{url}: {error}" for url, error in wrong.items())
        error = f"no engine was healthy for {self._rules.engine_wait_s:g} s ({words or 'there is none'})"
        engine = next(iter(wrong), None)
        given_up = self.core.give_up_waiting(error, engine, now=now)
        if given_up is None:
            return
        group, rows = given_up
        log.warning("gave_up_waiting", group_id=group.group_id, rollouts=len(rows), error=error)
        for row in rows:
            failed = FailedRollout(index=row, reason=FailureReason.ENGINE_UNAVAILABLE, error=error, engine=engine)
            self.committer.batch.rollouts[group.seq, group.attempt, row] = failed
            self._after_commit(
                partial(self._observer.rollout_settled, failed, now - group.changed_at, group_id=group.group_id)
            )
        self.touch()  # waiting callers were served before this, and must hear of a halt

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


def _why_wasted(moved: Moved) -> str | None:
    if moved.kind is EventKind.OUTDATED:
        return "stale"
    if moved.kind in (EventKind.RESET, EventKind.REWOUND):
        return "reset"
    if moved.after.state is GroupState.DROPPED:
        return str(moved.after.reason)
    return None
