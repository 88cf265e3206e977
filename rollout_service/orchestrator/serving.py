"""Waiting lease calls meet what is ready.

What always holds: a caller gets a lease only after its commit; callers are served in order of arrival; when a halt or
the end of the run leaves nothing to wait for, all of them hear so at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from rollout_service.core.group import Lease
from rollout_service.core.scheduler import Scheduler
from rollout_service.errors import Halted
from rollout_service.orchestrator.committer import Committer
from rollout_service.orchestrator.parts import Observer
from rollout_service.orchestrator.survivors import Survivors
from rollout_service.orchestrator.views import LeaseStatus
from rollout_service.orchestrator.waiters import Line, Waiter


class WriterOfLeases(Protocol):
    """What serving needs of the writer."""

    core: Scheduler
    committer: Committer
    survivors: Survivors

    def now(self) -> float: ...
    def collect(self) -> None: ...
    def touch(self) -> None: ...


class Serving:
    """Owns the line of waiting callers."""

    def __init__(self, writer: WriterOfLeases, observer: Observer, new_id: Callable[[], str]) -> None:
        self._writer, self._observer, self._new_id = writer, observer, new_id
        self.line = Line()

    def serve(self, now: float) -> None:
        core, line = self._writer.core, self.line
        while (waiter := line.first()) is not None:
            request = waiter.request
            lease = core.lease(
                self._new_id(),
                max_groups=request.max_groups,
                min_groups=request.min_groups,
                lease_s=request.lease_s,
                request_id=request.request_id,
                consumer=request.consumer,
                now=now,
            )
            if lease is None:
                break
            line.grant(waiter, lease)
            self._writer.collect()
            self._writer.committer.after_commit(partial(self._granted, waiter, lease), partial(line.settle, waiter))
        for waiter in line:
            ending = end_of_wait(core)
            if ending is not None:
                waiter.decided = True
                self._writer.committer.after_commit(partial(line.settle, waiter, ending), partial(line.settle, waiter))
                line.leave(waiter)

    def _granted(self, waiter: Waiter, lease: Lease) -> None:
        for seq, _ in lease.groups:
            group = self._writer.core.groups.get(seq)
            if group is not None and group.version is not None:
                tokens, mean = self._writer.survivors.delivery(seq)
                staleness = lease.policy_version - group.version
                self._observer.group_delivered(group, staleness=staleness, tokens=tokens, reward_mean=mean)
        self.line.settle(waiter, lease)
        if not waiter.callers and waiter.request.request_id is None:  # nobody is there to take it (design 4.2)
            self._writer.core.release(lease.lease_id, None, now=self._writer.now())
            self._writer.touch()


def end_of_wait(core: Scheduler) -> LeaseStatus | Halted | None:
    """What to tell callers for whom nothing will come, in a run as `core` has it."""
    halt = core.halt
    if halt is not None:
        at = f" at {halt.engine}" if halt.engine is not None else ""
        return Halted(
            f"halted: {halt.reason}; last: {halt.group_id}{at}: {halt.error}. Mend the cause, then POST /resume.",
            reason=halt.reason,
            group_id=halt.group_id,
            engine=halt.engine,
            error=halt.error,
        )
    return LeaseStatus.EXHAUSTED if core.exhausted else None
