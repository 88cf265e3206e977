"""Every error that leaves the service is one RFC 9457 problem document.

What always holds: `type` is stable (`/problems/<slug>`), `detail` says what to do something about, members beside the
four are the error's facts; an exception nobody foresaw shows nothing of its insides and is logged with its traceback.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from rollout_service.errors import (
    BodyTooLarge,
    InvalidField,
    QueueFull,
    RolloutServiceError,
    StoreUnavailable,
    Unauthorized,
)
from rollout_service.settings.problems import dotted, wrong_with

OBJECT = "an object"
"""What a mapping is called in JSON."""
MEDIA_TYPE = "application/problem+json"
CLIENT_GONE = 499
"""The status proxies use in their logs for a caller that hung up; nobody reads this answer."""


class Problem(BaseModel):
    """RFC 9457 problem document; further members are facts of the error."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="Stable: /problems/ and a slug.", examples=["/problems/conflict"])
    title: str
    status: int
    detail: str = Field(description="What is wrong, for a person who can do something about it.")


def declared(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route: the problems it may answer with, and that any other error is one too."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    answers: dict[int | str, dict[str, Any]] = {
        status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses
    }
    return answers | {"default": {"description": "Any other problem", "content": content}}


def problem(
    status: int,
    slug: str,
    title: str,
    detail: str,
    facts: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """A problem as a response."""
    document = {"type": f"/problems/{slug}", "title": title, "status": status, "detail": _text(detail)}
    document |= {name: value for name, value in _plain(facts or {}).items() if name not in document}
    return Response(msgspec.json.encode(document), status, headers, MEDIA_TYPE)


def problem_of(error: RolloutServiceError) -> Response:
    """The problem document of one of our errors."""
    headers: dict[str, str] = {}
    if isinstance(error, QueueFull):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, StoreUnavailable):
        headers["retry-after"] = "1"
    elif isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    elif isinstance(error, BodyTooLarge):
        headers["connection"] = "close"  # the rest of the body is not worth reading
    return problem(error.status, error.type, error.title, str(error), error.facts, headers)


def internal_error() -> Response:
    """What a caller sees of a fault of ours."""
    return problem(500, "internal", "Internal error", "a fault of the service; its log has the traceback")


def install(app: FastAPI) -> None:
    """Make `app` answer every error with a problem document."""
    app.add_exception_handler(RolloutServiceError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _gone)


async def _ours(_: Request, error: Exception) -> Response:
    assert isinstance(error, RolloutServiceError)  # noqa: S101 - registered for this type only
    return problem_of(error)


async def _invalid(_: Request, error: Exception) -> Response:
    """Query and path parameters; bodies are checked in body.py."""
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for this type only
    first = error.errors()[0]
    name = dotted(tuple(first["loc"])[1:]) or str(first["loc"][0])
    return problem_of(InvalidField(f"{name}: {wrong_with(first, table=OBJECT)}", field=name))


async def _http(request: Request, error: Exception) -> Response:
    """What the router itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for this type only
    status = HTTPStatus(error.status_code)
    detail = {404: "there is nothing at this path", 405: "this path does not take this method"}
    slug = status.phrase.lower().replace(" ", "-")
    text = detail.get(error.status_code) or str(error.detail)
    headers = {"allow": ", ".join(_methods(request))} if error.status_code == 405 else error.headers
    return problem(error.status_code, slug, status.phrase.capitalize(), text, headers=headers)


def _methods(request: Request) -> list[str]:
    """Every method the path takes; the router looks at the first route of a path only."""
    routes = [route for route in request.app.routes if isinstance(route, APIRoute)]
    return sorted({m for route in routes if route.path_regex.match(request.url.path) for m in route.methods or ()})


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _text(value) if isinstance(value, str) else value for name, value in facts.items()}


def _text(value: str) -> str:
    """Valid Unicode whatever a caller or an engine sent."""
    return value.encode("utf-8", "backslashreplace").decode()
