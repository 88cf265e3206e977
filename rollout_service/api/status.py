"""One consistent look at the run."""

from __future__ import annotations

from rollout_service.api.context import Context, Ctx, ThreadCounts
from rollout_service.api.problems import declared
from rollout_service.api.routing import router
from rollout_service.api.schemas import (
    HaltAnswer,
    LeasesAnswer,
    OldestAnswer,
    SlotsAnswer,
    StatusAnswer,
    StoreAnswer,
    ThreadsAnswer,
)
from rollout_service.api.wire import timestamp
from rollout_service.core.changes import Halt
from rollout_service.core.group import Group
from rollout_service.core.model import GroupState

routes = router("status")


@routes.get("/status", responses=declared(503))
async def get_status(ctx: Ctx) -> StatusAnswer:
    """Groups by state, slots, halt, engines. `submitted` is the sum of `groups`."""
    return status_answer(ctx)


def status_answer(ctx: Context) -> StatusAnswer:
    view = ctx.orchestrator.status()
    return StatusAnswer(
        policy_version=view.policy_version,
        max_staleness=view.max_staleness,
        submitted=view.counts.submitted,
        groups={state: view.counts.groups.get(state, 0) for state in GroupState},
        outstanding=view.counts.outstanding,
        slots=SlotsAnswer(
            total=view.slots_total, used=view.slots_used, free=max(0, view.slots_total - view.slots_used)
        ),
        paused=view.paused,
        halted=halt_answer(view.halt),
        blocked=view.blocked,
        final=view.final,
        read_position=view.read_position,
        oldest_outstanding=_oldest(view.oldest, view.now),
        leases=LeasesAnswer(live=view.leases, waiting_calls=view.waiting_lease_calls),
        store=StoreAnswer(ok=view.store_ok, error=view.store_error),
        threads=_threads(ctx.threads()),
        engines=ctx.fleet.describe(),
    )


def halt_answer(halt: Halt | None) -> HaltAnswer | None:
    if halt is None:
        return None
    return HaltAnswer(
        reason=halt.reason,
        group_id=halt.group_id,
        engine=halt.engine,
        error=halt.error,
        since=timestamp(halt.since),
    )


def _threads(counts: ThreadCounts | None) -> ThreadsAnswer | None:
    if counts is None:
        return None
    return ThreadsAnswer(total=counts.total, busy=counts.busy, waiting=counts.waiting, stuck=counts.stuck)


def _oldest(group: Group | None, now: float) -> OldestAnswer | None:
    if group is None:
        return None
    age_s = round(max(0.0, now - group.submitted_at), 3)
    return OldestAnswer(group_id=group.group_id, state=group.state, age_s=age_s)
