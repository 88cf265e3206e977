"""The life of one group: ONE table of legal transitions, and `apply`, the only code that moves a group.

What always holds: `apply` returns a new group or raises `IllegalEvent` and has changed nothing; the state it returns is
one the table allows for that event; effects are returned, never carried out. An event about a rollout must carry the
group's current attempt and name a row that is in flight: late and duplicate completions are therefore illegal events,
which the scheduler turns into no-ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

from rollout_service.core.group import Group, GroupPolicy, OnStale
from rollout_service.core.model import DropReason, FailureReason
from rollout_service.core.model import GroupState as S


class EventKind(StrEnum):
    """What can happen to a group."""

    DISPATCHED = "dispatched"
    """Rows were given to engines."""
    FINISHED = "finished"
    """One rollout survived."""
    ROLLOUT_FAILED = "rollout_failed"
    """One rollout failed after all its attempts."""
    SCORED = "scored"
    """Rewards are there."""
    LEASED = "leased"
    """Handed to a consumer."""
    RETURNED = "returned"
    """Came back by release or expiry."""
    ACKED = "acked"
    """The trainer has it for good."""
    OUTDATED = "outdated"
    """A new version made it too old."""
    CANCELLED = "cancelled"
    """An operator cancelled it."""
    RESET = "reset"
    """The trainer went back to a lower version."""
    REWOUND = "rewound"
    """The trainer went back to a mark from before it ended."""
    RECOVERED = "recovered"
    """What was decided to be in flight is not: the service started again, or a bump came before anything was sent."""


TRANSITIONS: Mapping[tuple[S, EventKind], frozenset[S]] = {
    (S.PENDING, EventKind.DISPATCHED): frozenset({S.GENERATING}),
    (S.PENDING, EventKind.CANCELLED): frozenset({S.DROPPED}),
    (S.GENERATING, EventKind.DISPATCHED): frozenset({S.GENERATING}),
    (S.GENERATING, EventKind.FINISHED): frozenset({S.GENERATING, S.SCORING, S.DROPPED}),
    (S.GENERATING, EventKind.ROLLOUT_FAILED): frozenset({S.GENERATING, S.SCORING, S.DROPPED, S.FAILED}),
    (S.GENERATING, EventKind.OUTDATED): frozenset({S.PENDING, S.STALE}),
    (S.GENERATING, EventKind.CANCELLED): frozenset({S.DROPPED}),
    (S.GENERATING, EventKind.RESET): frozenset({S.PENDING}),
    (S.GENERATING, EventKind.RECOVERED): frozenset({S.PENDING, S.GENERATING, S.SCORING, S.DROPPED, S.FAILED}),
    (S.SCORING, EventKind.SCORED): frozenset({S.READY, S.DROPPED}),
    (S.SCORING, EventKind.OUTDATED): frozenset({S.PENDING, S.STALE}),
    (S.SCORING, EventKind.CANCELLED): frozenset({S.DROPPED}),
    (S.SCORING, EventKind.RESET): frozenset({S.PENDING}),
    (S.READY, EventKind.LEASED): frozenset({S.LEASED}),
    (S.READY, EventKind.ACKED): frozenset({S.ACKED}),
    (S.READY, EventKind.OUTDATED): frozenset({S.PENDING, S.STALE}),
    (S.READY, EventKind.CANCELLED): frozenset({S.DROPPED}),
    (S.READY, EventKind.RESET): frozenset({S.PENDING}),
    (S.LEASED, EventKind.ACKED): frozenset({S.ACKED}),
    (S.LEASED, EventKind.RETURNED): frozenset({S.READY}),
    (S.LEASED, EventKind.CANCELLED): frozenset({S.DROPPED}),
    (S.LEASED, EventKind.RESET): frozenset({S.PENDING}),
    (S.ACKED, EventKind.REWOUND): frozenset({S.PENDING}),
    (S.STALE, EventKind.REWOUND): frozenset({S.PENDING}),
    (S.DROPPED, EventKind.REWOUND): frozenset({S.PENDING}),
    (S.FAILED, EventKind.REWOUND): frozenset({S.PENDING}),
}


class IllegalEvent(Exception):
    """The event has no meaning in the group's state; nothing was changed."""

    def __init__(self, group: Group, kind: EventKind, why: str = "") -> None:
        super().__init__(f"{kind} is no event for {group.group_id} in {group.state}{f': {why}' if why else ''}")
        self.group, self.kind = group, kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatched:
    """`rows` (a prefix of the waiting ones) go to engines while `version` is current."""

    rows: tuple[int, ...]
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """Row `index` survived; its payload takes `payload_bytes`."""

    attempt: int
    index: int
    payload_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutFailed:
    """Row `index` is left out."""

    attempt: int
    index: int
    reason: FailureReason
    error: str
    engine: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Scoring ended; `drop` names why the group may not be delivered, None if it may."""

    attempt: int
    drop: DropReason | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Leased:
    lease_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Returned:
    lease_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Acked:
    """Under `lease_id`, which was made with `attempt`."""

    lease_id: str
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outdated:
    """`version` is current now."""

    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancelled:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Reset:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewound:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    pass


Event = (
    Dispatched
    | Finished
    | RolloutFailed
    | Scored
    | Leased
    | Returned
    | Acked
    | Outdated
    | Cancelled
    | Reset
    | Rewound
    | Recovered
)

KIND_OF: Mapping[type, EventKind] = {
    Dispatched: EventKind.DISPATCHED,
    Finished: EventKind.FINISHED,
    RolloutFailed: EventKind.ROLLOUT_FAILED,
    Scored: EventKind.SCORED,
    Leased: EventKind.LEASED,
    Returned: EventKind.RETURNED,
    Acked: EventKind.ACKED,
    Outdated: EventKind.OUTDATED,
    Cancelled: EventKind.CANCELLED,
    Reset: EventKind.RESET,
    Rewound: EventKind.REWOUND,
    Recovered: EventKind.RECOVERED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRollouts:
    """Send these rows to engines. `first`: the attempt's opening, which waits for its own commit (design 4.4)."""

    group: Group
    rows: tuple[int, ...]
    first: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRollouts:
    """Abort these rows of `group.attempt` at the engines; their slots are free."""

    group: Group
    rows: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartScoring:
    group: Group


