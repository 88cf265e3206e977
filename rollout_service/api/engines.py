"""The fleet, for people."""

from __future__ import annotations

from rollout_service.api.context import Ctx
from rollout_service.api.problems import declared
from rollout_service.api.routing import router
from rollout_service.api.schemas import EnginesAnswer

routes = router("engines")


@routes.get("/engines", responses=declared())
async def get_engines(ctx: Ctx) -> EnginesAnswer:
    """Every engine: health, load, in flight."""
    return EnginesAnswer(engines=ctx.fleet.describe())
