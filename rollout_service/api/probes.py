"""Probes and metrics, for machines."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from rollout_service.api.context import Context, Ctx
from rollout_service.api.guard import may_look
from rollout_service.api.problems import declared, problem
from rollout_service.api.routing import router
from rollout_service.api.schemas import LiveAnswer, ReadyAnswer

routes = router("probes")


@routes.get("/livez", responses=declared())
async def get_livez() -> LiveAnswer:
    """200 while the event loop runs; restart the process when it does not answer."""
    return LiveAnswer()


@routes.get("/readyz", response_model=ReadyAnswer, responses=declared(503))
async def get_readyz(ctx: Ctx, request: Request) -> ReadyAnswer | Response:
    """503 while halted, while no engine is healthy, and while the store cannot commit; not while paused."""
    reasons = not_ready(ctx, details=may_look(ctx.access, request))
    if not reasons:
        return ReadyAnswer()
    return problem(503, "not-ready", "Not ready", "; ".join(reasons), {"reasons": reasons})


def not_ready(ctx: Context, *, details: bool) -> list[str]:
    """Why this service should not be relied on now; without `details` nothing an engine, a path or a prompt said."""
    view = ctx.orchestrator.status()
    reasons = []
    if view.closing:
        reasons.append("the service is ending")
    if view.halt is not None:
        halt = view.halt
        where = f" at {halt.engine}" if halt.engine else ""
        more = f": {halt.reason}; last: {halt.group_id}{where}: {halt.error}" if details else ""
        reasons.append(f"halted{more}")
    if ctx.fleet.healthy_capacity() == 0:
        reasons.append("no engine is healthy")
    if not view.store_ok:
        reasons.append("the store cannot commit" + (f": {view.store_error}" if details else ""))
    return reasons


@routes.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **declared()},
)
async def get_metrics(ctx: Ctx, request: Request) -> Response:
    """Prometheus, in the text format or as OpenMetrics."""
    await ctx.orchestrator.refresh()
    content, media_type = ctx.metrics.page(request.headers.get("accept", ""))
    return Response(content, headers={"content-type": media_type})
