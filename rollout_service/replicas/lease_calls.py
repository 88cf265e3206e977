"""Handing scored groups out and taking them back (design 4.1 to 4.3), at any replica.

What always holds: a call is one transaction over the lease and every group it was made with; what it decides, the core
decided; it returns only what is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import structlog

from rollout_service.core.group import Group, Lease, LeaseState, group_id, group_seq
from rollout_service.core.scheduler import NotHeld, Scheduler
from rollout_service.errors import Conflict, NotFound, StoreUnavailable
from rollout_service.orchestrator.lease_calls import answer_of, check_same_request, still_held
from rollout_service.orchestrator.views import LeaseAnswer, LeaseRequest, LeaseStatus
from rollout_service.orchestrator.waiters import Waiter
from rollout_service.replicas import parts
from rollout_service.replicas.calls import Calls
from rollout_service.replicas.parts import Happened
from rollout_service.replicas.serving import known_lease
from rollout_service.store.shared import Signal, Transaction

log = structlog.get_logger(__name__)

DUE_AT_ONCE = 64
"""Leases ended in one transaction."""
NEVER_MADE_S = 15.0
"""How long a commit whose answer was lost may still be on its way in the database: longer than a statement's usual
limit."""
AGAIN_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A lease and all it was made with, locked."""

    lease: Lease
    groups: Mapping[int, Group]
    """Those of the lease, and others that the call named."""
    core: Scheduler


