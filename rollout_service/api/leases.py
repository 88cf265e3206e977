"""Leases: scored groups out, acks in.

What always holds: a caller that hangs up while it waits costs no group; one that hangs up before the last byte was
handed to the socket has its groups released at once, unless a `request_id` can fetch them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, ParamSpec, TypeVar

from fastapi import Depends, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollout_service.api import binary, wire
from rollout_service.api.body import JsonBody
from rollout_service.api.context import Context, Ctx
from rollout_service.api.guard import CALLER
from rollout_service.api.problems import CLIENT_GONE, declared
from rollout_service.api.routing import router
from rollout_service.api.schemas import (
    AckAnswer,
    LeaseAnswer,
    LeaseBody,
    LeasePart,
    ReleaseAnswer,
    RenewAnswer,
    RenewBody,
)
from rollout_service.errors import InvalidField, NotFound, Unauthorized
from rollout_service.orchestrator import HungUp, views
from rollout_service.settings import Settings

P = ParamSpec("P")
T = TypeVar("T")

CHUNK_BYTES = 2**20
"""Bytes written by one turn of a thread and held in memory at once."""
MAX_LEASE_ID = 128
BINARY_CONTENT = {
    binary.MEDIA_TYPE: {
        "schema": {
            "type": "string",
            "format": "binary",
            "description": "A safetensors file: `input_ids` int32 (T,), `old_log_probs` float32 (T,), "
            "`completion_mask` uint8 (T,), `cu_seqlens` int64 (samples + 1,), `advantages` float64 (samples,); "
            "the metadata's `lease` is the JSON answer without the first three. "
            "Sample i is rows cu_seqlens[i]:cu_seqlens[i + 1].",
        }
    }
}

routes = router("leases")


@routes.post(
    "/leases",
    response_class=Response,
    responses={200: {"model": LeaseAnswer, "content": BINARY_CONTENT}, **declared(400, 409, 413, 422, 503)},
)
async def post_lease(ctx: Ctx, request: Request, body: Annotated[LeaseBody, Depends(JsonBody(LeaseBody))]) -> Response:
    """Lease scored groups, oldest version first; waits up to `wait_s` seconds for `min_groups` of them.

    `Accept: application/vnd.safetensors` gets the same content as one safetensors file, or as JSON where the texts of
    the lease pass the 100 MB that the format's readers allow.
    """
    _check_min_groups(body.min_groups, body.max_groups, ctx.settings)
    asked = views.LeaseRequest(
        max_groups=body.max_groups,
        min_groups=body.min_groups,
        wait_s=body.wait_s,
        lease_s=body.lease_s,
        consumer=body.consumer,
        request_id=body.request_id,
    )
    async with _watched(request.receive) as gone:
        try:
            answer = await ctx.orchestrator.lease(asked, asyncio.shield(gone))
        except HungUp:
            return Response(status_code=CLIENT_GONE)
    if not ctx.access.knows(request.scope.get(CALLER)):  # the call may have waited a minute
        if answer.lease is not None:
            await ctx.orchestrator.abandon(answer.lease)
        raise Unauthorized("the API key was revoked")
    return LeaseResponse(ctx, answer, in_binary=binary.preferred(request.headers.getlist("accept")))


@routes.post("/leases/{lease_id}/ack", responses=declared(400, 404, 409, 413, 422, 503))
async def post_ack(
    ctx: Ctx, lease_id: str, body: Annotated[LeasePart, Depends(JsonBody(LeasePart, optional=True))]
) -> AckAnswer:
    """The groups are the trainer's for good, all of the lease or those named. Idempotent; all or nothing."""
    acked = await ctx.orchestrator.ack(_lease_id(lease_id), body.group_ids)
    return AckAnswer(lease_id=lease_id, acked=acked)


@routes.post("/leases/{lease_id}/release", responses=declared(400, 404, 409, 413, 422, 503))
async def post_release(
    ctx: Ctx, lease_id: str, body: Annotated[LeasePart, Depends(JsonBody(LeasePart, optional=True))]
) -> ReleaseAnswer:
    """Give groups back: ready again, or stale where they have become too old."""
    released = await ctx.orchestrator.release(_lease_id(lease_id), body.group_ids)
    return ReleaseAnswer(lease_id=lease_id, released=released)


