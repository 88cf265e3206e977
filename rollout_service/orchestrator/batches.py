"""What the core changed, as what the store keeps of it.

What always holds: a group's payload is removed in the commit of its end, unless a lease that lives on may have to be
answered again with it: then in the commit of the lease's end.
"""

from __future__ import annotations

from rollout_service.core.changes import Changes, Moved
from rollout_service.core.group import LeaseState
from rollout_service.core.records import Batch
from rollout_service.core.scheduler import Scheduler


def add_changes(batch: Batch, changes: Changes, core: Scheduler) -> None:
    """Put `changes` of `core`, but the run, into `batch`. Every outstanding group of a lease in them is in `core`."""
    batch.groups.update(changes.groups)
    batch.leases.update(changes.leases)
    for name in changes.forgotten:
        batch.checkpoints.pop(name, None)
        batch.forget_checkpoints.add(name)
    batch.checkpoints.update(changes.checkpoints)
    batch.forget_attempts |= changes.new_attempts
    for lease in changes.leases.values():
        if lease.state is not LeaseState.LIVE:
            batch.forget_payloads.update(seq for seq, _ in lease.groups if seq not in core.groups)
    for effect in changes.effects:
        if isinstance(effect, Moved) and effect.after.state.terminal:
            holder = effect.before.lease_id or effect.after.acked_by
            if holder not in core.leases:
                batch.forget_payloads.add(effect.after.seq)
