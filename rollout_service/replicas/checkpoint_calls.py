"""Points a trainer can go back to (design 4.9), over all replicas.

What always holds: a mark is made while no other transaction runs, so that every group has ended before it or after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollout_service.core.changes import Bumped
from rollout_service.core.group import Checkpoint
from rollout_service.core.scheduler import NameTaken
from rollout_service.core.shared import SharedRun
from rollout_service.errors import Conflict, NotFound, StoreUnavailable
from rollout_service.orchestrator.checkpoint_calls import READ_CHUNK, Rewound
from rollout_service.replicas import parts
from rollout_service.replicas.parts import Happened
from rollout_service.replicas.run_calls import RunCalls
from rollout_service.store.shared import Transaction


class CheckpointCalls(RunCalls):
    async def mark(self, name: str) -> Checkpoint:
        """Remember this point under `name`. Raises Conflict where the name stands for another point."""
        self._require_open()

        async def work(tx: Transaction) -> Checkpoint:
            core = parts.load(tx, self._policy, checkpoints=await tx.checkpoints())
            checkpoint = core.mark(name, now=tx.now)
            await parts.write(tx, core, self._policy)
            return checkpoint

        try:
            return await self._store.transact(work, alone=True)
        except NameTaken as error:
            raise Conflict(f"{error}; DELETE it first or take another name", name=name) from error

    async def checkpoints(self) -> Sequence[Checkpoint]:
        """Oldest first."""
        return await self._store.transact(lambda tx: tx.checkpoints())

    async def forget(self, name: str) -> None:
        """Let a point go, and the prompts that only it kept. Raises NotFound."""
        self._require_open()

        async def work(tx: Transaction) -> None:
            core = parts.load(tx, self._policy, checkpoints=await tx.checkpoints())
            if not core.forget(name):
                raise NotFound(f"there is no checkpoint {name!r}")
            await parts.write(tx, core, self._policy)

        await self._store.transact(work, alone=True)

    async def rewind(self, name: str) -> Rewound:
        """Return to a point: as a reset to its version, and what ended since is pending again. Raises NotFound."""
        self._require_open()

        async def work(tx: Transaction) -> tuple[Checkpoint, Bumped, int, Happened, SharedRun]:
            marks = await tx.checkpoints()
            checkpoint = next((mark for mark in marks if mark.name == name), None)
            if checkpoint is None:
                raise NotFound(f"there is no checkpoint {name!r}")
            leases = await tx.live_leases()
            groups = await parts.members(tx, leases) | {group.seq: group for group in await tx.opened()}
            seqs = list(await tx.ended_since(checkpoint.ends))
            for start in range(0, len(seqs), READ_CHUNK):
                chunk = seqs[start : start + READ_CHUNK]
                if len(await tx.prompts(chunk)) < len(chunk):
                    raise StoreUnavailable("the prompt of a group that ended since is gone; it cannot be opened again")
            ended = [claimed.group for claimed in (await tx.groups(seqs)).values()]
            core = parts.load(tx, self._policy, groups=groups.values(), leases=leases, checkpoints=marks)
            bumped = core.rewind(checkpoint, ended, now=tx.now)
            happened, _ = await parts.write(tx, core, self._policy)
            run = replace(tx.run.run, policy_version=checkpoint.policy_version)
            lowered = checkpoint.policy_version < tx.run.run.policy_version
            went_back = replace(tx.run, run=run, pace_relaxed=None)
            await parts.revise(tx, replace(went_back, returns=tx.run.returns + lowered, taken=tx.run.taken + 1))
            return checkpoint, bumped, len(ended), happened, tx.run

        checkpoint, bumped, reopened, happened, run = await self._store.transact(work, alone=True)
        happened.tell(self._observer)
        bumped = await self._everywhere(bumped, run)
        if bumped.version != bumped.previous:
            self._observer.version_posted(bumped)
        return Rewound(checkpoint=checkpoint, bumped=bumped, reopened_groups=reopened)
