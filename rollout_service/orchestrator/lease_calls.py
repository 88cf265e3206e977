"""Handing scored groups out and taking them back (design 4.1 to 4.3)."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence

from rollout_service.core.group import Group, Lease, LeaseState, group_id, group_seq
from rollout_service.core.records import GroupPayload
from rollout_service.core.scheduler import NotHeld
from rollout_service.errors import Conflict, NotFound
from rollout_service.orchestrator.calls import Calls
from rollout_service.orchestrator.views import LeaseAnswer, LeaseRequest, LeaseStatus
from rollout_service.orchestrator.waiters import Outcome, Waiter


class LeaseCalls(Calls):
    async def lease(self, request: LeaseRequest, hung_up: Awaitable[None] | None = None) -> LeaseAnswer:
        """Wait for scored groups. Raises Halted, Conflict (design 4.2), StoreUnavailable, HungUp (`hung_up` ended)."""
        writer = self._writer
        writer.require_open()
        writer.core.expire(now=self._clock())
        waiter = await self._place_for(request)
        if isinstance(waiter, Lease):
            outcome: Outcome = waiter
            writer.turn()  # what `expire` changed
        else:
            writer.turn()
            outcome = await writer.line.wait(waiter, request.wait_s, hung_up, abandon=self.abandon, left=writer.touch)
        if isinstance(outcome, LeaseStatus):
            return LeaseAnswer(status=outcome, policy_version=self.version, outstanding=writer.core.outstanding)
        try:
            return await self._answer(outcome)
        except BaseException:  # cancelled, or the payloads could not be read: nobody has the groups
            await self.abandon(outcome)
            raise

    async def _place_for(self, request: LeaseRequest) -> Waiter | Lease:
        """The live lease of this `request_id`, the waiter to share, or a new place at the end of the line."""
        if request.request_id is not None:
            found = self._same_request(request)
            if found is None:
                await self._writer.settled()
                stored = await self._store.lease_by_request(request.request_id)
                self._writer.require_open()
                found = self._same_request(request)  # it may have come while we asked
                if found is None and stored is not None:
                    raise Conflict(
                        f"request_id {request.request_id!r} made lease {stored.lease_id}, which has ended; "
                        "a new lease needs a new request_id",
                        lease_id=stored.lease_id,
                    )
            if found is not None:
                return found
        waiter = Waiter(request)
        self._writer.line.join(waiter)
        return waiter

    def _same_request(self, request: LeaseRequest) -> Waiter | Lease | None:
        """Raises Conflict where the id was used with other parameters."""
        waiter = self._writer.line.by_request(request.request_id or "")
        if waiter is not None:
            check_same_request(waiter.request.parameters, request)
            return waiter
        for lease in self._writer.core.leases.values():
            if lease.request_id == request.request_id:
                check_same_request((lease.max_groups, lease.min_groups, lease.lease_s), request, lease)
                return lease
        return None

    async def _answer(self, lease: Lease) -> LeaseAnswer:
        payloads = still_held(lease, await self._store.payloads([seq for seq, _ in lease.groups]))
        return answer_of(lease, payloads, self._writer.core.outstanding)

    async def abandon(self, lease: Lease) -> None:
        """The answer with `lease` did not reach its caller: without a `request_id` nobody could fetch it again."""
        if lease.request_id is None:
            self._writer.core.release(lease.lease_id, None, now=self._clock())
            self._writer.turn()

    async def ack(self, lease_id: str, group_ids: Sequence[str] | None) -> list[str]:
        """Rule 4.3. The ids asked for, all of them acked under this lease now. Raises NotFound, Conflict."""
        while True:
            lease, members, ended = await self._members(lease_id, group_ids)
            core = self._writer.core
            core.expire(now=self._clock())
            if lease.state is LeaseState.LIVE and lease_id not in core.leases:
                self._writer.turn()
                continue  # it ended while we looked
            if any(seq not in core.groups and seq not in ended for seq in members):
                continue  # a group ended while we looked
            break

        def find(seq: int) -> Group | None:
            return core.groups.get(seq) or ended.get(seq)

        try:
            core.ack(lease, members, find, now=self._clock())
        except NotHeld as error:
            self._writer.turn()
            if error.group is None:
                raise NotFound(f"there is no group {group_id(error.seq)}") from error
            raise Conflict(
                f"group {error} now and may not be acked under lease {lease_id}; nothing of this call was done",
                group_id=group_id(error.seq),
                state=error.group.state,
            ) from error
        self._writer.turn()
        await self._writer.settled()
        return [group_id(seq) for seq in members]

    async def _members(
        self, lease_id: str, group_ids: Sequence[str] | None
    ) -> tuple[Lease, list[int], Mapping[int, Group]]:
        """A lease, the groups of it that a call names (default: all), and the standing of those that have ended."""
        writer = self._writer
        writer.require_open()
        lease = writer.core.leases.get(lease_id)
        if lease is None:
            await writer.settled()
            lease = await self._store.lease(lease_id)
            if lease is None:
                raise NotFound(f"there is no lease {lease_id!r}")
        members = [seq for seq, _ in lease.groups]
        if group_ids is not None:
            members = []
            for name in dict.fromkeys(group_ids):
                seq = group_seq(name)
                if seq is None or not 0 < seq <= writer.core.last_seq:
                    raise NotFound(f"there is no group {name!r}")
                members.append(seq)
        missing = [seq for seq in members if seq not in writer.core.groups]
        if not missing:
            return lease, members, {}
        await writer.settled()
        ended = await self._store.groups(missing)
        writer.require_open()
        return lease, members, {seq: group for seq, group in ended.items() if group.state.terminal}

    async def release(self, lease_id: str, group_ids: Sequence[str] | None) -> list[str]:
        """Give groups back (default: all the lease still holds); the ids that were held and are not any more.

        What the lease does not hold is left alone, so that a release can be repeated. Raises NotFound.
        """
        writer = self._writer
        lease, members, _ = await self._members(lease_id, group_ids)
        strangers = [seq for seq in members if lease.attempt_of(seq) is None]
        if strangers:
            raise NotFound(f"group {group_id(strangers[0])} is not of lease {lease_id}")
        writer.core.expire(now=self._clock())
        released = writer.core.release(lease_id, members, now=self._clock())
        writer.turn()
        await writer.settled()
        return [group_id(seq) for seq in released]

    async def renew(self, lease_id: str, lease_s: int | None) -> Lease:
        """Extend a live lease, by its own `lease_s` where none is given. Raises NotFound, Conflict."""
        writer = self._writer
        lease, _, _ = await self._members(lease_id, [])
        now = self._clock()
        writer.core.expire(now=now)
        renewed = writer.core.renew(lease_id, lease.lease_s if lease_s is None else lease_s, now=now)
        writer.turn()
        if renewed is None:
            raise Conflict(f"lease {lease_id} is over and cannot be renewed", lease_id=lease_id)
        await writer.settled()
        return renewed


def check_same_request(parameters: tuple[int, int, int], request: LeaseRequest, lease: Lease | None = None) -> None:
    """Raises Conflict where a `request_id` was used with other `parameters`."""
    if parameters != request.parameters:
        names = ("max_groups", "min_groups", "lease_s")
        was = ", ".join(f"{name} {value}" for name, value in zip(names, parameters, strict=True))
        facts = {} if lease is None else {"lease_id": lease.lease_id}
        raise Conflict(f"request_id {request.request_id!r} was used with {was}", **facts)


def still_held(lease: Lease, payloads: Sequence[GroupPayload]) -> list[GroupPayload]:
    """Those that `lease` still holds or that were acked under it, in its order."""
    return [
        payload
        for payload in payloads
        if payload.group.attempt == lease.attempt_of(payload.group.seq)
        and lease.lease_id in (payload.group.lease_id, payload.group.acked_by)
        and payload.score is not None
    ]


def answer_of(lease: Lease, payloads: Sequence[GroupPayload], outstanding: int) -> LeaseAnswer:
    return LeaseAnswer(
        status=LeaseStatus.OK if payloads else LeaseStatus.EMPTY,
        policy_version=lease.policy_version,
        outstanding=outstanding,
        lease=lease if payloads else None,
        payloads=payloads,
    )
