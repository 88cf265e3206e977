"""The run as it is now, for people: once, or as a stream that goes on.

What always holds: every line of the stream is a complete view; viewers cost one encoding a quarter of a second at most,
however many they are; the stream ends when the service stops.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Query, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rollout_service import __version__
from rollout_service.api.context import Context, Ctx
from rollout_service.api.guard import CALLER
from rollout_service.api.live_schemas import (
    EventsQuery,
    FlowAnswer,
    LiveViewAnswer,
    RatesAnswer,
    RecentAnswer,
    RewardAnswer,
    StalenessAnswer,
    TotalsAnswer,
)
from rollout_service.api.problems import declared
from rollout_service.api.routing import router
from rollout_service.api.status import status_answer
from rollout_service.api.viewers import LOOK_S
from rollout_service.api.wire import timestamp
from rollout_service.keys import KeyEntry
from rollout_service.observers import History

IDLE_S = 1.0
"""Ages grow even where nothing happens."""
NDJSON = "application/x-ndjson"

routes = router("live")


@routes.get("/live", responses=declared(503))
async def get_live(ctx: Ctx) -> LiveViewAnswer:
    """Status, rates, flow of groups, rewards, what happened last: one line of `/events`."""
    return live_view(ctx)


@routes.get(
    "/events",
    response_class=Response,
    responses={
        200: {
            "content": {
                NDJSON: {"schema": {"type": "string", "description": "A LiveViewAnswer a line, each complete."}}
            },
            "description": "Lines until the service stops, the key is revoked, or `limit` of them",
        },
        **declared(422, 429, 503),
    },
)
async def get_events(ctx: Ctx, request: Request, query: Annotated[EventsQuery, Query()]) -> Response:
    """The live view as a stream: at once, then as things happen, at most four lines a second and at least one. It ends
    when the service stops, and when the caller's key is revoked."""
    return LinesResponse(ctx, request.scope.get(CALLER), query.limit)


class LinesResponse(StreamingResponse):
    """Holds a viewer's place from its making to its end, whatever ends it."""

    def __init__(self, ctx: Context, caller: KeyEntry | None, limit: int | None) -> None:
        self._ctx = ctx
        ctx.viewers.enter()
        super().__init__(_lines(ctx, caller, limit), media_type=NDJSON, headers={"cache-control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ctx.viewers.leave()


async def _lines(ctx: Context, caller: KeyEntry | None, limit: int | None) -> AsyncIterator[bytes]:
    sent = 0
    while not ctx.viewers.closed and ctx.access.knows(caller):
        serial, line = ctx.viewers.line(ctx.history.serial, lambda: _encoded(ctx))
        yield line
        sent += 1
        if sent == limit:
            return
        waited = 0.0
        while waited < IDLE_S and not ctx.viewers.closed and (waited == 0.0 or ctx.history.serial == serial):
            await ctx.viewers.pause(LOOK_S)
            waited += LOOK_S


def _encoded(ctx: Context) -> bytes:
    return live_view(ctx).model_dump_json(by_alias=True).encode() + b"\n"


def live_view(ctx: Context) -> LiveViewAnswer:
    history = ctx.history
    status = status_answer(ctx)
    return LiveViewAnswer(
        at=timestamp(ctx.orchestrator.status().now),
        version=__version__,
        mode=ctx.settings.mode,
        status=status,
        rates=_rates(history),
        totals=_totals(history),
        flow=[
            FlowAnswer(from_state=before, to_state=after, count=n)
            for (before, after), n in sorted(history.flow.items())
        ],
        staleness=[StalenessAnswer(staleness=s, groups=n) for s, n in sorted(history.staleness.items())],
        rewards=[RewardAnswer(policy_version=v, groups=n, mean=mean) for v, n, mean in history.rewards()],
        recent=[
            RecentAnswer(at=timestamp(one.at), kind=one.kind, group_id=one.group_id, engine=one.engine, text=one.text)
            for one in reversed(history.recent)
        ],
    )


def _rates(history: History) -> RatesAnswer | None:
    rates = history.rates()
    if rates is None:
        return None
    return RatesAnswer(
        window_s=rates.window_s,
        rollouts_per_s=rates.rollouts,
        tokens_per_s=rates.tokens,
        groups_per_s=rates.groups,
    )


def _totals(history: History) -> TotalsAnswer:
    return TotalsAnswer(
        rollouts_finished=history.finished,
        rollouts_failed=dict(history.failed),
        groups_delivered=history.delivered,
        groups_acked=history.acked,
        groups_stale=history.stale,
        groups_failed=history.failed_groups,
        groups_dropped=dict(history.dropped),
        tokens_generated=history.generated,
        tokens_delivered=history.delivered_tokens,
        tokens_wasted=dict(history.wasted),
        aborts=history.aborts,
        halts=history.halts,
    )
