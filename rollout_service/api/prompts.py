"""Prompts over HTTP. A call is taken whole or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any
from uuid import uuid4

from fastapi import Depends

from rollout_service.api.body import JsonBody
from rollout_service.api.context import Ctx
from rollout_service.api.problems import declared
from rollout_service.api.routing import router
from rollout_service.api.schemas import PromptsAnswer, PromptsBody, SubmittedGroup
from rollout_service.orchestrator.views import Submission
from rollout_service.prompts import content_digest, parse_submitted, row_rules
from rollout_service.settings import Settings

ROWS_ON_LOOP = 16
"""More rows than these are checked in a thread."""

routes = router("prompts")


@routes.post("/prompts", status_code=202, responses=declared(400, 409, 413, 422, 429, 503))
async def post_prompts(ctx: Ctx, body: Annotated[PromptsBody, Depends(JsonBody(PromptsBody))]) -> PromptsAnswer:
    """Submit prompts. Known ones (`prompt_id`, `epoch`) with the same content are not submitted twice; with other
    content: 409. `final`: no more will come. One entry a group: one a prompt, or in distillation one a rollout."""
    if len(body.prompts) > ROWS_ON_LOOP:
        submissions = await asyncio.to_thread(submissions_of, body.prompts, ctx.settings)
    else:
        submissions = submissions_of(body.prompts, ctx.settings)
    groups = await ctx.orchestrator.submit(submissions, final=body.final)
    return PromptsAnswer(
        groups=[SubmittedGroup(group_id=group_id, prompt_id=prompt_id) for group_id, prompt_id in groups]
    )


def submissions_of(rows: Sequence[Any], settings: Settings) -> list[Submission]:
    """Checked prompts with their digests. Raises InvalidField for the first row that is no prompt."""
    rules = row_rules(settings)
    prompts = [
        parse_submitted(row, where=f"prompts[{number}]", default_prompt_id=uuid4().hex, **rules)
        for number, row in enumerate(rows)
    ]
    return [Submission(prompt=prompt, digest=content_digest(prompt)) for prompt in prompts]
