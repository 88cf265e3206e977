"""Looking into groups, and cancelling one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rollout_service.core.group import Group
from rollout_service.core.model import GroupState
from rollout_service.errors import Conflict, NotFound
from rollout_service.orchestrator.calls import Calls
from rollout_service.orchestrator.views import GroupView


class GroupCalls(Calls):
    async def group(self, public_id: str) -> GroupView:
        """Everything there is of one group. Raises NotFound."""
        seq = self._seq(public_id)
        await self._settled()
        payloads = await self._store.payloads([seq])
        if not payloads:
            raise NotFound(f"there is no group {public_id!r}")
        payload = payloads[0]
        group = self._writer.core.groups.get(seq)
        in_flight = self._writer.work.in_flight(seq, group.attempt, group.running) if group is not None else {}
        return GroupView(payload=payload, in_flight=in_flight, policy_version=self.version, now=self._clock())

    async def groups(self, states: Collection[GroupState], *, after: int, limit: int) -> Sequence[Group]:
        """Groups in `states` (empty: any) with a number above `after`, in submission order."""
        await self._settled()
        return await self._store.list_groups(states, after=after, limit=limit)

    async def cancel(self, public_id: str) -> Group:
        """Drop an outstanding group. Raises NotFound, Conflict where it has ended."""
        writer = self._writer
        writer.require_open()
        seq = self._seq(public_id)
        writer.seal_leases()
        if not writer.core.cancel(seq, now=self._clock()):
            await self._settled()
            known = await self._store.groups([seq])
            if seq not in known:
                raise NotFound(f"there is no group {public_id!r}")
            raise Conflict(f"group {public_id} has ended as {known[seq].state}", state=known[seq].state)
        writer.turn()
        await writer.settled()
        return (await self._store.groups([seq]))[seq]
