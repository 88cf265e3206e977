"""Look into any group, or cancel one."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from rollout_service.api.context import Ctx
from rollout_service.api.group_tokens import sequences, tokens_answer
from rollout_service.api.group_views import group_detail, group_row
from rollout_service.api.live_schemas import GroupTokensAnswer, SamplesQuery
from rollout_service.api.problems import declared
from rollout_service.api.routing import router
from rollout_service.api.schemas import GroupDetail, GroupPage, GroupRow, GroupsQuery
from rollout_service.core.group import group_seq
from rollout_service.core.model import GroupState
from rollout_service.errors import InvalidField, NotFound

MOST_TOKENS = 2**17
"""Of one answer with many rows: encoding them takes some 50 ms."""

routes = router("groups")


@routes.get("/groups", responses=declared(422, 503))
async def get_groups(ctx: Ctx, query: Annotated[GroupsQuery, Query()]) -> GroupPage:
    """Groups in order of submission, a page at a time."""
    states = _states(query.state)
    after = 0
    if query.after is not None:
        seq = group_seq(query.after)
        if seq is None:
            raise InvalidField('after: expected a group id such as "g-42"', field="after")
        after = seq
    groups = await ctx.orchestrator.groups(states, after=after, limit=query.limit)
    status = ctx.orchestrator.status()
    rows = [group_row(group, version=status.policy_version, now=status.now) for group in groups]
    return GroupPage(groups=rows, next=rows[-1].group_id if len(rows) == query.limit else None)


@routes.get("/groups/{group_id}", responses=declared(404, 503))
async def get_group(ctx: Ctx, group_id: str) -> GroupDetail:
    """One group: state, version, rollouts, attempts, last error, ages."""
    return group_detail(await ctx.orchestrator.group(_known(group_id)), ctx.settings.sampling.request_fields())


@routes.get(
    "/groups/{group_id}/samples",
    response_class=Response,
    responses={200: {"model": GroupTokensAnswer}, **declared(404, 422, 503)},
)
async def get_samples(ctx: Ctx, group_id: str, query: Annotated[SamplesQuery, Query()]) -> Response:
    """The finished rollouts of a group token by token: ids, texts, mask, logprobs. Groups that ended keep no tokens."""
    payload = (await ctx.orchestrator.group(_known(group_id))).payload
    found = await asyncio.to_thread(sequences, payload, query.index)
    tokens = sum(len(sequence.input_ids) for _, sequence in found)
    if query.index is None and tokens > MOST_TOKENS:
        raise InvalidField(f"index: the group has {tokens} tokens; ask for one of its rows", field="index")
    ids = await asyncio.to_thread(lambda: {id_ for _, sequence in found for id_ in sequence.input_ids})
    texts = await ctx.fleet.token_texts(ids) if ids else {}
    content = await asyncio.to_thread(lambda: tokens_answer(payload, found, texts).model_dump_json().encode())
    return Response(content, media_type="application/json")


@routes.delete("/groups/{group_id}", responses=declared(404, 409, 503))
async def delete_group(ctx: Ctx, group_id: str) -> GroupRow:
    """Cancel an outstanding group: dropped, reason `cancelled`. 409 where it has ended."""
    group = await ctx.orchestrator.cancel(_known(group_id))
    status = ctx.orchestrator.status()
    return group_row(group, version=status.policy_version, now=status.now)


def _known(group_id: str) -> str:
    if group_seq(group_id) is None:
        raise NotFound(f"no group {group_id[:40]!a}", group_id=group_id[:40])
    return group_id


def _states(given: list[str]) -> frozenset[GroupState]:
    names = [name.strip() for part in given for name in part.split(",") if name.strip()]
    for name in names:
        if name not in list(GroupState):
            known = ", ".join(GroupState)
            raise InvalidField(f"state: {name[:40]!a} is none of {known}", field="state")
    return frozenset(map(GroupState, names))