@routes.post("/leases/{lease_id}/renew", responses=declared(400, 404, 409, 413, 422, 503))
async def post_renew(
    ctx: Ctx, lease_id: str, body: Annotated[RenewBody, Depends(JsonBody(RenewBody, optional=True))]
) -> RenewAnswer:
    """Extend a live lease to `lease_s` seconds from now."""
    lease = await ctx.orchestrator.renew(_lease_id(lease_id), body.lease_s)
    return RenewAnswer(lease_id=lease.lease_id, expires_at=wire.timestamp(lease.expires_at))


def _check_min_groups(min_groups: int, max_groups: int, settings: Settings) -> None:
    """More than can ever be ready at once would wait for ever."""
    bounds = {"max_groups": max_groups, "groups.max_ready_groups": settings.groups.max_ready_groups}
    if settings.dispatch.admission == "pace":
        pace = (settings.groups.max_staleness + 1) * settings.dispatch.groups_per_step
        bounds["the pace bound (max_staleness + 1) * groups_per_step"] = pace
    for name, bound in bounds.items():
        if min_groups > bound:
            raise InvalidField(f"min_groups: {min_groups} is above {name}, which is {bound}", field="min_groups")


def _lease_id(text: str) -> str:
    if len(text) > MAX_LEASE_ID or not text.isprintable():
        raise NotFound("no such lease")
    return text


@asynccontextmanager
async def _watched(receive: Receive) -> AsyncIterator[asyncio.Future[None]]:
    """A future that completes when the caller hangs up. The request's body must have been read."""
    watch = asyncio.create_task(_hung_up(receive), name="hang-up-watch")
    try:
        yield watch
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class LeaseResponse(Response):
    """A lease written chunk by chunk; abandons it where the caller is gone before the end."""

    media_type = "application/json"

    def __init__(self, ctx: Context, answer: views.LeaseAnswer, *, in_binary: bool = False) -> None:
        super().__init__()
        del self.headers["content-length"]  # JSON's is not known before the last chunk
        self._ctx = ctx
        self._answer = answer
        self._in_binary = in_binary

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lease = self._answer.lease
        try:
            async with _watched(receive) as gone:
                delivered = await self._deliver(send, gone.done)
        except BaseException:
            # Cancelled, or an answer that could not be written: the groups must not wait for the lease's end.
            if lease is not None:
                await asyncio.shield(_in_background(self._ctx.orchestrator.abandon(lease)))
            raise
        if lease is not None and not delivered:
            await self._ctx.orchestrator.abandon(lease)

    async def _deliver(self, send: Send, gone: Callable[[], bool]) -> bool:
        """Whether the caller was there until the end."""
        pieces = await self._off_loop(self._encoded)
        chunk = await self._off_loop(_take, pieces)
        if gone():
            return False
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while chunk:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            chunk = await self._off_loop(_take, pieces)
            if gone():
                return False
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True

    async def _off_loop(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """In a thread, unless there is no group: that is no work."""
        if self._answer.lease is None:
            return work(*args, **kwargs)
        return await asyncio.to_thread(work, *args, **kwargs)

    def _encoded(self) -> Iterator[bytes | memoryview]:
        """The body in pieces; sets the headers that go with it."""
        sampling = self._ctx.settings.sampling.request_fields()
        if self._in_binary and (file := binary.lease_file(self._answer, sampling)) is not None:
            self.headers["content-type"] = binary.MEDIA_TYPE
            self.headers["content-length"] = str(file.size)
            return file.pieces
        return wire.lease_pieces(self._answer, sampling)


def _take(pieces: Iterator[bytes | memoryview]) -> bytes:
    """The next chunk; empty at the end."""
    taken: list[bytes | memoryview] = []
    size = 0
    while size < CHUNK_BYTES and (piece := next(pieces, None)) is not None:
        taken.append(piece)
        size += len(piece)
    return b"".join(taken)


def _in_background(call: Awaitable[None]) -> asyncio.Future[Any]:
    """Runs to its end although the request's own task is being cancelled."""
    return asyncio.ensure_future(call)
