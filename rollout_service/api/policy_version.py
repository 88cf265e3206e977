"""The policy version: the trainer posts it after every engine has the weights, or has the service load them first."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends

from rollout_service.api.body import JsonBody
from rollout_service.api.context import Ctx
from rollout_service.api.problems import declared
from rollout_service.api.routing import router
from rollout_service.api.schemas import BumpAnswer, VersionAnswer, VersionBody
from rollout_service.core.model import WeightUpdate

routes = router("policy version")


@routes.post("/policy_version", responses=declared(400, 403, 409, 413, 422, 502, 503), response_model_exclude_none=True)
async def post_policy_version(ctx: Ctx, body: Annotated[VersionBody, Depends(JsonBody(VersionBody))]) -> BumpAnswer:
    """Raise the version; what it makes stale is aborted at once. Equal: no effect. Lower: 409, unless `reset`.

    With `weights` or `lora` every engine is paused, loads, reports the version and goes on; then the version is raised.
    An engine that does not follow gets no more work, and the call fails (502) and names it, without raising anything.
    """
    update = _update(body)
    behind: list[str] = []
    if update is None:
        bumped = await ctx.orchestrator.post_version(body.version, reset=body.reset)
    else:
        bumped, behind = await ctx.updates.post(update, reset=body.reset)
    return BumpAnswer(
        version=bumped.version,
        previous=bumped.previous,
        stale_groups=bumped.stale_groups,
        aborted_rollouts=bumped.aborted_rollouts,
        behind_engines=behind or None,
    )


def _update(body: VersionBody) -> WeightUpdate | None:
    if body.lora is not None:
        return WeightUpdate(version=body.version, path=body.lora.path, lora_name=body.lora.name)
    if body.weights is not None:
        return WeightUpdate(version=body.version, path=body.weights.path)
    return None


@routes.get("/policy_version", responses=declared(503))
async def get_policy_version(ctx: Ctx) -> VersionAnswer:
    """The current version and the bound on staleness."""
    return VersionAnswer(version=ctx.orchestrator.version, max_staleness=ctx.settings.groups.max_staleness)
