"""HTTP to engines: the clients, and how much of an answer is read.

What always holds: no redirect is followed, no cookie kept, no proxy taken from the environment; nothing is decompressed
(engines are asked for plain answers, and an encoded one is refused, for a small one may unpack to any size); an answer
is read up to a limit, and what goes on beyond it has its connection closed.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import aiohttp
import httpx
from aiohttp.abc import AbstractCookieJar

from rollout_service.engines.faults import BadAnswer

KEEPALIVE_S = 2.0
"""vLLM closes idle connections after 5 s, just when a client would use them again."""
CONTROL_TIMEOUT_S = 5.0
MAX_CONTROL_ANSWER = 4 * 2**20
"""Bytes of a control route's answer, or of an error: a server's whole configuration is some 100 KB."""
BASE_ANSWER = 4 * 2**20
"""Bytes of a completion beside what grows with its tokens."""
TOKEN_BYTES = 1024
"""Bytes of one generated token: text, id and logprob are 60 to 200 (chat repeats the text as bytes); long runs of
blanks, and what JSON has to escape, are more."""
ECHO_BYTES = 16
"""Bytes of answer for a byte of request: vLLM echoes a prompt as ids, at most one a byte and 12 bytes each."""
MAX_ANSWER = 256 * 2**20
"""Whatever was asked for: a million tokens of the usual kind."""

PLAIN = {"Accept-Encoding": "identity"}


class Flight:
    """What became of the connection of one request; kept in a context variable of its task."""

    __slots__ = ("connecting", "opened")

    def __init__(self) -> None:
        self.opened = False
        """It was opened for this request."""
        self.connecting = False
        """It is being opened."""


FLIGHT: ContextVar[Flight | None] = ContextVar("rollout_engine_flight", default=None)


class _Connector(aiohttp.TCPConnector):
    """Tells a request that its connection is new. aiohttp calls this only where none could be reused."""

    async def _create_connection(self, *args: Any, **kwargs: Any) -> Any:
        if (flight := FLIGHT.get()) is not None:
            flight.opened = flight.connecting = True
        connection = await super()._create_connection(*args, **kwargs)
        if flight is not None:
            flight.connecting = False
        return connection


class EngineClients:
    """The HTTP clients all engines of a fleet share. Made inside the running loop, closed by `close`."""

    def __init__(self) -> None:
        self.generation = plain_session(_Connector(limit=0, keepalive_timeout=KEEPALIVE_S))
        # For the one retry after a stale connection: the pool may hold more stale ones, this never has any.
        self.fresh = plain_session(_Connector(limit=0, force_close=True))
        # Control calls are few: a new connection each is cheap, and a stale one would look like a dead engine.
        self.control = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            timeout=CONTROL_TIMEOUT_S,
            verify=ssl.create_default_context(),  # what aiohttp trusts, so that both paths agree
            headers=PLAIN,
            follow_redirects=False,
            trust_env=False,
        )

    async def close(self) -> None:
        await self.generation.close()
        await self.fresh.close()
        await self.control.aclose()


def plain_session(connector: aiohttp.TCPConnector, headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
    """A session whose answers `read_answer` takes. Its calls have to say `allow_redirects=False`."""
    jar: AbstractCookieJar = aiohttp.DummyCookieJar()
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=jar,
        headers={**PLAIN, **(headers or {})},
        auto_decompress=False,
        raise_for_status=False,
        trust_env=False,
    )


def answer_limit(sent: int, max_tokens: int | None, token_bytes: int = TOKEN_BYTES, most: int = MAX_ANSWER) -> int:
    """Bytes an answer may have to a request of `sent` bytes for `max_tokens` tokens (None: as many as it likes)."""
    if max_tokens is None:
        return most
    return min(most, BASE_ANSWER + ECHO_BYTES * sent + token_bytes * max_tokens)


async def read_answer(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body of `response`. BadAnswer where it is encoded, or longer than `limit`.

    Its connection is closed unless all of it was read, also where this is cancelled.

    Of an error no more than `MAX_CONTROL_ANSWER` bytes are read, and what is there is returned: it is only for people.
    """
    failed = response.status != 200
    wrong = None
    if failed:
        limit = min(limit, MAX_CONTROL_ANSWER)
    elif _encoded(response.headers):
        wrong = _encoding_words(response.headers)
    elif (response.content_length or 0) > limit:
        wrong = f"the answer is longer than {limit} bytes"
    parts: list[bytes] = []
    size = 0
    try:
        while wrong is None and (part := await response.content.readany()):
            parts.append(part)
            size += len(part)
            if size > limit:
                # What is left is not worth reading, and an endless answer has no end to wait for.
                wrong = f"the answer is longer than {limit} bytes"
    except BaseException:
        response.close()
        raise
    if wrong is not None:
        response.close()
        if not failed:
            raise BadAnswer(wrong)
    return b"".join(parts)


async def control_call(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    body: Any = None,
    timeout_s: float = CONTROL_TIMEOUT_S,
) -> tuple[int, bytes]:
    """(status, body) of a control route. Raises httpx's errors, BadAnswer as `read_answer` does."""
    # The client's own timeout bounds each wait for the socket only: callers bound the whole call.
    async with client.stream(method, url, json=body, headers=dict(headers), timeout=timeout_s) as answer:
        failed = answer.status_code != 200
        if _encoded(answer.headers) and not failed:
            raise BadAnswer(_encoding_words(answer.headers))
        content = bytearray()
        async for part in answer.aiter_raw():
            content += part
            if len(content) > MAX_CONTROL_ANSWER:
                if failed:
                    break
                raise BadAnswer(f"the answer is longer than {MAX_CONTROL_ANSWER} bytes")
        return answer.status_code, bytes(content)


def _encoded(headers: Mapping[str, str]) -> bool:
    return headers.get("content-encoding", "identity").strip().lower() not in ("", "identity")


def _encoding_words(headers: Mapping[str, str]) -> str:
    return f"the answer is encoded ({headers['content-encoding'][:40]!a}), and a plain one was asked for"
