"""Stop and restart dispatch."""

from __future__ import annotations

from rollout_service.api.context import Context, Ctx
from rollout_service.api.problems import declared
from rollout_service.api.routing import router
from rollout_service.api.schemas import ControlAnswer
from rollout_service.api.status import halt_answer

routes = router("control")


@routes.post("/pause", responses=declared(503))
async def post_pause(ctx: Ctx) -> ControlAnswer:
    """No new engine requests; what is in flight, scoring and leases go on. Survives a restart."""
    await ctx.orchestrator.pause()
    return _control(ctx)


@routes.post("/resume", responses=declared(503))
async def post_resume(ctx: Ctx) -> ControlAnswer:
    """Dispatch again: clears a pause and a halt."""
    await ctx.orchestrator.resume()
    return _control(ctx)


def _control(ctx: Context) -> ControlAnswer:
    view = ctx.orchestrator.status()
    return ControlAnswer(paused=view.paused, halted=halt_answer(view.halt))
