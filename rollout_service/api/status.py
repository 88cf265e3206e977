"""One consistent look at the run."""

from __future__ import annotations

from rollout_service.api.context import Context, Ctx, ThreadCounts
from rollout_service.api.problems import declared
from rollout_service.api.routing import router
from rollout_service.api.schemas import (
    HaltAnswer,
    LeasesAnswer,
    OldestAnswer,
    ReplicaAnswer,
    SlotsAnswer,
    StatusAnswer,
    StoreAnswer,
    ThreadsAnswer,
)
from rollout_service.api.wire import timestamp
from rollout_service.core.changes import Halt
from rollout_service.core.group import Group
from rollout_service.core.model import GroupState
from rollout_service.core.shared import SeenReplica
from rollout_service.orchestrator.views import StatusView

routes = router("status")


@routes.get("/status", responses=declared(503))
async def get_status(ctx: Ctx) -> StatusAnswer:
    """Groups by state, slots, halt, engines. `submitted` is the sum of `groups`. With replicas: the whole run, each
    replica, and the engines as the one that answers sees them."""
    await ctx.orchestrator.refresh()
    return status_answer(ctx)


def status_answer(ctx: Context) -> StatusAnswer:
    view = ctx.orchestrator.status()
    total, used = view.slots_total + view.other_slots_total, view.slots_used + view.other_slots_used
    return StatusAnswer(
        policy_version=view.policy_version,
        max_staleness=view.max_staleness,
        submitted=view.counts.submitted,
        groups={state: view.counts.groups.get(state, 0) for state in GroupState},
        outstanding=view.counts.outstanding,
        slots=SlotsAnswer(total=total, used=used, free=max(0, total - used)),
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
        replica=view.replica_id,
        replicas=[_replica(seen, view) for seen in view.replicas],
    )


def _replica(seen: SeenReplica, view: StatusView) -> ReplicaAnswer:
    replica = seen.replica
    return ReplicaAnswer(
        id=replica.replica_id,
        name=replica.name,
        service=replica.service,
        alive=seen.expires_at > view.store_now,
        seen_s=round(max(0.0, view.store_now - seen.seen_at), 3),
        claims=seen.claims,
        slots=SlotsAnswer(total=replica.slots, used=replica.in_flight, free=max(0, replica.slots - replica.in_flight)),
        engines=replica.engines,
        healthy_engines=replica.healthy_engines,
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
