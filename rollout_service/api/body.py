"""Request bodies: strict JSON of bounded size under any content type.

What always holds: a route that asks for a `JsonBody(Model)` gets a checked Model or is not called; what is no JSON
object is a 400, a body over the limit a 413, a wrong type, an unknown field or a value out of bounds a 422 that names
the field. Nothing is coerced.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError

from rollout_service.api.guard import CALLER
from rollout_service.api.problems import OBJECT
from rollout_service.errors import BadRequest, BodyTooLarge, BodyTooSlow, InvalidField, Unauthorized
from rollout_service.settings.problems import problems_of

MAX_BODY_BYTES = 64 * 2**20
"""10,000 prompts of 1,000 tokens fit well; one call cannot fill the memory."""
MAX_NESTING = 100
"""Levels of nesting; fields have bounds of their own below it, and readers that recurse are safe above it."""
MOST = {(b"[", b"{"): 500_000, (b":",): 2_000_000, (b",",): 12_000_000}
"""Of characters that begin a value: 10,000 prompts with their messages and columns have some 100,000."""
MAX_FIELDS = 64
_HALF = re.compile(
    rb"(?:[^\\]++|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\(?!u[dD][89a-fA-F]..).)*+(\\u[dD][89a-fA-F][0-9a-fA-F]{2})",
    re.DOTALL,
)
"""Up to the first character that is escaped by one of its halves alone; without backtracking."""
_HALVES = re.compile("truncated|surrogate")
"""In what the decoder says of half a character."""
BODY_S = 120.0
"""For a whole body: 64 MiB at 5 Mbit/s."""
LARGE_BYTES = 2**20
LARGE_AT_ONCE = 4
"""Bodies above LARGE_BYTES held at once; others wait their turn."""
OFF_LOOP_BYTES = 64 * 2**10
"""Larger bodies are decoded in a thread: a millisecond of decoding is the most the event loop should give."""

M = TypeVar("M", bound=BaseModel)


class JsonBody(Generic[M]):
    """Dependency that reads the body as a `model`. `optional`: an empty body counts as `{}`."""

    def __init__(self, model: type[M], *, optional: bool = False) -> None:
        self.model = model
        self.optional = optional

    async def __call__(self, request: Request) -> M:
        context = request.app.state.context
        async with context.bodies.room() as room:
            content = await read_body(request, room)
            # The key may have been revoked while the body was on its way, which can take BODY_S.
            if not context.access.knows(request.scope.get(CALLER)):
                raise Unauthorized("the API key was revoked")
            if self.optional and not content.strip():
                content = b"{}"
            if len(content) > OFF_LOOP_BYTES:
                return await asyncio.to_thread(self._checked, content)
            return self._checked(content)

    def _checked(self, content: bytes) -> M:
        value = decode_object(content)
        if len(value) > MAX_FIELDS:  # each would be told of, and only the first is shown
            raise InvalidField(f"{len(value)} fields: more than any call takes")
        try:
            return self.model.model_validate(value)
        except ValidationError as error:
            first = problems_of(error, self.model, table=OBJECT)[0]
            raise InvalidField(
                f"{first.field}: {first.what}" if first.field else first.what, field=first.field
            ) from None

    def openapi(self) -> dict[str, Any]:
        """The operation's `requestBody`."""
        schema = {"$ref": f"#/components/schemas/{self.model.__name__}"}
        return {"required": not self.optional, "content": {"application/json": {"schema": schema}}}


class Bodies:
    """Room for bodies in memory: small ones come and go, of large ones only a few are held at once."""

    def __init__(self) -> None:
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)

    @asynccontextmanager
    async def room(self) -> AsyncIterator[Room]:
        room = Room(self._large)
        try:
            yield room
        finally:
            room.leave()


class Room:
    """What one body takes."""

    def __init__(self, large: asyncio.Semaphore) -> None:
        self._large = large
        self._is_large = False

    async def has(self, size: int) -> None:
        """Wait for room for `size` bytes; what is not read meanwhile stays with the caller."""
        if size > LARGE_BYTES and not self._is_large:
            await self._large.acquire()
            self._is_large = True

    def leave(self) -> None:
        if self._is_large:
            self._large.release()


async def read_body(request: Request, room: Room) -> bytes:
    """The body, at most MAX_BODY_BYTES of it. Raises BodyTooLarge, BodyTooSlow."""
    try:
        async with asyncio.timeout(BODY_S):
            return await _read(request, room)
    except TimeoutError:
        raise BodyTooSlow(f"the body was not complete within {BODY_S:g} s") from None


async def _read(request: Request, room: Room) -> bytes:
    too_large = BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes; send fewer prompts at a time")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > MAX_BODY_BYTES:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise too_large
        parts.append(part)
        await room.has(size)
    return b"".join(parts)


def decode_object(content: bytes) -> dict[str, Any]:
    """`content` as a JSON object. Raises BadRequest."""
    # By characters, those in texts too: what is decoded below costs hundreds of bytes a value, and holds every thread.
    for characters, most in MOST.items():
        if sum(content.count(character) for character in characters) > most:
            raise BodyTooLarge(
                f"the body has more than {most} of {b' and '.join(characters).decode()}; send it in parts"
            )
    try:
        value = msgspec.json.decode(content)
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not valid UTF-8 (byte {error.start})") from None
    except msgspec.DecodeError as error:
        if not content.strip():
            raise BadRequest("the body is empty") from None
        # The decoder looks for the other half behind what is there, and may find that the body ends too soon.
        why = (_half_a_character(content) if _HALVES.search(str(error)) else "") or str(error)
        raise BadRequest(f"the body is not JSON: {why}") from None
    if not isinstance(value, dict):
        raise BadRequest("the body is not a JSON object")
    if _deeper_than(value, MAX_NESTING):
        raise BadRequest(f"the body is nested deeper than {MAX_NESTING} levels")
    return value


def _half_a_character(content: bytes) -> str:
    """Where a character is escaped by one half alone, near enough to the start to look for; nothing where none is."""
    found = _HALF.match(content, 0, OFF_LOOP_BYTES)
    if found is None or found.end() > OFF_LOOP_BYTES - 6:  # the other half may stand behind what was looked at
        return ""
    return f"{found[1].decode()} is half a character (byte {found.start(1)})"


def _deeper_than(value: Any, levels: int) -> bool:
    """Without recursion: readers further on recurse, and must not fail on what was let in here."""
    layer = [value]
    for _ in range(levels + 1):
        layer = [
            child
            for item in layer
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not layer:
            return False
    return True