class LeaseCalls(Calls):
    async def lease(self, request: LeaseRequest, hung_up: Awaitable[None] | None = None) -> LeaseAnswer:
        """As the one writer's. Callers with one `request_id` get one lease, whichever replicas they ask."""
        self._require_open()
        line = self._serving.line
        waiter = None
        if request.request_id is not None:
            made = await self._store.transact(partial(known_lease, request=request))
            if made is not None:
                return await self._answered(made)
            self._require_open()  # it may have begun to end meanwhile
            waiter = line.by_request(request.request_id)
            if waiter is not None:
                check_same_request(waiter.request.parameters, request)
        if waiter is None:
            waiter = Waiter(request)
            self._serving.join(waiter)
        self._serving.look()
        outcome = await line.wait(waiter, request.wait_s, hung_up, abandon=self.abandon, left=self._serving.look)
        if outcome is LeaseStatus.EMPTY and request.request_id is not None and not self._closing:
            made = await self._store.transact(partial(known_lease, request=request))
            if made is not None:  # for another caller with this id, at another replica, while this one stood in line
                outcome = made
        if isinstance(outcome, LeaseStatus):
            if outcome is LeaseStatus.EXHAUSTED:
                await self.watch.look()
            return LeaseAnswer(status=outcome, policy_version=self.version, outstanding=self.watch.outstanding)
        return await self._answered(outcome)

    async def _answered(self, lease: Lease) -> LeaseAnswer:
        try:
            return await self._answer(lease)
        except BaseException:  # cancelled, or the payloads could not be read: nobody has the groups
            await self.abandon(lease)
            raise

    async def _answer(self, lease: Lease) -> LeaseAnswer:
        payloads = still_held(lease, await self._store.payloads([seq for seq, _ in lease.groups]))
        if self._serving.fresh.pop(lease.lease_id, None) is not None:
            for payload in payloads:
                version = payload.group.version
                tokens = sum(getattr(rollout, "output_tokens", 0) for rollout in payload.rollouts.values())
                if version is not None:
                    self._observer.group_delivered(
                        payload.group,
                        staleness=lease.policy_version - version,
                        tokens=tokens,
                        reward_mean=None if payload.score is None else payload.score.mean,
                    )
        return answer_of(lease, payloads, self.watch.outstanding)

    async def abandon(self, lease: Lease) -> None:
        """The answer with `lease` did not reach its caller: without a `request_id` nobody could fetch it again."""
        if lease.request_id is None and not await self._gave_back(lease.lease_id, made=True):
            self._give_back(lease.lease_id)

    def _give_back(self, lease_id: str) -> None:
        """Release a lease nobody can have, if it was made, as soon as the store answers."""
        self._unwanted[lease_id] = asyncio.get_running_loop().time() + NEVER_MADE_S
        if self._giving is None or self._giving.done():
            self._giving = asyncio.create_task(self._give_all_back(), name="give-back")

    async def _give_all_back(self) -> None:
        clock = asyncio.get_running_loop().time
        while self._unwanted:
            for lease_id, sure_at in list(self._unwanted.items()):
                if await self._gave_back(lease_id, made=clock() >= sure_at):
                    self._unwanted.pop(lease_id, None)
            if self._unwanted:
                await asyncio.sleep(AGAIN_S)

    async def _gave_back(self, lease_id: str, *, made: bool) -> bool:
        """Whether nobody has it any more. `made`: its making is over, so one that is not there will never be."""
        self._serving.fresh.pop(lease_id, None)
        try:
            await self.release(lease_id, None)
        except NotFound:
            return made
        except StoreUnavailable:
            return False
        return True

    async def ack(self, lease_id: str, group_ids: Sequence[str] | None) -> list[str]:
        """Rule 4.3. The ids asked for, all of them acked under this lease now. Raises NotFound, Conflict."""
        self._require_open()

        async def work(tx: Transaction) -> tuple[list[int], Happened]:
            part, members = await self._part(tx, lease_id, group_ids)
            core = part.core

            def find(seq: int) -> Group | None:
                return core.groups.get(seq) or part.groups.get(seq)

            try:
                core.ack(part.lease, members, find, now=tx.now)
            except NotHeld as error:
                if error.group is None:
                    raise NotFound(f"there is no group {group_id(error.seq)}") from error
                raise Conflict(
                    f"group {error} now and may not be acked under lease {lease_id}; nothing of this call was done",
                    group_id=group_id(error.seq),
                    state=error.group.state,
                ) from error
            return members, await self._written(tx, core)

        members, happened = await self._store.transact(work)
        happened.tell(self._observer)
        return [group_id(seq) for seq in members]

    async def release(self, lease_id: str, group_ids: Sequence[str] | None) -> list[str]:
        """Give groups back (default: all the lease still holds); the ids that were held and are not any more.

        What the lease does not hold is left alone, so that a release can be repeated. Raises NotFound.
        """

        async def work(tx: Transaction) -> tuple[list[int], Happened]:
            part, members = await self._part(tx, lease_id, group_ids)
            strangers = [seq for seq in members if part.lease.attempt_of(seq) is None]
            if strangers:
                raise NotFound(f"group {group_id(strangers[0])} is not of lease {lease_id}")
            released = part.core.release(lease_id, members, now=tx.now)
            return released, await self._written(tx, part.core)

        released, happened = await self._store.transact(work)
        happened.tell(self._observer)
        return [group_id(seq) for seq in released]

    async def renew(self, lease_id: str, lease_s: int | None) -> Lease:
        """Extend a live lease, by its own `lease_s` where none is given. Raises NotFound, Conflict."""
        self._require_open()

        async def work(tx: Transaction) -> tuple[Lease | None, Happened]:
            part, _ = await self._part(tx, lease_id, [])
            renewed = part.core.renew(lease_id, part.lease.lease_s if lease_s is None else lease_s, now=tx.now)
            return renewed, await self._written(tx, part.core)

        renewed, happened = await self._store.transact(work)
        happened.tell(self._observer)
        if renewed is None:
            raise Conflict(f"lease {lease_id} is over and cannot be renewed", lease_id=lease_id)
        return renewed

    async def expire(self) -> int:
        """End leases whose time is over, `DUE_AT_ONCE` at most; how many. Raises StoreUnavailable."""

        async def work(tx: Transaction) -> tuple[int, Happened]:
            due = await tx.leases_due(DUE_AT_ONCE)
            if not due:
                return 0, Happened()
            groups = await parts.members(tx, due)
            core = parts.load(tx, self._policy, groups=groups.values(), leases=due)
            core.expire(now=tx.now)
            return len(due), await self._written(tx, core)

        ended, happened = await self._store.transact(work)
        happened.tell(self._observer)
        return ended

    async def _part(self, tx: Transaction, lease_id: str, group_ids: Sequence[str] | None) -> tuple[_Part, list[int]]:
        """A lease with its groups, expired if its time is over, and those of them a call names (default: all)."""
        lease = await tx.lease(lease_id)
        if lease is None:
            raise NotFound(f"there is no lease {lease_id!r}")
        members = [seq for seq, _ in lease.groups]
        named = members
        if group_ids is not None:
            named = []
            for name in dict.fromkeys(group_ids):
                seq = group_seq(name)
                if seq is None or not 0 < seq <= tx.run.run.last_seq:
                    raise NotFound(f"there is no group {name!r}")
                named.append(seq)
        found = await tx.groups({*members, *named})
        groups = {seq: claimed.group for seq, claimed in found.items()}
        own = [groups[seq] for seq in members if seq in groups]
        core = parts.load(tx, self._policy, groups=own, leases=[lease])
        core.expire(now=tx.now)
        if lease.state is LeaseState.LIVE and lease_id not in core.leases:
            lease = replace(lease, state=LeaseState.ENDED)
        return _Part(lease=lease, groups=groups, core=core), named

    async def _written(self, tx: Transaction, core: Scheduler) -> Happened:
        happened, _ = await parts.write(tx, core, self._policy)
        if happened.changes.groups or happened.changes.leases:
            tx.signal(Signal.READY)  # what was given back, or the end of the run
            tx.signal(Signal.PENDING)  # what was given back too late, or room for more
        return happened
