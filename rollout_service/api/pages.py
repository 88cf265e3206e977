"""The page for people: files that never change while the service runs, under a policy that lets them load nothing else.

What always holds: only files of the page's folder are answered, read once at start; nothing of the run is in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from importlib.resources import files
from typing import Any

from fastapi import Request
from starlette.responses import Response

from rollout_service.api.problems import declared
from rollout_service.api.routing import router
from rollout_service.errors import NotFound

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
INDEX = "index.html"
_PAGE: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {name.partition(";")[0]: {"schema": {"type": "string"}} for name in MEDIA_TYPES.values()},
        "description": "A file of the page",
    },
    304: {"description": "The file is the one the caller has"},
}

routes = router("page")


@routes.get("/", response_class=Response, responses={**_PAGE, **declared()})
async def get_page(request: Request) -> Response:
    """The live page."""
    return _answer(request, INDEX)


@routes.get("/page/{name}", response_class=Response, responses={**_PAGE, **declared(404)})
async def get_page_file(request: Request, name: str) -> Response:
    """What the live page is made of."""
    return _answer(request, name)


def page_files() -> Mapping[str, bytes]:
    """Name → content of every file of the page."""
    folder = files("rollout_service.api") / "page"
    return {
        item.name: item.read_bytes()
        for item in folder.iterdir()
        if item.is_file() and item.name.rpartition(".")[2] in MEDIA_TYPES
    }


def _answer(request: Request, name: str) -> Response:
    content = request.app.state.page.get(name)
    if content is None:
        raise NotFound(f"the page has no file {name[:40]!a}")
    tag = f'"{blake2b(content, digest_size=12).hexdigest()}"'
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "etag": tag,
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
    }
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    headers["content-type"] = MEDIA_TYPES[name.rpartition(".")[2]]
    return Response(content, headers=headers)
