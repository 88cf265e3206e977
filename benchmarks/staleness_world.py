"""A run in virtual time: the service's own scheduler, an engine that batches, and a trainer that takes steps. Pure.

What always holds: the same setting gives the same run, to the token; every token the engine has decoded is in exactly
one of trained, wasted, held (settled rollouts of groups that are not trained yet) and in flight. What decides is
`rollout_service.core`, unchanged; lengths and speeds are those of `rollout_service.simulator`. Nothing here waits: time
jumps to the next event.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial

from rollout_service.core.changes import Moved
from rollout_service.core.group import Group, GroupPolicy, OnStale
from rollout_service.core.lifecycle import EventKind, StartRollouts, StartScoring, StopRollouts
from rollout_service.core.model import GroupState
from rollout_service.core.scheduler import Admission, Policy, Scheduler
from rollout_service.simulator.decoder import Decoder
from rollout_service.simulator.model import BatchModel, Sequence, batch_rate
from rollout_service.simulator.settings import SimulatorSettings

KEEP_PENDING = 64
"""Prompts are never what is missing."""
LEASE_S = 1_000_000
"""No lease expires: this trainer does not die."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One run. Times are seconds, rates tokens a second."""

    max_staleness: int = 4
    on_stale: OnStale = OnStale.DROP
    admission: Admission = Admission.SLOTS
    step_s: float = 18.0
    """What the trainer takes for a step, the weights' way to the engines included."""
    groups_per_step: int = 16
    num_generations: int = 8
    slots: int = 256
    max_ready_groups: int = 64
    scoring_s: float = 1.0
    mean_tokens: int = 1000
    """Mean length before `max_tokens` cuts it: lognormal, with a long tail."""
    sigma: float = 0.8
    max_tokens: int = 4096
    tokens_per_s: float = 80.0
    """One request alone."""
    batch_half: float = 128.0
    """At this many others a request runs at half its speed."""
    max_num_seqs: int = 256
    seed: int = 0

    @property
    def policy(self) -> Policy:
        group = GroupPolicy(max_staleness=self.max_staleness, on_stale=self.on_stale)
        return Policy(
            group=group,
            slots=self.slots,
            max_ready_groups=self.max_ready_groups,
            admission=self.admission,
            groups_per_step=self.groups_per_step,
        )


@dataclass(kw_only=True, slots=True)
class Tally:
    """Sums since the run began; the difference of two is a window's."""

    seconds: float = 0.0
    decoded: int = 0
    """Tokens, by the engine's count."""
    trained: int = 0
    """Tokens of groups that a step was made of."""
    wasted: int = 0
    """Tokens of rollouts that were discarded, finished or not."""
    steps: int = 0
    groups: int = 0
    """Trained ones."""
    rollouts: int = 0
    """Of those."""
    staleness: int = 0
    """Sum over the trained groups: the version a step left behind minus the group's."""
    lost: int = 0
    """Groups that ended stale: prompts the trainer never saw."""
    asked: int = 0
    """Tokens the rollouts opened would have, had nobody stopped them."""
    opened: int = 0
    """Those rollouts."""
    idle_s: float = 0.0
    """Seconds in which the trainer waited for groups."""
    busy: float = 0.0
    """Slot-seconds in use."""

    def minus(self, before: Tally) -> Tally:
        return Tally(**{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)})

    def copy(self) -> Tally:
        return self.minus(Tally())

    @property
    def trained_per_s(self) -> float:
        return self.trained / self.seconds

    @property
    def wasted_share(self) -> float:
        return self.wasted / max(1, self.decoded)

    @property
    def mean_staleness(self) -> float:
        return self.staleness / max(1, self.groups)

    @property
    def length_share(self) -> float:
        """Mean length of what was trained over that of what was asked for: below 1, long answers are missing."""
        return (self.trained / max(1, self.rollouts)) / (self.asked / max(1, self.opened))


class Row(Sequence):
    """One rollout in the engine."""

    __slots__ = ("attempt", "index", "seq")

    def __init__(self, tokens: int, *, seq: int, attempt: int, index: int) -> None:
        super().__init__(tokens, float(tokens))
        self.seq, self.attempt, self.index = seq, attempt, index


@functools.cache
def _decoder(seed: int, mean_tokens: int, sigma: float) -> Decoder:
    return Decoder(SimulatorSettings(seed=seed, mean_tokens=mean_tokens, sigma=sigma))


