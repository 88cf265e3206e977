"""Points a trainer can go back to when it falls back to a checkpoint of its own (design 4.9)."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Response

from rollout_service.api import wire
from rollout_service.api.body import JsonBody
from rollout_service.api.context import Ctx
from rollout_service.api.problems import declared
from rollout_service.api.routing import router
from rollout_service.api.schemas import CheckpointAnswer, CheckpointBody, CheckpointsAnswer, RewindAnswer
from rollout_service.core.group import Checkpoint

routes = router("checkpoints")


@routes.post("/checkpoints", responses=declared(400, 409, 413, 422, 503))
async def post_checkpoint(
    ctx: Ctx, body: Annotated[CheckpointBody, Depends(JsonBody(CheckpointBody))]
) -> CheckpointAnswer:
    """Mark this point: the policy version, and what has ended. Post it right after the trainer saved its own."""
    return _answer(await ctx.orchestrator.mark(body.name))


@routes.get("/checkpoints", responses=declared(503))
async def get_checkpoints(ctx: Ctx) -> CheckpointsAnswer:
    """Oldest first. Prompts are kept back to the oldest one."""
    return CheckpointsAnswer(checkpoints=[_answer(checkpoint) for checkpoint in await ctx.orchestrator.checkpoints()])


@routes.delete("/checkpoints/{name}", status_code=204, responses=declared(404, 503))
async def delete_checkpoint(ctx: Ctx, name: str) -> Response:
    """Let a point go, and the prompts that only it kept."""
    await ctx.orchestrator.forget(name)
    return Response(status_code=204)


@routes.post("/rewind", responses=declared(400, 404, 413, 422, 503))
async def post_rewind(ctx: Ctx, body: Annotated[CheckpointBody, Depends(JsonBody(CheckpointBody))]) -> RewindAnswer:
    """Return to a point: as a reset to its version; groups that ended since are pending again; later points go."""
    rewound = await ctx.orchestrator.rewind(body.name)
    return RewindAnswer(
        name=rewound.checkpoint.name,
        version=rewound.bumped.version,
        previous=rewound.bumped.previous,
        aborted_rollouts=rewound.bumped.aborted_rollouts,
        reopened_groups=rewound.reopened_groups,
    )


def _answer(checkpoint: Checkpoint) -> CheckpointAnswer:
    return CheckpointAnswer(
        name=checkpoint.name,
        policy_version=checkpoint.policy_version,
        ended_groups=checkpoint.ends,
        created_at=wire.timestamp(checkpoint.created_at),
    )
