"""The outermost layer: counts every request by its route's template, and turns what nobody foresaw into a 500.

What always holds: labels are bounded whatever a client sends; a fault of one request is logged with its traceback and
reaches neither the client nor another request.
"""

from __future__ import annotations

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_service.api.problems import CLIENT_GONE, internal_error
from rollout_service.metrics import UNMATCHED, Metrics

log = structlog.get_logger(__name__)


class Edge:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # Whatever an answer holds, a browser takes it for nothing but what its content type says.
                message = {**message, "headers": [*message["headers"], (b"x-content-type-options", b"nosniff")]}
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception:
            log.exception("request_failed", method=scope["method"], route=_route(scope))
            if status:
                raise  # half an answer is out: the server cuts the connection
            await internal_error()(scope, receive, watch)
        finally:
            self.metrics.request_answered(f"{scope['method']} {_route(scope)}", status or CLIENT_GONE)


def _route(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", None) or UNMATCHED
