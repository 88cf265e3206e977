"""Looking into groups, and cancelling one, at any replica."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from rollout_service.core.group import Group
from rollout_service.core.model import GroupState
from rollout_service.errors import Conflict, NotFound
from rollout_service.orchestrator.views import GroupView
from rollout_service.replicas import parts
from rollout_service.replicas.calls import Calls
from rollout_service.replicas.parts import Happened
from rollout_service.store.shared import Signal, Transaction


class GroupCalls(Calls):
    async def group(self, public_id: str) -> GroupView:
        """Everything there is of one group; of rows in flight only what this replica has. Raises NotFound."""
        seq = self._seq(public_id)
        payloads = await self._store.payloads([seq])
        if not payloads:
            raise NotFound(f"there is no group {public_id!r}")
        payload = payloads[0]
        resident = self._resident
        group = resident.core.groups.get(seq)
        in_flight = resident.work.in_flight(seq, group.attempt, group.running) if group is not None else {}
        return GroupView(payload=payload, in_flight=in_flight, policy_version=self.version, now=resident.now())

    async def groups(self, states: Collection[GroupState], *, after: int, limit: int) -> Sequence[Group]:
        """Groups in `states` (empty: any) with a number above `after`, in submission order."""
        return await self._store.list_groups(states, after=after, limit=limit)

    async def cancel(self, public_id: str) -> Group:
        """Drop an outstanding group. Raises NotFound, Conflict where it has ended."""
        self._require_open()
        seq = self._seq(public_id)

        async def work(tx: Transaction) -> tuple[Happened, bool]:
            seen = await tx.payloads([seq])
            if not seen:
                raise NotFound(f"there is no group {public_id!r}")
            holder = seen[0].group.lease_id
            lease = None if holder is None else await tx.lease(holder)  # locked before its groups, as everywhere
            leases = [] if lease is None else [lease]
            found = await tx.groups({seq} | {member for each in leases for member, _ in each.groups})
            claimed = found[seq]
            group = claimed.group
            if group.state.terminal:
                raise Conflict(f"group {public_id} has ended as {group.state}", state=group.state)
            if group.lease_id not in (None, holder):
                raise Conflict(f"group {public_id} was leased in this moment; ask again", state=group.state)
            groups = {number: each.group for number, each in found.items()}
            core = parts.load(tx, self._policy, groups=groups.values(), leases=leases)
            core.cancel(seq, now=tx.now)
            if claimed.owner is not None:
                await tx.hold_run()
                await parts.revise(tx, replace(tx.run, taken=tx.run.taken + 1))
            happened, _ = await parts.write(tx, core, self._policy)
            tx.signal(Signal.READY)
            tx.signal(Signal.PENDING)  # there may be room to open another
            return happened, claimed.owner is not None

        happened, taken = await self._store.transact(work)
        happened.tell(self._observer)
        if taken:
            await self.watch.enforce((await self.watch.look()).run)
        return (await self._store.groups([seq]))[seq]
