"""Routers of this API: JSON bodies stand in OpenAPI, and every route declares its problems."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute

from rollout_service.api.body import JsonBody


class Route(APIRoute):
    """A route whose `JsonBody` dependency shows up as its request body."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for dependency in self.dependant.dependencies:
            if isinstance(dependency.call, JsonBody):
                self.openapi_extra = {**(self.openapi_extra or {}), "requestBody": dependency.call.openapi()}


def router(tag: str) -> APIRouter:
    """A router of one resource."""
    return APIRouter(tags=[tag], route_class=Route, redirect_slashes=False)
