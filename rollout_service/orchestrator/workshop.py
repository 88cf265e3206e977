"""Groups that are worked for: their rollouts and scoring, what comes of them, and the commits in between.

What always holds: what the core changed goes into a batch, effects leave after its commit; nothing decided here is
visible outside before that, except further rows of an attempt whose opening is committed; what comes back of a group
or attempt that is worked for no longer is a no-op. Who opens groups, and what becomes of scored ones, is the business
of those who build on this.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog

from rollout_service.core.changes import Changes, Halt, Moved
from rollout_service.core.group import Group, group_id
from rollout_service.core.lifecycle import EventKind, StartRollouts, StartScoring, StopRollouts, StopScoring
from rollout_service.core.model import (
    DropReason,
    FailedRollout,
    FailureReason,
    FinishedRollout,
    GroupState,
    ScoreJob,
    Scores,
)
from rollout_service.core.records import GroupScore
from rollout_service.core.scheduler import Policy, Scheduler
from rollout_service.core.scoring import ScoringRules, judge, with_own_rewards
from rollout_service.errors import StoreUnavailable
from rollout_service.orchestrator.batches import add_changes
from rollout_service.orchestrator.committer import Commits, Committer
from rollout_service.orchestrator.gate import PauseGate
from rollout_service.orchestrator.parts import Clock, Engines, Observer, RolloutRunner, Scorer
from rollout_service.orchestrator.prompt_memory import PromptMemory
from rollout_service.orchestrator.survivors import Survivors
from rollout_service.orchestrator.work import Outcome, RolloutKey, Work
from rollout_service.store.protocol import Store

log = structlog.get_logger(__name__)

READ_FIRST_S, READ_MOST_S = 0.25, 5.0
"""Between two tries to read the store: quick for a hiccup, seldom enough not to load a full disk."""
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


class Workshop(ABC):
    """Base of the writers: one core, what works for its groups, and the way of its changes into the store."""

    def __init__(
        self,
        rules: Rules,
        *,
        store: Store,
        commits: Commits,
        runner: RolloutRunner,
        scorer: Scorer,
        engines: Engines,
        observer: Observer,
        clock: Clock,
    ) -> None:
        self._rules, self._store, self._engines = rules, store, engines
        self._observer, self._clock = observer, clock
        self.core = Scheduler(rules.policy)
        self.prompts = PromptMemory()
        self.closing = False
        self._gate = PauseGate()
        self.work = Work(
            runner,
            scorer,
            self._gate,
            abort=engines.abort,
            settled=self._settled,
            scored=self._scored,
        )
        self.committer = Committer(commits, on_failure=self._on_failure, on_commit=observer.committed)
        self.survivors = Survivors()
        self._outcomes: dict[RolloutKey, Outcome] = {}
        """Settled since the last `collect`: they go into the batch together with what they did to their groups."""
        self._scores: dict[tuple[int, int], GroupScore] = {}
        """The same for scores."""
        self._opening: dict[tuple[int, int], int | None] = {}
        """(seq, attempt) of groups whose first dispatch has not left, and the version it was decided at."""
        self._turn_planned = False

    @abstractmethod
    def turn(self) -> None:
        """After an event: decide what follows, and hand what changed to the committer."""

    @abstractmethod
    def _on_failure(self, error: StoreUnavailable) -> None:
        """A commit failed; nothing since the last one happened."""

    def now(self) -> float:
        """Unix seconds."""
        return self._clock()

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

    def _after_commit(self, run: Callable[[], None]) -> None:
        self.committer.after_commit(run)

    def _after_commit_of(self, seq: int, run: Callable[[], None]) -> None:
        """For what is told of a group."""
        self._after_commit(run)

    def _set_gate(self) -> None:
        """Close it at once, open it when what opened it is durable."""
        if self.core.stopped:
            self._gate.set(False)
        elif not self._gate.is_open:
            self._after_commit(self._open_gate)

    def _open_gate(self) -> None:
        if not self.core.stopped and not self.closing:
            self._gate.set(True)

    # from the core into the batch

    def collect(self) -> None:
        """Move what the core changed into the batch, and plan its effects."""
        changes = self.core.take_changes()
        batch = self.committer.batch
        batch.rollouts.update(self._outcomes)
        batch.scores.update(self._scores)
        self._outcomes.clear()
        self._scores.clear()
        add_changes(batch, changes, self.core)
        if changes.new_attempts:
            self._forget_uncommitted(changes.new_attempts)
        self._collected(changes)
        for effect in changes.effects:
            match effect:
                case StartRollouts():
                    self._plan_start(effect)
                case StopRollouts():
                    self._plan_stop(effect)
                case StartScoring():
                    self._after_commit(partial(self._start_scoring, effect.group))
                case StopScoring():
                    self._after_commit(partial(self.work.stop_scoring, effect.group))
                case Moved():
                    self._moved(effect)
                case Halt():
                    log.error("halted", **{"reason": effect.reason, "group_id": effect.group_id, "error": effect.error})
                    self._after_commit(partial(self._show_halt, effect))

    @abstractmethod
    def _collected(self, changes: Changes) -> None:
        """What else is to be written of `changes`, before their effects are planned."""

    def _show_halt(self, halt: Halt) -> None:
        self._observer.halted(halt)

    def _forget_uncommitted(self, seqs: set[int]) -> None:
        """Settled rollouts of attempts that are over already need not be written at all."""
        batch, groups = self.committer.batch, self.core.groups
        for seq, attempt, index in [key for key in batch.rollouts if key[0] in seqs]:
            if seq in groups and groups[seq].attempt != attempt:
                del batch.rollouts[seq, attempt, index]
        for seq, attempt in [key for key in batch.scores if key[0] in seqs]:
            if seq in groups and groups[seq].attempt != attempt:
                del batch.scores[seq, attempt]

    def _moved(self, moved: Moved) -> None:
        seq, before, after = moved.after.seq, moved.before, moved.after
        if before.attempt != after.attempt or after.state.terminal:
            tokens = self.survivors.end(seq, before.attempt)
            wasted = why_wasted(moved)
            if tokens and wasted is not None:
                self._after_commit_of(seq, partial(self._observer.tokens_wasted, tokens, wasted))
        if after.state.terminal:
            self.prompts.discard(seq)
            self._after_commit(partial(self.prompts.forget_key, (after.prompt_id, after.epoch)))
        self._after_commit_of(seq, partial(self._observer.group_moved, moved))

    # rollouts go out and come back

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

    def _plan_stop(self, effect: StopRollouts) -> None:
        self.committer.after_commit_first(partial(self._stop_rollouts, effect))

    def _stop_rollouts(self, effect: StopRollouts) -> None:
        self._observer.rollouts_aborted(self.work.stop_rollouts(effect.group, effect.rows))

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
            told = partial(self._observer.rollout_settled, outcome, seconds, group_id=group_id(seq))
            self._after_commit_of(seq, told)
            self.touch()

    # scores come back

    def _start_scoring(self, group: Group) -> None:
        if self._is_scored(group) and not self.closing:
            self.work.start_scoring(group, partial(self._score_job, group))

    def _is_scored(self, group: Group) -> bool:
        current = self.core.groups.get(group.seq)
        return current is not None and current.attempt == group.attempt and current.state is GroupState.SCORING

    async def _score_job(self, group: Group) -> ScoreJob | None:
        """None where a bump or a cancellation came first: what scoring needs is gone, and its stop is on the way."""
        pause = READ_FIRST_S
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
            pause = min(2 * pause, READ_MOST_S)
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

    # engines that are missing

    def _give_up_waiting(self, now: float) -> None:
        """Fail the group that would be dispatched next, so that somebody hears of it."""
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
            told = partial(self._observer.rollout_settled, failed, now - group.changed_at, group_id=group.group_id)
            self._after_commit_of(group.seq, told)
        self.touch()  # waiting callers were served before this, and must hear of a halt


def why_wasted(moved: Moved) -> str | None:
    """The reason under which tokens of a group that `moved` are wasted; None where they are not."""
    if moved.kind is EventKind.OUTDATED:
        return "stale"
    if moved.kind in (EventKind.RESET, EventKind.REWOUND):
        return "reset"
    if moved.after.state is GroupState.DROPPED:
        return str(moved.after.reason)
    return None