@dataclass(frozen=True, kw_only=True, slots=True)
class StopScoring:
    group: Group


Effect = StartRollouts | StopRollouts | StartScoring | StopScoring


def apply(group: Group, event: Event, *, policy: GroupPolicy, now: float) -> tuple[Group, tuple[Effect, ...]]:
    """The group after `event`, and what must be done about it outside.

    Raises IllegalEvent, with nothing changed, where the table has no such transition, where a row or attempt named by
    the event is not the current one, or where a lease is not the holder.
    """
    kind = KIND_OF[type(event)]
    allowed = TRANSITIONS.get((group.state, kind))
    if allowed is None:
        raise IllegalEvent(group, kind)
    after, effects = _move(group, event, policy)
    if after.state not in allowed:
        raise IllegalEvent(group, kind, f"it may not lead to {after.state}")
    if after.state is not group.state:
        after = replace(after, changed_at=now)
    return after, effects


def _move(group: Group, event: Event, policy: GroupPolicy) -> tuple[Group, tuple[Effect, ...]]:
    match event:
        case Dispatched():
            return _dispatched(group, event)
        case Finished():
            _check_running(group, event.attempt, event.index, EventKind.FINISHED)
            group = replace(
                group,
                running=group.running - {event.index},
                finished=group.finished | {event.index},
                payload_bytes=group.payload_bytes + event.payload_bytes,
            )
            return _settle(group, policy)
        case RolloutFailed():
            return _rollout_failed(group, event, policy)
        case Scored():
            if event.attempt != group.attempt:
                raise IllegalEvent(group, EventKind.SCORED, f"attempt {event.attempt} is over")
            if event.drop is None:
                return replace(group, state=S.READY), ()
            return replace(group, state=S.DROPPED, reason=event.drop, error=event.error or group.error), ()
        case Leased():
            return replace(group, state=S.LEASED, lease_id=event.lease_id), ()
        case Returned():
            if event.lease_id != group.lease_id:
                raise IllegalEvent(group, EventKind.RETURNED, f"held by {group.lease_id}")
            return replace(group, state=S.READY, lease_id=None), ()
        case Acked():
            if event.attempt != group.attempt or group.lease_id not in (None, event.lease_id):
                raise IllegalEvent(group, EventKind.ACKED, f"held by {group.lease_id}, attempt {group.attempt}")
            return replace(group, state=S.ACKED, lease_id=None, acked_by=event.lease_id), ()
        case Outdated():
            return _outdated(group, event, policy)
        case Cancelled():
            stopped = replace(_stopped(group), state=S.DROPPED, reason=DropReason.CANCELLED, lease_id=None)
            return stopped, _stops(group)
        case Reset():
            return _again(group, rows=tuple(range(group.num_generations))), _stops(group)
        case Rewound():
            return replace(_again(group, rows=tuple(range(group.num_generations))), tries=1), ()
        case Recovered():
            return _settle(_recovered(group), policy)
        case _:
            assert_never(event)


