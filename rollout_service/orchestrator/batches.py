"""What the core changed, as what the store keeps of it.

What always holds: a group's payload is removed in the commit of its end, unless a lease that lives on may have to be
answered again with it: then in the commit of the lease's end. Where several leases had the group, one after the other,
it is the end of the one it was acked under that counts.
"""

from __future__ import annotations

from collections.abc import Collection

from rollout_service.core.changes import Changes, Moved
from rollout_service.core.group import LeaseState
from rollout_service.core.records import Batch
from rollout_service.core.scheduler import Scheduler


def add_changes(batch: Batch, changes: Changes, core: Scheduler) -> None:
    """Put `changes` of `core`, but the run, into `batch`. Every outstanding group of a lease in them is in `core`.

    A core that holds a part of the leases only cannot tell what others still need: that is its caller's to leave out.
    """
    batch.groups.update(changes.groups)
    batch.leases.update(changes.leases)
    for name in changes.forgotten:
        batch.checkpoints.pop(name, None)
        batch.forget_checkpoints.add(name)
    batch.checkpoints.update(changes.checkpoints)
    batch.forget_attempts |= changes.new_attempts
    for lease in changes.leases.values():
        if lease.state is not LeaseState.LIVE:
            over = {seq for seq, _ in lease.groups if seq not in core.groups}
            if not over <= changes.groups.keys():  # one ended before: given back in time, and acked under a later lease
                over.difference_update(seq for other in core.leases.values() for seq, _ in other.groups)
            batch.forget_payloads |= over
    for effect in changes.effects:
        if isinstance(effect, Moved) and effect.after.state.terminal:
            holder = effect.before.lease_id or effect.after.acked_by
            if holder not in core.leases:
                batch.forget_payloads.add(effect.after.seq)


def absorb(batch: Batch, later: Batch) -> None:
    """Put what was decided `later` into `batch`; what would be written twice leaves `later`. Neither has a run."""
    batch.new_groups.update(later.new_groups)
    batch.groups.update(later.groups)
    batch.rollouts.update(later.rollouts)
    batch.scores.update(later.scores)
    batch.leases.update(later.leases)
    batch.checkpoints.update(later.checkpoints)
    batch.forget_checkpoints |= later.forget_checkpoints
    batch.forget_attempts |= later.forget_attempts
    batch.forget_payloads |= later.forget_payloads
    take_out(later, seqs_of(later))


def seqs_of(batch: Batch) -> set[int]:
    """The groups anything in `batch` is about."""
    rows = {key[0] for key in batch.rollouts} | {key[0] for key in batch.scores}
    return set(batch.groups) | rows | batch.forget_attempts | batch.forget_payloads


def take_out(batch: Batch, seqs: Collection[int]) -> None:
    """Leave nothing in `batch` that is about these groups."""
    for seq in seqs:
        batch.groups.pop(seq, None)
    batch.rollouts = {key: value for key, value in batch.rollouts.items() if key[0] not in seqs}
    batch.scores = {key: value for key, value in batch.scores.items() if key[0] not in seqs}
    batch.forget_attempts.difference_update(seqs)
    batch.forget_payloads.difference_update(seqs)
