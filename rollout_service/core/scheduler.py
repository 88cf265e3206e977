"""Many groups at once: slots, the staleness bound, pacing, halts, leases, and what to dispatch next.

What always holds after every call: submitted = acked + stale + dropped + failed + outstanding; rollouts in flight are
those of the groups' `running` rows and never more than the slots; no generating, scoring or ready group is staler than
the bound; a group is held by at most one live lease. A call that raises has changed nothing. Time, ids and capacities
come in as arguments; nothing here waits, reads or writes. Changes and effects collect in `take_changes`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rollout_service.core import lifecycle, streaks
from rollout_service.core.changes import Bumped, Changes, Counts, Halt, Moved
from rollout_service.core.group import Checkpoint, Group, GroupPolicy, Lease, LeaseState, group_id
from rollout_service.core.lifecycle import Event, EventKind, IllegalEvent
from rollout_service.core.model import OUTSTANDING, DropReason, FailureReason, GroupState
from rollout_service.core.queues import ReadyQueue, SeqQueue
from rollout_service.core.records import RunState, Snapshot
from rollout_service.core.shared import SharedRun, Whole

S = GroupState
COVERED = frozenset({S.GENERATING, S.SCORING, S.READY})
"""States in which a group is held to the staleness bound; a leased one is the trainer's."""
HELD = frozenset({S.SCORING, S.READY})
"""States whose payloads count against `max_ready_bytes`."""


class Admission(StrEnum):
    """What bounds the opening of groups."""

    SLOTS = "slots"
    """Free slots only."""
    PACE = "pace"
    """Also `(max_staleness + 1) * groups_per_step` opened groups (design 3.1.8)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The rules of the run, from `[groups]`, `[dispatch]` and `[store]`."""

    group: GroupPolicy = field(default_factory=GroupPolicy)
    slots: int = 128
    max_ready_groups: int = 64
    max_ready_bytes: int = 2**30
    max_pending_groups: int = 10_000
    max_lease_bytes: int = 2**28
    admission: Admission = Admission.SLOTS
    groups_per_step: int = 0
    wait_for_version: int = 0
    halt_after_failed_groups: int = 1
    halt_after_unproductive_groups: int = 32

    @property
    def pace_bound(self) -> int | None:
        """Most groups opened at once; None where pacing is off."""
        if self.admission is not Admission.PACE:
            return None
        return (self.group.max_staleness + 1) * self.groups_per_step

    @property
    def halts(self) -> streaks.HaltRules:
        return streaks.HaltRules(failed=self.halt_after_failed_groups, unproductive=self.halt_after_unproductive_groups)


class Blocked(StrEnum):
    """Why no new group is opened now."""

    PAUSED = "paused"
    HALTED = "halted"
    VERSION = "wait_for_version"
    READY_GROUPS = "max_ready_groups"
    READY_BYTES = "max_ready_bytes"
    PACE = "pace"


class VersionTooLow(Exception):
    """The posted version is below the current one; nothing was changed."""

    def __init__(self, version: int, current: int) -> None:
        super().__init__(f"version {version} is below the current version {current}")
        self.version, self.current = version, current


