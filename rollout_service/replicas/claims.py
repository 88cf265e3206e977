"""Claiming groups to work for, as slots are free.

What always holds: a group is claimed, opened and given its version in one transaction, before anything of it is sent,
and worked for only when the run as that transaction saw it was taken into account; new groups are opened for free slots
only, while what was opened before goes first, and what only has to be scored needs no slot.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import structlog

from rollout_service.core.group import Group
from rollout_service.core.model import GroupState
from rollout_service.core.records import Batch
from rollout_service.core.scheduler import Policy
from rollout_service.core.shared import Claimed, SharedRun
from rollout_service.errors import StoreUnavailable
from rollout_service.orchestrator.parts import Observer
from rollout_service.replicas import parts
from rollout_service.replicas.parts import Happened
from rollout_service.replicas.resident import WORKED_FOR, Adopted
from rollout_service.store.shared import SharedStore, Transaction

log = structlog.get_logger(__name__)

AT_ONCE = 64
"""Groups in one claim: bounds the transaction; with more slots free another follows."""
AGAIN_S = 1.0
"""Without being told, and after the store failed."""
PACE = "pace"
"""Claims exclude each other where the pace bounds them over all replicas: what one opens the next must count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Taken:
    adopted: Adopted
    happened: Happened
    run: SharedRun
    """At the claim."""


class Works(Protocol):
    """Who works for claimed groups: what claims ask of the `Resident`, where each of these is explained."""

    replica_id: str
    away: bool
    closing: bool
    taken: int
    claims: dict[int, int]

    @property
    def free(self) -> int: ...

    async def follow(self, run: SharedRun) -> None: ...

    def deals_with(self, seqs: Collection[int]) -> bool: ...

    async def settled(self) -> None: ...

    def adopt(self, adopted: Adopted) -> None: ...


class Claims:
    """Fills the resident's free slots."""

    def __init__(self, store: SharedStore, resident: Works, policy: Policy, observer: Observer) -> None:
        self._store, self._resident, self._policy, self._observer = store, resident, policy, observer
        self._wake = asyncio.Event()
        self._group_size = 1
        """Rollouts of the smallest group in the last claim, to lock no more groups than there are slots for."""
        self._barren = False
        """The last claim for free slots found nothing, and nobody has said since that there is something."""
        self._doubtful = False
        """A claim may have been committed and is not worked for."""
        self._due = 0.0
        """Time of the event loop at which to look at everything, whatever was signalled."""
        self._one = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._work(), name="claims")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def look(self) -> None:
        """There may be groups to claim."""
        self._barren = False
        self._wake.set()

    def slots_are_free(self) -> None:
        """As `look`, unless it is known that there is nothing: every completion frees a slot."""
        if not self._barren:
            self._wake.set()

    async def _work(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    await self._wake.wait()
            self._wake.clear()
            if clock() >= self._due:
                # a signal may have been lost, a claim left unseen, a scoring group be nobody's
                self._doubtful, self._due = True, clock() + AGAIN_S
            try:
                while await self.claim(self._resident.free):
                    pass
            except StoreUnavailable as error:
                log.warning("claims_wait", error=str(error))
                await asyncio.sleep(AGAIN_S)
            except Exception:  # a fault of ours must not end all dispatch
                log.exception("claim_raised")
                await asyncio.sleep(AGAIN_S)

    async def claim_one(self) -> int:
        """Claim a group though there is no slot for it, to fail it; how many. Raises StoreUnavailable."""
        return await self.claim(1)

    async def claim(self, rows: int) -> int:
        """Claim groups for `rows` free slots; how many. Raises StoreUnavailable.

        Without any: those that only have to be scored, where it is time to look at everything.
        """
        async with self._one:
            return await self._claim(rows)

    async def _claim(self, rows: int) -> int:
        resident = self._resident
        if resident.away or resident.closing or (rows <= 0 and not self._doubtful):
            return 0
        replica_id = resident.replica_id

        take = partial(self._take, replica_id, rows, self._doubtful)
        self._doubtful, self._barren = True, rows > 0  # a `look` that comes meanwhile makes it fertile again
        exclusive = PACE if self._policy.pace_bound is not None else None
        taken = await self._store.transact(take, exclusive=exclusive)
        if taken is None:
            self._doubtful = False
            return 0
        self._barren = False
        self._group_size = min((len(group.rows) for group in taken.adopted.groups), default=1)
        taken.happened.tell(self._observer)
        await resident.follow(taken.run)  # or it would be taken for what was worked for before a reset
        if resident.deals_with(taken.adopted.claims.keys()):
            await resident.settled()  # what we still have of it is of an earlier claim, and must be over first
        if resident.replica_id != replica_id or resident.away:
            return 0  # it left and came back as another meanwhile; the claims were given back with the old one
        if resident.taken > taken.run.taken:
            return 0  # some may be somebody else's by now: the next look finds those that are still ours
        resident.adopt(taken.adopted)
        self._doubtful = False
        return len(taken.adopted.groups)

    async def _take(self, replica_id: str, rows: int, doubtful: bool, tx: Transaction) -> _Taken | None:
        paced = await parts.paced(tx, self._policy)
        blocked = parts.load(tx, self._policy, paced=paced).blocked()
        if rows > 0:
            most = min(-(-rows // self._group_size), AT_ONCE)
            found = list(await tx.claimable(most, pending=blocked is None))
        else:
            found = list(await tx.claimable_to_score(AT_ONCE))
        if doubtful:
            found += await self._find_strays(tx, replica_id)
        if not found:
            return None
        core = parts.load(tx, self._policy, groups=[claimed.group for claimed in found], paced=paced)
        core.recover(now=tx.now)  # of the opened ones: whoever had sent their rows is gone
        core.dispatch(now=tx.now, capacity=max(rows, 0))
        work = {seq: group for seq, group in core.groups.items() if group.state in WORKED_FOR}
        happened, claims = await parts.write(tx, core, self._policy, batch=Batch(groups=work), owner=replica_id)
        mine = [_not_sent(group) for seq, group in sorted(work.items()) if seq in claims]
        prompts = await tx.prompts([group.seq for group in mine])
        missing = [group.group_id for group in mine if group.seq not in prompts]
        if missing:
            raise StoreUnavailable(f"the prompts of {', '.join(missing)} are gone")
        adopted = Adopted(groups=mine, claims=claims, prompts=prompts)
        return _Taken(adopted=adopted, happened=happened, run=tx.run)

    async def _find_strays(self, tx: Transaction, replica_id: str) -> Sequence[Claimed]:
        """Groups claimed for us in a transaction whose end we did not see."""
        held = self._resident.claims
        strays = [seq for seq, claim in (await tx.claims_of(replica_id)).items() if held.get(seq) != claim]
        return list((await tx.groups(strays)).values())


def _not_sent(group: Group) -> Group:
    """As the store has it: its unsettled rows wait."""
    if group.state is not GroupState.GENERATING:
        return group
    return replace(group, waiting=tuple(sorted((*group.waiting, *group.running))), running=frozenset())
