"""What concerns the run as a whole: policy versions, pause and resume (design 3.1.7, 3.2.3).

What always holds: a version is in force for every replica from its commit on, because it is alone with the run then,
and what was decided at an older revision is not committed any more; the call returns when this replica has committed
what became stale here and the others that live have done so, which it awaits for `OTHERS_S`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rollout_service.core.changes import Bumped
from rollout_service.core.scheduler import VersionTooLow
from rollout_service.core.shared import SharedRun
from rollout_service.core.streaks import Streak
from rollout_service.orchestrator.versions import say_stale, too_low
from rollout_service.replicas import parts
from rollout_service.replicas.calls import Calls
from rollout_service.replicas.parts import Happened
from rollout_service.store.shared import Transaction

OTHERS_S = 0.25
"""How long a version waits for the other replicas to have carried it out."""


class RunCalls(Calls):
    async def post_version(self, version: int, *, reset: bool = False) -> Bumped:
        """Rule 3.1.7. Raises Conflict where the version is lower than the current one and `reset` is not set."""
        self._require_open()
        try:
            bumped, happened, run = await self._store.transact(partial(self._post, version, reset), alone=True)
        except VersionTooLow as error:
            raise too_low(error) from error
        happened.tell(self._observer)
        if bumped.version != bumped.previous:
            bumped = await self._everywhere(bumped, run)
            self._observer.version_posted(bumped)
        say_stale(bumped)
        return bumped

    async def _post(self, version: int, reset: bool, tx: Transaction) -> tuple[Bumped, Happened, SharedRun]:
        previous = tx.run.run.policy_version
        if version < previous and reset:
            return await self._reset(version, tx)
        outdated = await tx.outdated(version - self._policy.group.max_staleness) if version > previous else ()
        core = parts.load(tx, self._policy, groups=outdated)
        core.recover(now=tx.now)  # nobody works for the opened ones among them
        bumped = core.post_version(version, now=tx.now)
        happened, _ = await parts.write(tx, core, self._policy)
        if version != previous:
            await parts.revise(tx, replace(tx.run, run=replace(tx.run.run, policy_version=version), pace_relaxed=None))
        return bumped, happened, tx.run

    async def _reset(self, version: int, tx: Transaction) -> tuple[Bumped, Happened, SharedRun]:
        leases = await tx.live_leases()
        groups = await parts.members(tx, leases) | {group.seq: group for group in await tx.opened()}
        core = parts.load(tx, self._policy, groups=groups.values(), leases=leases)
        bumped = core.post_version(version, now=tx.now, reset=True)
        happened, _ = await parts.write(tx, core, self._policy)
        went_back = replace(tx.run, run=replace(tx.run.run, policy_version=version), pace_relaxed=None)
        await parts.revise(tx, replace(went_back, returns=tx.run.returns + 1, taken=tx.run.taken + 1))
        return bumped, happened, tx.run

    async def _everywhere(self, bumped: Bumped, run: SharedRun) -> Bumped:
        """Have `run` carried out here and by the others, and add what it cost them."""
        await self.watch.enforce(run)
        overview = await self.watch.others(run.revision, OTHERS_S)
        seen = [one.replica for one in overview.replicas if one.replica.enforced >= run.revision]
        return replace(
            bumped,
            stale_groups=bumped.stale_groups + sum(replica.stale_groups for replica in seen),
            aborted_rollouts=sum(replica.aborted_rollouts for replica in seen),
        )

    async def pause(self) -> None:
        """No new engine request at any replica until `resume`, across restarts. Raises StoreUnavailable."""
        await self._change(lambda run: replace(run, run=replace(run.run, paused=True)))

    async def resume(self) -> None:
        """Clear a pause and a halt. Raises StoreUnavailable."""
        await self._change(lambda run: replace(run, run=replace(run.run, paused=False), halt=None, streak=Streak()))

    async def _change(self, change: Callable[[SharedRun], SharedRun]) -> None:
        self._require_open()

        async def work(tx: Transaction) -> SharedRun:
            await tx.hold_run()
            changed = change(tx.run)
            if changed != tx.run:
                await parts.revise(tx, changed)
            return tx.run

        run = await self._store.transact(work)
        await self.watch.enforce(run)
        await self.watch.others(run.revision, OTHERS_S)
