"""Every event in every order, late and duplicate ones included, against a plain model of what must hold."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout_service.core import lifecycle
from rollout_service.core.changes import Moved
from rollout_service.core.group import Group, GroupPolicy, Lease, LeaseState, OnStale
from rollout_service.core.model import DropReason, FailureReason, GroupState
from rollout_service.core.scheduler import Admission, NotHeld, Policy, Scheduler, VersionTooLow

SIZES = st.integers(1, 5)
PICK = st.integers(0, 10**6)


def snapshot_of(core: Scheduler) -> Any:
    state = {name: value for name, value in vars(core).items() if name != "policy"}
    return copy.deepcopy({k: (vars(v) if hasattr(v, "__dict__") else v) for k, v in state.items()})


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        on_stale=st.sampled_from(OnStale),
        max_staleness=st.integers(0, 2),
        min_group_size=st.integers(1, 2),
        slots=st.integers(1, 6),
        pace=st.booleans(),
        halt=st.integers(0, 2),
    )
    def begin(self, on_stale: OnStale, max_staleness: int, min_group_size: int, slots: int, pace: bool, halt: int):
        self.core = Scheduler(
            Policy(
                group=GroupPolicy(
                    max_staleness=max_staleness,
                    min_group_size=min_group_size,
                    on_stale=on_stale,
                    max_group_attempts=2,
                ),
                slots=slots,
                max_ready_groups=3,
                max_ready_bytes=100,
                max_lease_bytes=30,
                admission=Admission.PACE if pace else Admission.SLOTS,
                groups_per_step=2 if pace else 0,
                halt_after_failed_groups=halt,
                halt_after_unproductive_groups=3,
            )
        )
        self.now = 0.0
        self.leases: dict[str, Lease] = {}
        self.in_flight: set[tuple[int, int, int]] = set()
        self.started: list[tuple[int, int, int]] = []
        self.scoring: set[tuple[int, int]] = set()
        self.seen_scoring: list[tuple[int, int]] = []
        self.ended: dict[int, Group] = {}
        self.standing: dict[int, Group] = {}
        self.highest_attempt: dict[int, int] = {}
        self.acked_by: dict[int, str] = {}
        self.counter = 0

    # what the outside does with the changes

    def absorb(self) -> None:
        changes = self.core.take_changes()
        for effect in changes.effects:
            match effect:
                case lifecycle.StartRollouts():
                    for row in effect.rows:
                        key = (effect.group.seq, effect.group.attempt, row)
                        assert key not in self.started, "a row of an attempt is dispatched once"
                        self.started.append(key)
                        self.in_flight.add(key)
                case lifecycle.StopRollouts():
                    for row in effect.rows:
                        key = (effect.group.seq, effect.group.attempt, row)
                        assert key in self.in_flight, "a slot is freed once"
                        self.in_flight.discard(key)
                case lifecycle.StartScoring():
                    self.scoring.add((effect.group.seq, effect.group.attempt))
                    self.seen_scoring.append((effect.group.seq, effect.group.attempt))
                case lifecycle.StopScoring():
                    self.scoring.remove((effect.group.seq, effect.group.attempt))
                case Moved():
                    assert effect.before.seq not in self.ended, "an ended group moves no more"
                    if effect.after.state.terminal:
                        self.ended[effect.after.seq] = effect.after
        for seq, group in changes.groups.items():
            assert group.attempt >= self.highest_attempt.get(seq, 0), "the fencing token never falls"
            self.highest_attempt[seq] = group.attempt
            self.standing[seq] = group
        self.leases.update(changes.leases)

    # events

    @rule(n=SIZES)
    def submit(self, n: int) -> None:
        seq = self.core.last_seq + 1
        group = Group(
            seq=seq,
            prompt_id=f"p{seq}",
            epoch=0,
            num_generations=n,
            waiting=tuple(range(n)),
            submitted_at=self.now,
            changed_at=self.now,
        )
        self.core.submit([group])

    @rule(capacity=st.integers(0, 8))
    def dispatch(self, capacity: int) -> None:
        before = self.core.in_flight
        self.core.dispatch(now=self.now, capacity=capacity)
        assert self.core.in_flight <= max(before, min(capacity, self.core.policy.slots))

    @precondition(lambda self: self.started)
    @rule(pick=PICK, how=st.sampled_from(["finish", "fail", "too_long"]), size=st.integers(1, 40))
    def settle(self, pick: int, how: str, size: int) -> None:
        """Any row that was ever dispatched, of any attempt: mostly late or duplicate."""
        candidates = sorted(self.in_flight) if pick % 3 and self.in_flight else self.started
        seq, attempt, row = key = candidates[pick % len(candidates)]
        counts = key in self.in_flight
        before = None if counts else snapshot_of(self.core)
        if how == "finish":
            counted = self.core.finish(seq, attempt, row, size, now=self.now)
        else:
            reason = FailureReason.PROMPT_TOO_LONG if how == "too_long" else FailureReason.REJECTED
            counted = self.core.fail(seq, attempt, row, reason, "boom", "http://e", now=self.now)
        assert counted is counts
        self.in_flight.discard(key)
        if before is not None:
            assert snapshot_of(self.core) == before, "a late completion changes nothing"

    @precondition(lambda self: self.seen_scoring)
    @rule(pick=PICK, drop=st.sampled_from([None, None, DropReason.UNSCORABLE, DropReason.ZERO_VARIANCE]))
    def score(self, pick: int, drop: DropReason | None) -> None:
        key = self.seen_scoring[pick % len(self.seen_scoring)]
        counts = key in self.scoring
        assert self.core.scored(*key, drop, "why", now=self.now) is counts
        self.scoring.discard(key)

    @rule(max_groups=st.integers(1, 3), min_groups=st.integers(1, 3), lease_s=st.integers(1, 20))
    def lease(self, max_groups: int, min_groups: int, lease_s: int) -> None:
        self.counter += 1
        ready = self.core.ready
        lease = self.core.lease(
            f"l{self.counter}",
            max_groups=max_groups,
            min_groups=min(min_groups, max_groups),
            lease_s=lease_s,
            now=self.now,
        )
        if lease is None:
            assert ready < min(min_groups, max_groups)
            return
        assert 1 <= len(lease.groups) <= max_groups
        order = []
        for seq, attempt in lease.groups:
            group = self.core.groups[seq]
            assert (group.state, group.lease_id, group.attempt) == (GroupState.LEASED, lease.lease_id, attempt)
            assert 0 <= self.core.version - (group.version or 0) <= self.core.policy.group.max_staleness
            assert seq not in self.acked_by, "never newly leased after an ack"
            order.append((group.version, seq))
        assert order == sorted(order), "oldest version first, then submission order"

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, part=st.integers(0, 3))
    def ack(self, pick: int, part: int) -> None:
        lease = self.leases[sorted(self.leases)[pick % len(self.leases)]]
        seqs = [seq for seq, _ in lease.groups][part:] or [seq for seq, _ in lease.groups]
        before = snapshot_of(self.core)

        def find(seq: int) -> Group | None:
            return self.core.groups.get(seq) or self.ended.get(seq)

        try:
            self.core.ack(lease, seqs * 2, find, now=self.now)
        except NotHeld:
            assert snapshot_of(self.core) == before, "a refused ack does nothing"
            return
        for seq in seqs:
            assert self.acked_by.setdefault(seq, lease.lease_id) == lease.lease_id, "acked once, by one lease"

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, how=st.sampled_from(["release", "renew"]))
    def give_back_or_renew(self, pick: int, how: str) -> None:
        lease_id = sorted(self.leases)[pick % len(self.leases)]
        if how == "release":
            self.core.release(lease_id, None, now=self.now)
            assert lease_id not in self.core.leases
        else:
            renewed = self.core.renew(lease_id, 5, now=self.now)
            assert (renewed is not None) is (lease_id in self.core.leases)

    @rule(seconds=st.integers(1, 15))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.core.expire(now=self.now)
        assert all(lease.expires_at > self.now for lease in self.core.leases.values())

    def some_unsent(self) -> list[tuple[int, int]]:
        """Groups of which nothing has left: the next opening of the same attempt sends its rows, once."""
        found = [
            (group.seq, group.attempt)
            for group in self.core.groups.values()
            if group.state is GroupState.GENERATING and not group.finished and not group.failed and group.seq % 2
        ]
        rows = {(seq, attempt, row) for seq, attempt in found for row in self.core.groups[seq].running}
        self.in_flight -= rows
        self.started = [key for key in self.started if key not in rows]
        return found

    @rule(delta=st.integers(-2, 4), reset=st.booleans())
    def post_version(self, delta: int, reset: bool) -> None:
        current = self.core.version
        version = max(0, current + delta)
        before = snapshot_of(self.core)
        unsent = self.some_unsent() if version != current and (version > current or reset) else []
        in_flight = self.core.in_flight - sum(len(self.core.groups[seq].running) for seq, _ in unsent)
        try:
            bumped = self.core.post_version(version, now=self.now, reset=reset, unsent=unsent)
        except VersionTooLow:
            assert version < current
            assert not reset
            assert snapshot_of(self.core) == before
            return
        for seq, _ in unsent:
            assert self.core.groups[seq].state is GroupState.PENDING, "a bump costs nothing that was not sent"
        assert (bumped.version, bumped.previous) == (version, current)
        assert bumped.aborted_rollouts == in_flight - self.core.in_flight
        if version == current:
            assert snapshot_of(self.core) == before
        if version < current:
            assert not self.core.leases
            assert self.core.outstanding == self.core.pending

    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        if self.core.last_seq:
            seq = 1 + pick % self.core.last_seq
            outstanding = seq in self.core.groups
            assert self.core.cancel(seq, now=self.now) is outstanding
            assert seq not in self.core.groups

    @rule(paused=st.booleans())
    def pause_or_resume(self, paused: bool) -> None:
        if paused:
            self.core.pause()
        else:
            self.core.resume()
            assert self.core.halt is None

    @rule()
    def give_up_waiting(self) -> None:
        self.core.give_up_waiting("no engine", now=self.now)

    # what always holds

    @invariant()
    def holds(self) -> None:
        core = self.core
        self.absorb()
        counts = core.counts
        assert counts.submitted == sum(counts.groups.values())
        assert counts.outstanding == core.outstanding == len(core.groups)
        assert {g.seq for g in core.groups.values()}.isdisjoint(self.ended)
        assert core.last_seq == len(core.groups) + len(self.ended)
        assert core.in_flight == len(self.in_flight) <= core.policy.slots
        running = {(g.seq, g.attempt, row) for g in core.groups.values() for row in g.running}
        assert running == self.in_flight
        assert {(g.seq, g.attempt) for g in core.groups.values() if g.state is GroupState.SCORING} == self.scoring
        bound = core.policy.group.max_staleness
        held: dict[int, str] = {}
        for group in core.groups.values():
            assert (group.version is None) is (group.state is GroupState.PENDING)
            assert (group.lease_id is not None) is (group.state is GroupState.LEASED)
            if group.state in (GroupState.GENERATING, GroupState.SCORING, GroupState.READY):
                assert core.version - (group.version or 0) <= bound
            if group.state is GroupState.GENERATING:
                assert group.waiting or group.running, "no group that can never complete"
                assert group.finished or group.failed or group.running, "something of it was dispatched"
            if group.lease_id is not None:
                assert group.lease_id in core.leases
                held[group.seq] = group.lease_id
        for lease in core.leases.values():
            assert lease.state is LeaseState.LIVE
            assert lease.lease_id in held.values(), "a live lease holds something"

    def teardown(self) -> None:
        """Left alone and answered, every group reaches its end: none is stuck."""
        if not hasattr(self, "core"):
            return
        core = self.core
        for _ in range(10_000):
            if not core.groups:
                break
            core.resume()
            core.dispatch(now=self.now, capacity=100)
            self.absorb()
            for seq, attempt, row in sorted(self.in_flight):
                core.finish(seq, attempt, row, 1, now=self.now)
                self.in_flight.discard((seq, attempt, row))
            self.absorb()
            for key in sorted(self.scoring):
                core.scored(*key, None, now=self.now)
                self.scoring.discard(key)
            core.post_version(core.version + 1, now=self.now)  # what pacing holds back goes on
            lease = core.lease("last", max_groups=10, min_groups=1, lease_s=1, now=self.now)
            for held in [*core.leases.values()] if lease is None else [lease]:
                core.ack(held, [s for s in core._held(held)], core.groups.get, now=self.now)
            self.absorb()
        assert not core.groups, "every group ends"
        self.holds()


SchedulerMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestScheduler = SchedulerMachine.TestCase
