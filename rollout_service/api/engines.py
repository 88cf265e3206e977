"""The fleet: who is there, who comes and who goes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Query, Response

from rollout_service.api.body import JsonBody
from rollout_service.api.context import Ctx
from rollout_service.api.problems import declared
from rollout_service.api.routing import router
from rollout_service.api.schemas import EngineBody, EnginesAnswer, RemoveEngineQuery

routes = router("engines")


@routes.get("/engines", responses=declared())
async def get_engines(ctx: Ctx) -> EnginesAnswer:
    """Every engine: health, load, in flight."""
    return EnginesAnswer(engines=ctx.fleet.describe())


@routes.post(
    "/engines",
    status_code=201,
    response_model=dict[str, Any],
    responses={
        200: {"description": "There already; it took max_inflight, where given", "model": dict[str, Any]},
        **declared(400, 403, 409, 413, 422, 503),
    },
)
async def post_engine(
    ctx: Ctx, response: Response, body: Annotated[EngineBody, Depends(JsonBody(EngineBody))]
) -> dict[str, Any]:
    """Add an engine until the next restart, with replicas to all of them until it is removed; its description as in
    GET /engines. 409 where what answers is wrong for the run; one that does not answer yet is added unhealthy, and used
    as soon as it answers."""
    description, new = await ctx.engine_calls.add_engine(body.url, body.max_inflight)
    response.status_code = 201 if new else 200
    return description


@routes.delete("/engines/{engine_id}", responses=declared(404, 422, 503))
async def delete_engine(ctx: Ctx, engine_id: str, query: Annotated[RemoveEngineQuery, Query()]) -> dict[str, Any]:
    """Remove an engine: it gets no new work from now on, and the call is answered when nothing runs there any more.
    One of the configuration comes back at the next start. With replicas it leaves all of them, and stays out."""
    return await ctx.engine_calls.remove_engine(engine_id, drain_s=query.drain_s)