def _dispatched(group: Group, event: Dispatched) -> tuple[Group, tuple[Effect, ...]]:
    if not event.rows or group.waiting[: len(event.rows)] != event.rows:
        raise IllegalEvent(group, EventKind.DISPATCHED, f"rows {event.rows} are not next")
    first = group.state is S.PENDING
    after = replace(
        group,
        state=S.GENERATING,
        version=event.version if first else group.version,
        waiting=group.waiting[len(event.rows) :],
        running=group.running | frozenset(event.rows),
    )
    return after, (StartRollouts(group=after, rows=event.rows, first=first),)


def _rollout_failed(group: Group, event: RolloutFailed, policy: GroupPolicy) -> tuple[Group, tuple[Effect, ...]]:
    _check_running(group, event.attempt, event.index, EventKind.ROLLOUT_FAILED)
    group = replace(
        group,
        running=group.running - {event.index},
        failed=group.failed | {event.index},
        error=event.error,
        engine=event.engine or group.engine,
    )
    if event.reason is FailureReason.PROMPT_TOO_LONG:  # no row of this prompt can fit: the others need not be tried
        return replace(_stopped(group), state=S.DROPPED, reason=DropReason.PROMPT_TOO_LONG), _stops(group)
    return _settle(group, policy)


def _check_running(group: Group, attempt: int, index: int, kind: EventKind) -> None:
    if attempt != group.attempt:
        raise IllegalEvent(group, kind, f"attempt {attempt} is over")
    if index not in group.running:
        raise IllegalEvent(group, kind, f"row {index} is not in flight")


def _settle(group: Group, policy: GroupPolicy) -> tuple[Group, tuple[Effect, ...]]:
    """Where a group goes when a row of it was settled: nowhere, until all of them are (design 3.2.1 to 3.2.3)."""
    if group.waiting or group.running:
        return group, ()
    if not group.finished:
        return replace(group, state=S.FAILED), ()
    if len(group.finished) < policy.min_group_size:
        return replace(group, state=S.DROPPED, reason=DropReason.TOO_FEW_SURVIVORS), ()
    group = replace(group, state=S.SCORING)
    return group, (StartScoring(group=group),)


def _outdated(group: Group, event: Outdated, policy: GroupPolicy) -> tuple[Group, tuple[Effect, ...]]:
    """Rules 3.1.2 to 3.1.4: what was dispatched is gone, the rest goes on if it can still make a group."""
    if group.version is None or event.version - group.version <= policy.max_staleness:
        raise IllegalEvent(group, EventKind.OUTDATED, f"version {group.version} is good at {event.version}")
    why = f"version {group.version} was too old at version {event.version}, max_staleness {policy.max_staleness}"
    stops, group = _stops(group), replace(group, error=why, engine=None)
    if policy.on_stale is OnStale.REQUEUE:
        if group.tries < policy.max_group_attempts:
            again = _again(group, rows=tuple(range(group.num_generations)))
            return replace(again, tries=group.tries + 1), stops
    elif group.waiting and len(group.waiting) >= policy.min_group_size:
        return _again(group, rows=group.waiting), stops
    return replace(_stopped(group), state=S.STALE), stops


def _again(group: Group, *, rows: tuple[int, ...]) -> Group:
    """The next attempt: a new fencing token, so that nothing of the old one can settle it."""
    return replace(
        group,
        state=S.PENDING,
        attempt=group.attempt + 1,
        version=None,
        waiting=rows,
        running=frozenset(),
        finished=frozenset(),
        failed=frozenset(),
        payload_bytes=0,
        reason=None,
        lease_id=None,
        acked_by=None,
        end_number=None,
    )


def _recovered(group: Group) -> Group:
    """Unfinished rows count as not dispatched (design 4.4); with no row settled, nothing was."""
    waiting = tuple(sorted((*group.waiting, *group.running)))
    if not group.finished and not group.failed:
        return replace(group, state=S.PENDING, version=None, waiting=waiting, running=frozenset())
    return replace(group, waiting=waiting, running=frozenset())


def _stopped(group: Group) -> Group:
    """The same group with nothing in flight and nothing to come."""
    return replace(group, waiting=(), running=frozenset())


def _stops(group: Group) -> tuple[Effect, ...]:
    if group.running:
        return (StopRollouts(group=group, rows=group.running),)
    return (StopScoring(group=group),) if group.state is S.SCORING else ()