class Scheduler:
    """The state of a run in memory: outstanding groups and live leases; ended ones are the store's."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.groups: dict[int, Group] = {}
        self.leases: dict[str, Lease] = {}
        self._expiries: list[tuple[float, str]] = []
        """Heap of (expires_at, lease_id); entries of leases that ended or were renewed are passed over."""
        self.version = 0
        self.paused = False
        self.final = False
        self.halt: Halt | None = None
        self.last_seq = 0
        self.ends = 0
        self.checkpoints: dict[str, Checkpoint] = {}
        self.in_flight = 0
        self._counts: dict[S, int] = dict.fromkeys(S, 0)
        self._front = SeqQueue()
        self._back = SeqQueue()
        self._open = SeqQueue()
        self._ready = ReadyQueue()
        self._held_bytes = 0
        """Payload bytes of groups in scoring and ready."""
        self._by_version: dict[int, set[int]] = {}
        self._paced: set[int] = set()
        self.streak = streaks.Streak()
        self._changes = Changes()

    # reading

    @property
    def counts(self) -> Counts:
        return Counts(submitted=self.last_seq, groups=dict(self._counts))

    @property
    def outstanding(self) -> int:
        return sum(self._counts[state] for state in OUTSTANDING)

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def pending(self) -> int:
        return self._counts[S.PENDING]

    @property
    def stopped(self) -> bool:
        """No new engine request may be made, first or further."""
        return self.paused or self.halt is not None

    @property
    def exhausted(self) -> bool:
        """No more prompts will come and nothing is outstanding."""
        return self.final and not self.outstanding

    def blocked(self) -> Blocked | None:
        """Why no new group may be opened now; None where only free slots decide."""
        policy, counts = self.policy, self._counts
        if self.paused:
            return Blocked.PAUSED
        if self.halt is not None:
            return Blocked.HALTED
        if self.version < policy.wait_for_version:
            return Blocked.VERSION
        if counts[S.READY] + counts[S.SCORING] >= policy.max_ready_groups:
            return Blocked.READY_GROUPS
        if self._held_bytes >= policy.max_ready_bytes:
            return Blocked.READY_BYTES
        bound = policy.pace_bound
        if bound is not None and self._opened() >= bound:
            return Blocked.PACE
        return None

    def _opened(self) -> int:
        """Groups that count against the pace: leased ones until the next version, acked or not (design 3.1.8).

        Counting an acked one no longer would open groups at a version that the trainer is about to leave: the last of
        them would be one version too old when its turn comes.
        """
        counts = self._counts
        return counts[S.GENERATING] + counts[S.SCORING] + counts[S.READY] + len(self._paced)

    def more_can_come(self) -> bool:
        """Whether waiting could make another group ready without anybody acking or releasing one."""
        counts = self._counts
        if counts[S.GENERATING] or counts[S.SCORING]:
            return True
        if counts[S.PENDING]:
            return self.blocked() not in (Blocked.READY_BYTES, Blocked.READY_GROUPS, Blocked.HALTED)
        return not self.final

    def run_state(self, before: RunState) -> RunState:
        """The run's row: this scheduler's part of it put into `before`."""
        ended = {state: self._counts[state] for state in S if state.terminal}
        return replace(
            before,
            policy_version=self.version,
            paused=self.paused,
            final=self.final,
            last_seq=self.last_seq,
            ended=ended,
            ends=self.ends,
        )

    def take_changes(self) -> Changes:
        changes, self._changes = self._changes, Changes()
        return changes

    # prompts

    def load(self, snapshot: Snapshot, *, now: float) -> None:
        """Take over a stored run; unfinished rows count as not dispatched, scoring starts again."""
        self._counts.update(snapshot.run.ended)
        self._take(snapshot)
        for group in snapshot.groups:
            lease = self.leases.get(group.lease_id or "")
            if lease is not None and lease.policy_version == self.version:
                self._count_against_pace(group.seq)
        self.recover(now=now)

    def load_part(self, shared: SharedRun, whole: Whole, part: Snapshot, *, paced: Iterable[int] = ()) -> None:
        """Take over a part of a run that others work on too, as it stands; `part.run` is not looked at.

        `whole` counts the part as well; `paced`: the groups that count against the pace though they are leased or
        acked. Ends are numbered by the store.
        """
        self._take(replace(part, run=shared.run))
        self._counts = {state: whole.counts.get(state, 0) for state in S}
        self._held_bytes = whole.held_bytes
        self._paced = set(paced)
        self.halt, self.streak = shared.halt, shared.streak

    def _take(self, snapshot: Snapshot) -> None:
        run = snapshot.run
        self.version, self.paused, self.final, self.last_seq = run.policy_version, run.paused, run.final, run.last_seq
        self.ends = run.ends
        self.leases = {lease.lease_id: lease for lease in snapshot.leases}
        self._expiries = sorted((lease.expires_at, lease.lease_id) for lease in snapshot.leases)
        self.checkpoints = {checkpoint.name: checkpoint for checkpoint in snapshot.checkpoints}
        for group in snapshot.groups:
            self._enter(group)

    def recover(self, *, now: float) -> None:
        """Nobody works for the groups held here: unfinished rows count as not dispatched, scoring starts again."""
        for group in list(self.groups.values()):
            if group.state is S.GENERATING:
                self._apply(group, lifecycle.Recovered(), now)
            elif group.state is S.SCORING:
                self._changes.effects.append(lifecycle.StartScoring(group=group))
        self._sweep(now)

    def adopt(self, groups: Iterable[Group], *, now: float) -> None:
        """Hold groups that were opened elsewhere, to work for them; a version posted since may outdate them."""
        for group in groups:
            self._enter(group)
        self._sweep(now)

    def lose(self, seqs: Iterable[int]) -> list[Group]:
        """Hold these no longer; they are somebody else's now. Those that were held."""
        lost = [self.groups[seq] for seq in seqs if seq in self.groups]
        for group in lost:
            self._leave(group)
            del self.groups[group.seq]
        return lost

    def follow(self, shared: SharedRun, *, now: float) -> Bumped:
        """Take over what somebody else made of the run. Groups that a reset took back must be lost before."""
        previous, in_flight = self.version, self.in_flight
        run = shared.run
        self.version, self.paused, self.halt, self.final = run.policy_version, run.paused, shared.halt, run.final
        stale = self._sweep(now) if self.version > previous else 0
        return Bumped(
            version=self.version,
            previous=previous,
            stale_groups=stale,
            aborted_rollouts=in_flight - self.in_flight,
        )

    def submit(self, groups: Iterable[Group]) -> None:
        """Take new groups, numbered from `last_seq` + 1 on."""
        for group in groups:
            if group.seq != self.last_seq + 1 or group.state is not S.PENDING:
                raise ValueError(f"group {group.seq} is not the next new one after {self.last_seq}")
            self.last_seq = group.seq
            self._enter(group)
            self._changes.groups[group.seq] = group
        self._changes.run = True

    def finish_input(self) -> None:
        """No more prompts will come."""
        self.final = True
        self._changes.run = True

    def reopen_input(self) -> None:
        """The prompts file has more to give than when the input was declared final."""
        self.final = False
        self._changes.run = True

    # policy versions

    def post_version(
        self, version: int, *, now: float, reset: bool = False, unsent: Iterable[tuple[int, int]] = ()
    ) -> Bumped:
        """Rules 3.1.2 and 3.1.7. Raises VersionTooLow, with nothing changed.

        `unsent`: (seq, attempt) of groups opened so recently that no request has left. They were not dispatched, so
        that a bump costs them nothing: they are opened anew at the new version.
        """
        previous = self.version
        if version < previous and not reset:
            raise VersionTooLow(version, previous)
        if version != previous:
            self._unopen(unsent, now)
        in_flight = self.in_flight
        stale = 0
        if version != previous:
            self.version = version
            self._paced.clear()
            self._changes.run = True
            if version < previous:
                self._reset(now)
            else:
                stale = self._sweep(now)
        return Bumped(
            version=version, previous=previous, stale_groups=stale, aborted_rollouts=in_flight - self.in_flight
        )

    def _unopen(self, unsent: Iterable[tuple[int, int]], now: float) -> None:
        for seq, attempt in sorted(unsent):
            group = self.groups.get(seq)
            if group is not None and group.attempt == attempt and group.state is S.GENERATING:
                self._apply(group, lifecycle.Recovered(), now)

    def _sweep(self, now: float) -> int:
        """Outdate every covered group beyond the bound; how many there were."""
        oldest_good = self.version - self.policy.group.max_staleness
        stale = sorted(
            seq for version in self._by_version if version < oldest_good for seq in self._by_version[version]
        )
        for seq in stale:
            self._apply(self.groups[seq], lifecycle.Outdated(version=self.version), now)
        return len(stale)

    def _reset(self, now: float) -> None:
        for lease in list(self.leases.values()):
            self._end_lease(lease, LeaseState.VOID)
        for group in [self.groups[seq] for seq in sorted(self.groups)]:
            if group.state is not S.PENDING:
                self._apply(group, lifecycle.Reset(), now)

    # checkpoints

    def mark(self, name: str, *, now: float) -> Checkpoint:
        """Remember this point. Asking again for a name while nothing has ended since gives the same point."""
        known = self.checkpoints.get(name)
        if known is not None:
            if (known.policy_version, known.ends) == (self.version, self.ends):
                return known
            raise NameTaken(known)
        number = 1 + max((checkpoint.number for checkpoint in self.checkpoints.values()), default=0)
        checkpoint = Checkpoint(name=name, number=number, policy_version=self.version, ends=self.ends, created_at=now)
        self.checkpoints[name] = self._changes.checkpoints[name] = checkpoint
        return checkpoint

    def forget(self, name: str) -> bool:
        """Let a point go; whether there was one."""
        known = self.checkpoints.pop(name, None)
        if known is not None:
            self._changes.checkpoints.pop(name, None)
            self._changes.forgotten.add(name)
        return known is not None

    def rewind(
        self,
        checkpoint: Checkpoint,
        ended: Sequence[Group],
        *,
        now: float,
        unsent: Iterable[tuple[int, int]] = (),
    ) -> Bumped:
        """Go back to `checkpoint`: as a reset to its version, and the groups that `ended` since are pending again.

        `ended`: every group whose end number is above the checkpoint's. Later checkpoints are removed.
        """
        if len(ended) != len({g.seq for g in ended}) or any((g.end_number or 0) <= checkpoint.ends for g in ended):
            raise ValueError("only groups that ended after the checkpoint are opened again, each once")
        self._unopen(unsent, now)
        previous, in_flight = self.version, self.in_flight
        self.version = checkpoint.policy_version
        self._paced.clear()
        self._changes.run = True
        self._reset(now)
        for group in ended:
            self._apply(group, lifecycle.Rewound(), now)
        for other in list(self.checkpoints.values()):
            if other.number > checkpoint.number:
                self.forget(other.name)
        return Bumped(
            version=self.version,
            previous=previous,
            stale_groups=0,
            aborted_rollouts=in_flight - self.in_flight,
        )

    # dispatch

    def dispatch(self, *, now: float, capacity: int) -> None:
        """Fill the free slots, at most `capacity` rollouts in flight over all healthy engines.

        Rows of open groups come first, oldest group first, so that groups close; then new groups, those on a later
        attempt before the others.
        """
        free = min(self.policy.slots, capacity) - self.in_flight
        while free > 0 and (seq := self._next()) is not None:
            group = self.groups[seq]
            rows = group.waiting[:free]
            free -= len(rows)
            self._apply(group, lifecycle.Dispatched(rows=rows, version=self.version), now)

    @property
    def wants_engine(self) -> bool:
        """Whether a rollout could be dispatched now if an engine and a slot were free."""
        return self._next() is not None

    def _next(self) -> int | None:
        """The group whose rows go next; None where there is none or it may not be opened."""
        if self.stopped:
            return None
        seq = self._open.first()
        if seq is None:
            seq = self._front.first() if len(self._front) else self._back.first()
            if seq is None or self.blocked() is not None:
                return None
        return seq

    def give_up_waiting(
        self, error: str, engine: str | None = None, *, now: float
    ) -> tuple[Group, tuple[int, ...]] | None:
        """No engine was healthy for as long as rollouts may wait: fail the next group that would be dispatched.

        One group and not all of them, so that the halt that follows costs one prompt; nothing while stopped. Returns
        the group as it was opened and those of its rows that failed.
        """
        seq = self._next()
        if seq is None:
            return None
        group = self.groups[seq]
        rows = group.waiting
        effects = self._changes.effects
        mark = len(effects)
        opened = self._apply(group, lifecycle.Dispatched(rows=rows, version=self.version), now)
        effects[mark:] = [effect for effect in effects[mark:] if not isinstance(effect, lifecycle.StartRollouts)]
        for row in rows:
            self.fail(seq, opened.attempt, row, FailureReason.ENGINE_UNAVAILABLE, error, engine, now=now)
        return opened, rows

    # rollouts and scoring: late and duplicate ones are no-ops that answer False

    def finish(self, seq: int, attempt: int, index: int, payload_bytes: int, *, now: float) -> bool:
        """A rollout survived; whether it counted."""
        event = lifecycle.Finished(attempt=attempt, index=index, payload_bytes=payload_bytes)
        return self._try(seq, event, now)

    def fail(
        self, seq: int, attempt: int, index: int, reason: FailureReason, error: str, engine: str | None, *, now: float
    ) -> bool:
        """A rollout failed; whether it counted."""
        event = lifecycle.RolloutFailed(attempt=attempt, index=index, reason=reason, error=error, engine=engine)
        return self._try(seq, event, now)

    def scored(self, seq: int, attempt: int, drop: DropReason | None, error: str | None = None, *, now: float) -> bool:
        """Scoring ended; whether it counted."""
        return self._try(seq, lifecycle.Scored(attempt=attempt, drop=drop, error=error), now)

    def _try(self, seq: int, event: Event, now: float) -> bool:
        group = self.groups.get(seq)
        if group is None:
            return False
        try:
            self._apply(group, event, now)
        except IllegalEvent:
            return False
        return True

    # leases

    def lease(
        self,
        lease_id: str,
        *,
        max_groups: int,
        min_groups: int,
        lease_s: int,
        now: float,
        request_id: str | None = None,
        consumer: str | None = None,
    ) -> Lease | None:
        """Lease what is ready, oldest version first; None, and no lease, where that is not enough."""
        enough = min_groups if self.halt is None and self.more_can_come() else 1
        if len(self._ready) < max(enough, 1):
            if self.stuck_by_pace:
                self._paced.intersection_update(self.groups)
            return None
        seqs = self._ready.take(max_groups=max_groups, max_bytes=self.policy.max_lease_bytes)
        lease = Lease(
            lease_id=lease_id,
            request_id=request_id,
            consumer=consumer,
            max_groups=max_groups,
            min_groups=min_groups,
            lease_s=lease_s,
            policy_version=self.version,
            created_at=now,
            expires_at=now + lease_s,
            groups=tuple((seq, self.groups[seq].attempt) for seq in seqs),
        )
        for seq in seqs:
            self._apply(self.groups[seq], lifecycle.Leased(lease_id=lease_id), now)
            self._count_against_pace(seq)
        self._hold(lease)
        return lease

    def _hold(self, lease: Lease) -> None:
        self.leases[lease.lease_id] = self._changes.leases[lease.lease_id] = lease
        if len(self._expiries) > 64 + 2 * len(self.leases):  # most of it is of leases that ended long before their time
            self._expiries = sorted((live.expires_at, live.lease_id) for live in self.leases.values())
        else:
            heapq.heappush(self._expiries, (lease.expires_at, lease.lease_id))

    def _count_against_pace(self, seq: int) -> None:
        if self.policy.pace_bound is not None:  # else the set would only grow
            self._paced.add(seq)

    @property
    def stuck_by_pace(self) -> bool:
        """Nothing is on its way, and only the pace keeps groups from being opened.

        A trainer that asks for more within one version than the pace foresees must not wait for ever: groups it has
        acked count no longer then.
        """
        counts = self._counts
        return not counts[S.GENERATING] and not counts[S.SCORING] and self.blocked() is Blocked.PACE

    def ack(self, lease: Lease, seqs: Sequence[int], find: Callable[[int], Group | None], *, now: float) -> list[int]:
        """Rule 4.3: all of `seqs` or nothing. Returns those that were acked by this call.

        `find` gives the standing of any group, ended ones included. Raises NotHeld for the first that may not be acked.
        """
        doing: list[Group] = []
        for seq in dict.fromkeys(seqs):
            group, attempt = find(seq), lease.attempt_of(seq)
            if group is None:
                raise NotHeld(seq, None)
            if lease.state is LeaseState.VOID or attempt is None:
                raise NotHeld(seq, group)
            if group.state is S.ACKED and group.acked_by == lease.lease_id:
                continue
            if group.attempt != attempt or group.state not in (S.READY, S.LEASED):
                raise NotHeld(seq, group)
            if group.state is S.LEASED and group.lease_id != lease.lease_id:
                raise NotHeld(seq, group)
            doing.append(group)
        for group in doing:
            self._apply(group, lifecycle.Acked(lease_id=lease.lease_id, attempt=group.attempt), now)
        self._close_lease_if_empty(lease.lease_id)
        return [group.seq for group in doing]

    def release(self, lease_id: str, seqs: Sequence[int] | None, *, now: float) -> list[int]:
        """Give groups of a live lease back (None: all it still holds); those that were held and are not any more."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return []
        wanted = None if seqs is None else set(seqs)
        held = [seq for seq in self._held(lease) if wanted is None or seq in wanted]
        for seq in held:
            self._give_back(self.groups[seq], lease_id, now)
        self._close_lease_if_empty(lease_id)
        return held

    def renew(self, lease_id: str, lease_s: int, *, now: float) -> Lease | None:
        """Extend a live lease to `now + lease_s`, never shorten it; None where it lives no more."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return None
        lease = replace(lease, expires_at=max(lease.expires_at, now + lease_s))
        self._hold(lease)
        return lease

    def expire(self, *, now: float) -> None:
        """End every lease whose time is over."""
        while (due := self.next_expiry()) is not None and due <= now:
            _, lease_id = heapq.heappop(self._expiries)
            self.release(lease_id, None, now=now)

    def next_expiry(self) -> float | None:
        """Unix seconds of the next moment `expire` has something to do."""
        while self._expiries:
            expires_at, lease_id = self._expiries[0]
            lease = self.leases.get(lease_id)
            if lease is not None and lease.expires_at == expires_at:
                return expires_at
            heapq.heappop(self._expiries)
        return None

    def _held(self, lease: Lease) -> list[int]:
        held = []
        for seq, _ in lease.groups:
            group = self.groups.get(seq)
            if group is not None and group.lease_id == lease.lease_id:
                held.append(seq)
        return held

    def _give_back(self, group: Group, lease_id: str, now: float) -> None:
        """Back to ready, and from there to where its age sends it (design 3.1.9)."""
        group = self._apply(group, lifecycle.Returned(lease_id=lease_id), now)
        self._paced.discard(group.seq)
        staleness = group.staleness(self.version)
        if staleness is not None and staleness > self.policy.group.max_staleness:
            self._apply(group, lifecycle.Outdated(version=self.version), now)

    def _close_lease_if_empty(self, lease_id: str) -> None:
        lease = self.leases.get(lease_id)
        if lease is not None and not self._held(lease):
            self._end_lease(lease, LeaseState.ENDED)

    def _end_lease(self, lease: Lease, state: LeaseState) -> None:
        del self.leases[lease.lease_id]
        self._changes.leases[lease.lease_id] = replace(lease, state=state)

    # operators

    def cancel(self, seq: int, *, now: float) -> bool:
        """Drop an outstanding group; whether there was one."""
        group = self.groups.get(seq)
        if group is None:
            return False
        self._apply(group, lifecycle.Cancelled(), now)
        self._paced.discard(seq)
        if group.lease_id is not None:
            self._close_lease_if_empty(group.lease_id)
        return True

    def pause(self) -> None:
        self.paused = True
        self._changes.run = True

    def resume(self) -> None:
        """Clear a pause and a halt, and what counted towards the next halt."""
        self.paused, self.halt = False, None
        self.streak = streaks.Streak()
        self._changes.run = True

    # the one place that moves a group

    def _apply(self, group: Group, event: Event, now: float) -> Group:
        after, effects = lifecycle.apply(group, event, policy=self.policy.group, now=now)
        if after.state.terminal:
            self.ends += 1
            after = replace(after, end_number=self.ends)
        self._leave(group)
        self._enter(after)
        changes = self._changes
        changes.effects.extend(effects)
        if after.state is not group.state or after.attempt != group.attempt:
            changes.groups[after.seq] = after
            changes.effects.append(Moved(before=group, after=after, kind=lifecycle.KIND_OF[type(event)]))
            if after.attempt != group.attempt:
                changes.new_attempts.add(after.seq)
            if after.state.terminal:
                changes.ended.add(after.seq)
                changes.run = True
            self._watch(after, lifecycle.KIND_OF[type(event)], now)
        return after

    def _enter(self, group: Group) -> None:
        """Index `group` by where it stands."""
        seq, state = group.seq, group.state
        self._counts[state] += 1
        if state not in OUTSTANDING:
            self.groups.pop(seq, None)
            return
        self.groups[seq] = group
        self.in_flight += len(group.running)
        if state is S.PENDING:
            (self._front if group.attempt > 1 else self._back).add(seq)
        elif state is S.GENERATING and group.waiting:
            self._open.add(seq)
        elif state is S.READY:
            self._ready.add(seq, version=_version(group), payload_bytes=group.payload_bytes)
        if state in HELD:
            self._held_bytes += group.payload_bytes
        if state in COVERED:
            self._by_version.setdefault(_version(group), set()).add(seq)

    def _leave(self, group: Group) -> None:
        """Undo `_enter`."""
        seq, state = group.seq, group.state
        self._counts[state] -= 1
        if state not in OUTSTANDING:
            return
        self.in_flight -= len(group.running)
        if state is S.PENDING:
            (self._front if group.attempt > 1 else self._back).discard(seq)
        elif state is S.GENERATING:
            self._open.discard(seq)
        elif state is S.READY:
            self._ready.discard(seq)
        if state in HELD:
            self._held_bytes -= group.payload_bytes
        if state in COVERED:
            members = self._by_version[_version(group)]
            members.discard(seq)
            if not members:
                del self._by_version[_version(group)]

    def _watch(self, group: Group, kind: EventKind, now: float) -> None:
        """Count groups that went wrong in a row, and halt (design 3.2.3)."""
        if not streaks.counts(group, kind):
            return
        self.streak = streaks.after(self.streak, group)
        if self.halt is None and group.state is not S.READY:
            self.halt = streaks.halt_of(self.streak, group, self.policy.halts, now=now)
            if self.halt is not None:
                self._changes.effects.append(self.halt)


class NameTaken(Exception):
    """A checkpoint of that name stands for another point; nothing was changed."""

    def __init__(self, known: Checkpoint) -> None:
        super().__init__(f"checkpoint {known.name!r} stands for version {known.policy_version} and {known.ends} ends")
        self.known = known


class NotHeld(Exception):
    """A group may not be acked under this lease; nothing of the call was done. `group` None: no such group."""

    def __init__(self, seq: int, group: Group | None) -> None:
        state = "unknown" if group is None else f"{group.state}, attempt {group.attempt}"
        super().__init__(f"{group_id(seq)} is {state}")
        self.seq, self.group = seq, group


def _version(group: Group) -> int:
    if group.version is None:
        raise AssertionError(f"{group.group_id} is {group.state} without a version")
    return group.version