@dataclass
class World:
    """The run; `run_until` may be called again and again."""

    setting: Setting
    now: float = 0.0
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        setting = self.setting
        self.core = Scheduler(setting.policy)
        rate = batch_rate(setting.tokens_per_s, setting.batch_half)
        self._batch: BatchModel[Row] = BatchModel(rate=rate, limit=setting.max_num_seqs)
        self._decoder = _decoder(setting.seed, setting.mean_tokens, setting.sigma)
        self._rows: dict[tuple[int, int, int], Row] = {}
        self._settled: dict[tuple[int, int], int] = {}
        """Tokens of the finished rollouts of (seq, attempt)."""
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_number = 0
        self._waiting_since: float | None = 0.0
        """The trainer waits for its next lease; None: it is in a step."""

    @property
    def held(self) -> int:
        """Tokens of settled rollouts whose groups are not trained yet."""
        return sum(self._settled.values())

    @property
    def in_flight(self) -> int:
        """Tokens decoded of the rollouts in flight."""
        return sum(self._batch.decoded(self.now, row) for row in self._batch.sequences())

    def run_until(self, end: float) -> None:
        self._turn()
        while (moment := self._next_moment()) <= end:
            self._pass_to(moment)
            for row in self._batch.due(moment):
                self._finished(row)
            while self._timers and self._timers[0][0] <= moment:
                heapq.heappop(self._timers)[2]()
            self._turn()
        self._pass_to(end)

    def _next_moment(self) -> float:
        moments = [self._timers[0][0]] if self._timers else []
        due = self._batch.next_due()
        if due is not None:
            moments.append(max(due, self.now))
        return min(moments, default=float("inf"))

    def _pass_to(self, moment: float) -> None:
        passed = moment - self.now
        self.tally.seconds += passed
        self.tally.busy += passed * self.core.in_flight
        if self._waiting_since is not None:
            self.tally.idle_s += passed
        self.now = moment

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._timer_number += 1  # two of one moment go in the order they were set
        heapq.heappush(self._timers, (self.now + seconds, self._timer_number, call))

    # one turn, in the order of the service's own writer

    def _turn(self) -> None:
        core, setting = self.core, self.setting
        if core.pending < KEEP_PENDING:
            first = core.last_seq + 1
            core.submit([self._prompt(seq) for seq in range(first, first + KEEP_PENDING)])
        if self._waiting_since is not None:
            self._lease()
        core.dispatch(now=self.now, capacity=setting.slots)
        for effect in core.take_changes().effects:
            match effect:
                case StartRollouts():
                    self._start(effect)
                case StopRollouts():
                    self._stop(effect)
                case StartScoring(group=group):
                    score = partial(self.core.scored, group.seq, group.attempt, None)
                    self._after(setting.scoring_s, lambda score=score: score(now=self.now))  # type: ignore[misc]  # bound now
                case Moved():
                    self._moved(effect)

    def _prompt(self, seq: int) -> Group:
        n = self.setting.num_generations
        return Group(
            seq=seq,
            prompt_id=f"p{seq}",
            epoch=0,
            num_generations=n,
            waiting=tuple(range(n)),
            submitted_at=self.now,
            changed_at=self.now,
        )

    # the engine

    def _start(self, effect: StartRollouts) -> None:
        group = effect.group
        for index in effect.rows:
            key = (group.seq, group.attempt, index)
            tokens = self._decoder.plan(f"{self.setting.seed}:{key}", self.setting.max_tokens).content.length
            row = self._rows[key] = Row(tokens, seq=group.seq, attempt=group.attempt, index=index)
            self.tally.asked += tokens
            self.tally.opened += 1
            self._batch.add(self.now, row)

    def _stop(self, effect: StopRollouts) -> None:
        for index in sorted(effect.rows):
            row = self._rows.pop((effect.group.seq, effect.group.attempt, index))
            self._batch.remove(self.now, row)
            self.tally.decoded += row.decoded
            self.tally.wasted += row.decoded

    def _finished(self, row: Row) -> None:
        del self._rows[row.seq, row.attempt, row.index]
        self.tally.decoded += row.decoded
        settled = self._settled
        settled[row.seq, row.attempt] = settled.get((row.seq, row.attempt), 0) + row.decoded
        if not self.core.finish(row.seq, row.attempt, row.index, 9 * row.tokens, now=self.now):
            raise AssertionError("the engine finished a rollout that it had been told to stop")

    def _moved(self, moved: Moved) -> None:
        before, after = moved.before, moved.after
        if moved.kind is EventKind.OUTDATED:
            self.tally.wasted += self._settled.pop((before.seq, before.attempt), 0)
            self.tally.lost += after.state is GroupState.STALE
        elif after.state is GroupState.ACKED:
            self.tally.trained += self._settled.pop((after.seq, after.attempt))

    # the trainer

    def _lease(self) -> None:
        size = self.setting.groups_per_step
        lease = self.core.lease(f"l{self.tally.steps}", max_groups=size, min_groups=size, lease_s=LEASE_S, now=self.now)
        if lease is None:
            return
        self._waiting_since = None
        for seq, _ in lease.groups:
            group = self.core.groups[seq]
            self.tally.groups += 1
            self.tally.rollouts += len(group.finished)
            self.tally.staleness += group.staleness(self.core.version) or 0
        self._after(self.setting.step_s, lambda: self._stepped(lease.lease_id))

    def _stepped(self, lease_id: str) -> None:
        """The step is made: the engines have the new weights, the version is posted, the groups are acked."""
        core = self.core
        core.post_version(core.version + 1, now=self.now)
        lease = core.leases[lease_id]
        core.ack(lease, [seq for seq, _ in lease.groups], core.groups.get, now=self.now)
        self.tally.steps += 1
        self._waiting_since = self.now


def simulate(setting: Setting, *, warm_up_s: float, window_s: float) -> Tally:
    """What happened in `window_s` after `warm_up_s`."""
    world = World(setting)
    world.run_until(warm_up_s)
    before = world.tally.copy()
    world.run_until(warm_up_s + window_s)
    return world.tally.minus(before)
