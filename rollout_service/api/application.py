"""The API as an ASGI application; starts and owns nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema

from rollout_service import __version__
from rollout_service.api import (
    checkpoints,
    control,
    engines,
    groups,
    leases,
    live,
    live_schemas,
    pages,
    policy_version,
    probes,
    problems,
    prompts,
    schemas,
    status,
)
from rollout_service.api.access import ACCESS, undecided
from rollout_service.api.context import Context
from rollout_service.api.edge import Edge
from rollout_service.api.guard import Guard

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

_UNREFERENCED = (
    problems.Problem,
    schemas.VersionBody,
    schemas.PromptsBody,
    schemas.PromptRow,
    schemas.LeaseBody,
    schemas.LeasePart,
    schemas.RenewBody,
    schemas.CheckpointBody,
    schemas.EngineBody,
    live_schemas.LiveViewAnswer,
)
"""Models that FastAPI does not see, because bodies are read by body.py and problems written by problems.py."""


def build_api(context: Context, lifespan: Lifespan | None = None) -> FastAPI:
    """Every route over `context`."""
    app = FastAPI(
        title="rollout-service",
        version=__version__,
        summary="Asynchronous rollouts for reinforcement learning of language models",
        lifespan=lifespan,
        # Their pages load scripts from elsewhere; /openapi.json is there for tools.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    app.state.page = pages.page_files()
    for module in (policy_version, prompts, leases, groups, checkpoints, status, live, engines, control, probes, pages):
        # As they are, not through include_router: problems.py looks through them for the methods of a path.
        app.router.routes.extend(module.routes.routes)
    context.metrics.know_routes(
        f"{method} {route.path}"
        for route in app.router.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods or ())
    )
    if missing := undecided(_all_routes(app)):
        raise ValueError(f"api/access.py does not say who may call {', '.join(missing)}")
    problems.install(app)
    app.add_middleware(Guard, access=context.access, routes=app.router.routes)
    app.add_middleware(Edge, metrics=context.metrics)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]  # FastAPI's own way to extend the document
    return app


def _all_routes(app: FastAPI) -> list[str]:
    return [
        f"{method} {getattr(route, 'path', '')}"
        for route in app.router.routes
        for method in sorted(getattr(route, "methods", None) or ("?",))
    ]


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes, tags=app.openapi_tags
        )
        _, definitions = models_json_schema(
            [(model, "validation") for model in _UNREFERENCED], ref_template="#/components/schemas/{model}"
        )
        found = document.setdefault("components", {}).setdefault("schemas", {})
        document["components"]["schemas"] = {**definitions["$defs"], **found}
        _document_access(document)
        app.openapi_schema = document
    return app.openapi_schema


def _document_access(document: dict[str, Any]) -> None:
    """Each operation says which roles may call it, as api/access.py has it."""
    document["components"]["securitySchemes"] = {
        "key": {
            "type": "http",
            "scheme": "bearer",
            "description": "An API key; a service without keys asks for none.",
        }
    }
    refusals = {str(status): answer for status, answer in problems.declared(401, 403).items() if status != "default"}
    for path, operations in document["paths"].items():
        for verb, operation in operations.items():
            roles = ACCESS[f"{verb.upper()} {path}"]
            operation["security"] = [] if roles is None else [{"key": []}]
            if roles is not None:
                operation["x-roles"] = sorted(roles)
                operation["responses"] = {**refusals, **operation["responses"]}
