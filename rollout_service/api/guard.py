"""The lock in front of every route: decides by `access.py` before the router and the body.

What always holds: nothing behind it runs for a call it refused; what it refuses is a problem document and is counted by
the route's template like any other answer; a key reaches no log and no answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_service.api.access import LOOKING, Access
from rollout_service.api.problems import problem_of
from rollout_service.errors import RolloutServiceError

CALLER = "rollout_service.caller"
"""Where the scope holds whose key it is; None where nobody needed one."""


def may_look(access: Access, request: Request) -> bool:
    """Whether the caller of an open route may see more of it than everybody."""
    if not access.required:
        return True
    caller = request.scope.get(CALLER)
    return caller is not None and caller.role in LOOKING


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, access: Access, routes: Sequence[BaseRoute]) -> None:
        self.app, self._access, self._routes = app, access, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            scope[CALLER] = self._access.decide(self._route(scope), scope["headers"])
        except RolloutServiceError as error:
            await problem_of(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _route(self, scope: Scope) -> str:
        """Method and template of the route that will answer; "" where there is none."""
        for route in self._routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                scope["route"] = route  # the Edge counts by it
                return f"{scope['method']} {getattr(route, 'path', '')}"
        return ""
