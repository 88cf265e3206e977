"""A part of the run in the pure core, inside one transaction.

What always holds: a decision about what several replicas share is made by the same core that decides for a run alone,
from rows that are locked, and is written by the transaction that read them; whoever it concerns hears of it after the
commit. No rule of a group's life stands here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rollout_service.core import streaks
from rollout_service.core.changes import Changes, Halt, Moved
from rollout_service.core.group import Checkpoint, Group, Lease, LeaseState
from rollout_service.core.model import OUTSTANDING
from rollout_service.core.records import Batch, RunState, Snapshot
from rollout_service.core.scheduler import Policy, Scheduler
from rollout_service.core.shared import SharedRun
from rollout_service.orchestrator.batches import add_changes
from rollout_service.orchestrator.parts import Observer
from rollout_service.orchestrator.workshop import why_wasted
from rollout_service.store.shared import Signal, Transaction

NOTHING = Snapshot(run=RunState(), groups=(), leases=())
"""The part for which only counters matter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Happened:
    """What a transaction did, for those who are told once it is durable."""

    changes: Changes = field(default_factory=Changes)
    tokens: Mapping[int, int] = field(default_factory=dict)
    """Output tokens the groups in it had, as they were before."""
    halt: Halt | None = None
    """Made by this transaction."""
    now: float = 0.0

    def tell(self, observer: Observer) -> None:
        for lease in self.changes.leases.values():
            if lease.state is not LeaseState.LIVE:
                observer.lease_ended(lease, self.now - lease.created_at)
        for effect in self.changes.effects:
            if isinstance(effect, Moved):
                wasted = why_wasted(effect)
                tokens = self.tokens.get(effect.after.seq, 0)
                if tokens and wasted is not None:
                    observer.tokens_wasted(tokens, wasted)
                observer.group_moved(effect)
        if self.halt is not None:
            observer.halted(self.halt)


def opening_nothing(policy: Policy) -> Policy:
    """For cores that work for what others opened: dispatch gives them rows of what is open already."""
    return replace(policy, max_ready_groups=0)


def without_halts(policy: Policy) -> Policy:
    """For cores that hold a part of the run only: rows of failures are counted in the run's own row."""
    return replace(policy, halt_after_failed_groups=0, halt_after_unproductive_groups=0)


def load(
    tx: Transaction,
    policy: Policy,
    *,
    groups: Iterable[Group] = (),
    leases: Iterable[Lease] = (),
    checkpoints: Iterable[Checkpoint] = (),
    paced: Collection[int] = (),
) -> Scheduler:
    """A core that holds those of `groups` that are outstanding and those of `leases` that live."""
    held = {group.seq: group for group in groups if group.state in OUTSTANDING}
    part = Snapshot(
        run=RunState(),
        groups=tuple(held[seq] for seq in sorted(held)),
        leases=tuple(lease for lease in leases if lease.state is LeaseState.LIVE),
        checkpoints=tuple(checkpoints),
    )
    core = Scheduler(without_halts(policy))
    core.load_part(tx.run, tx.whole, part, paced=paced)
    return core


async def members(tx: Transaction, leases: Iterable[Lease]) -> dict[int, Group]:
    """Every group the leases were made with, ended ones included."""
    found = await tx.groups({seq for lease in leases for seq, _ in lease.groups})
    return {seq: claimed.group for seq, claimed in found.items()}


async def paced(tx: Transaction, policy: Policy) -> Collection[int]:
    """The groups that count against the pace though they are leased or acked."""
    if policy.pace_bound is None:
        return ()
    return await tx.paced(acked=tx.run.pace_relaxed != tx.run.run.policy_version)


async def write(
    tx: Transaction, core: Scheduler, policy: Policy, *, batch: Batch | None = None, owner: str | None = None
) -> tuple[Happened, Mapping[int, int]]:
    """Write what `core` changed, with `batch`; also the claims of what belongs to `owner` then."""
    changes = core.take_changes()
    batch = batch or Batch()
    add_changes(batch, changes, core)
    batch.forget_payloads -= await _needed_elsewhere(tx, changes, batch.forget_payloads - changes.groups.keys())
    moves = [effect for effect in changes.effects if isinstance(effect, Moved)]
    losing = {move.after.seq for move in moves if why_wasted(move) is not None}
    tokens = await tx.tokens(losing) if losing else {}
    halt = await count_streak(tx, moves, policy.halts)
    claims = await tx.write(batch, owner=owner)
    return Happened(changes=changes, tokens=tokens, halt=halt, now=tx.now), claims


async def _needed_elsewhere(tx: Transaction, changes: Changes, ended: Collection[int]) -> set[int]:
    """Those of `ended`, groups that ended before, whose payload is none of a lease in `changes`.

    They were acked under another one: it forgets them at its own end, or has done so.
    """
    if not ended:
        return set()
    found = await tx.groups(ended)
    return {seq for seq, each in found.items() if each.group.acked_by not in (None, *changes.leases)}


async def count_streak(tx: Transaction, moves: Sequence[Moved], rules: streaks.HaltRules) -> Halt | None:
    """Count groups that went wrong in a row over all replicas, and halt the run (design 3.2.3)."""
    counting = [move.after for move in moves if streaks.counts(move.after, move.kind)]
    good = streaks.Streak()
    if not counting or (tx.run.streak == good and all(streaks.after(good, group) == good for group in counting)):
        return None  # nearly always; a ready group need not write that nothing went wrong
    await tx.hold_run()
    streak, halt = tx.run.streak, None
    for group in counting:
        streak = streaks.after(streak, group)
        if streak and tx.run.halt is None and halt is None:
            halt = streaks.halt_of(streak, group, rules, now=tx.now)
    run = replace(tx.run, streak=streak)
    if halt is not None:
        await revise(tx, replace(run, halt=halt))
    else:
        await tx.set_run(run)
    return halt


async def revise(tx: Transaction, run: SharedRun) -> None:
    """Make `run` the next revision: every replica takes it into account before it commits anything more."""
    await tx.set_run(replace(run, revision=run.revision + 1))
    tx.signal(Signal.RUN)
