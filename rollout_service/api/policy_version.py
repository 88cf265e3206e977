"""The policy version: the trainer posts it after every engine has the weights."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends

from rollout_service.api.body import JsonBody
from rollout_service.api.context import Ctx
from rollout_service.api.problems import declared
from rollout_service.api.routing import router
from rollout_service.api.schemas import BumpAnswer, VersionAnswer, VersionBody

routes = router("policy version")


@routes.post("/policy_version", responses=declared(400, 409, 413, 422, 503))
async def post_policy_version(ctx: Ctx, body: Annotated[VersionBody, Depends(JsonBody(VersionBody))]) -> BumpAnswer:
    """Raise the version; what it makes stale is aborted at once. Equal: no effect. Lower: 409, unless `reset`."""
    bumped = await ctx.orchestrator.post_version(body.version, reset=body.reset)
    return BumpAnswer(
        version=bumped.version,
        previous=bumped.previous,
        stale_groups=bumped.stale_groups,
        aborted_rollouts=bumped.aborted_rollouts,
    )


@routes.get("/policy_version", responses=declared(503))
async def get_policy_version(ctx: Ctx) -> VersionAnswer:
    """The current version and the bound on staleness."""
    return VersionAnswer(version=ctx.orchestrator.version, max_staleness=ctx.settings.groups.max_staleness)
