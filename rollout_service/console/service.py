"""Calls to the service, and what is said when they fail.

What always holds: a call gives an answer of the expected shape or raises ServiceProblem with one line that says what
failed, where, and what to do; redirects are not followed, for the key is meant for the configured address alone; no
message holds the key.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from rollout_service.console.shapes import Live, Shape
from rollout_service.console.text import plain
from rollout_service.errors import ConfigError

if TYPE_CHECKING:
    import httpx

S = TypeVar("S", bound=Shape)

DEFAULT_URL = "http://127.0.0.1:8080"
URL_VARIABLE = "ROLLOUT_SERVICE_URL"
KEY_VARIABLE = "ROLLOUT_SERVICE_KEY"
TIMEOUT_S = 10.0
SILENCE_S = 15.0
"""`GET /events` says something every 5 s; one that has been silent for three times as long is gone."""
MAX_ANSWER = 256 * 2**20
"""Bytes of one answer: a page of 1,000 groups is far below, and what answers endlessly is no rollout-service."""
MAX_KEY = 4096


class ServiceProblem(Exception):
    """The service cannot be reached, refuses, or is something else. The text is one line of plain characters."""

    def __init__(self, text: str, *, passing: bool = False) -> None:
        super().__init__(plain(text, 1000))
        self.passing = passing
        """Whether the same call may well succeed a little later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Which service, and the key to it."""

    url: str
    """Base URL without a slash at its end."""
    key: str = field(default="", repr=False)


def target(url: str | None, key_file: Path | None, environ: Mapping[str, str] = os.environ) -> Target:
    """Options go before the environment. Raises ConfigError, which never repeats what might hold a key."""
    given, where = (url, "--url") if url is not None else (environ.get(URL_VARIABLE) or DEFAULT_URL, URL_VARIABLE)
    return Target(url=_base(given, where), key=_key(key_file, environ))


def _base(url: str, where: str) -> str:
    problem = f"{where}: expected http://host:port or https://host:port"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError(problem) from None
    if parts.username is not None or parts.password is not None:
        raise ConfigError(f"{where}: credentials do not belong in a URL; give a key by {KEY_VARIABLE} or --key-file")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not url.isprintable() or " " in url:
        raise ConfigError(problem)
    if parts.query or parts.fragment:
        raise ConfigError(f"{where}: the service's base URL has no query and no fragment")
    return url.rstrip("/")


def _key(key_file: Path | None, environ: Mapping[str, str]) -> str:
    if key_file is None:
        return _checked(environ.get(KEY_VARIABLE, ""), KEY_VARIABLE)
    try:
        with key_file.open(encoding="utf-8") as opened:
            text = opened.read(MAX_KEY + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"--key-file {key_file}: {reason}") from None
    key = _checked(text, f"--key-file {key_file}")
    if not key:
        raise ConfigError(f"--key-file {key_file} is empty: expected one line, the key")
    return key


def _checked(text: str, where: str) -> str:
    key = text.strip()
    if len(key) > MAX_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{where}: expected one line, the key, and nothing else")
    return key


class Service:
    """One service. `get` and `shape` block; `read` and `events` are for the event loop."""

    def __init__(self, to: Target) -> None:
        self.url = to.url
        self._has_key = bool(to.key)
        self._headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {to.key}"} if to.key else {})

    def get(self, path: str, params: Mapping[str, Any] | None = None) -> bytes:
        """The body of a 200."""
        import httpx

        try:
            with (
                httpx.Client(**self._options()) as client,
                client.stream("GET", self.url + path, params=params) as answer,
            ):
                body = bytearray()
                for piece in answer.iter_bytes():
                    body += piece
                    self._check_size(path, body)
        except httpx.HTTPError as error:
            raise self._unreachable(path, error) from None
        if answer.status_code != 200:
            raise self._refused(path, answer.status_code, bytes(body))
        return bytes(body)

    def shape(self, kind: type[S], path: str, params: Mapping[str, Any] | None = None) -> S:
        """The answer as a `kind`."""
        return self.read(kind, path, self.get(path, params))

    def read(self, kind: type[S], path: str, body: bytes) -> S:
        """`body`, which came from `path`, as a `kind`."""
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ServiceProblem(
                f"GET {self.url}{path}: what answered is no rollout-service, or of another version ({error}); "
                f"is --url right?"
            ) from None

    async def events(self) -> AsyncIterator[Live]:
        """The live view, again and again, until the service ends the stream."""
        import httpx

        path = "/events"
        options = self._options() | {"timeout": httpx.Timeout(TIMEOUT_S, read=SILENCE_S)}
        try:
            async with httpx.AsyncClient(**options) as client, client.stream("GET", self.url + path) as answer:
                rest = bytearray()
                async for piece in answer.aiter_bytes():
                    rest += piece
                    self._check_size(path, rest)
                    while answer.status_code == 200 and (end := rest.find(b"\n")) >= 0:
                        line = bytes(rest[:end])
                        del rest[: end + 1]
                        if line.strip():
                            yield self.read(Live, path, line)
                if answer.status_code != 200:
                    raise self._refused(path, answer.status_code, bytes(rest))
        except httpx.HTTPError as error:
            raise self._unreachable(path, error) from None

    def _options(self) -> dict[str, Any]:
        verify = self.url.startswith("https:")  # without TLS the certificates need not be read, which takes a while
        return {"headers": self._headers, "timeout": TIMEOUT_S, "follow_redirects": False, "verify": verify}

    def _check_size(self, path: str, body: bytearray) -> None:
        if len(body) > MAX_ANSWER:
            raise ServiceProblem(f"GET {self.url}{path}: the answer does not end; is --url right?")

    def _unreachable(self, path: str, error: httpx.HTTPError) -> ServiceProblem:
        import httpx

        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            why, do = "nothing answers", f"is the service running? --url or {URL_VARIABLE} says where"
        elif isinstance(error, httpx.TimeoutException):
            why, do = "no answer in time", "the service may be overloaded; try again"
        else:
            why, do = "the connection broke", "try again"
        detail = f" ({error})" if str(error) else ""
        return ServiceProblem(f"GET {self.url}{path}: {why}{detail}; {do}", passing=True)

    def _refused(self, path: str, status: int, body: bytes) -> ServiceProblem:
        where = f"GET {self.url}{path}"
        detail = _detail(body)
        if status == 401:
            given = "refuses this key" if self._has_key else "wants a key"
            do = f"set {KEY_VARIABLE} or give --key-file FILE, a key of role read or more"
            return ServiceProblem(f"{where}: the service {given} (401{detail}); {do}")
        if status == 403:
            return ServiceProblem(f"{where}: refused (403{detail}); a key of another role, or another --url, is needed")
        if 300 <= status < 400:
            return ServiceProblem(
                f"{where}: answered {status}, a redirect, which is not followed; give the final --url"
            )
        if status == 404 and not detail.strip(": "):
            return ServiceProblem(f"{where}: there is no such thing (404); is --url that of a rollout-service?")
        passing = status in (408, 429) or status >= 500
        return ServiceProblem(f"{where}: answered {status}{detail}", passing=passing)


class _Problem(Shape, frozen=True, kw_only=True):
    detail: str


def _detail(body: bytes) -> str:
    """`: ` and the problem document's own words; nothing where there are none."""
    try:
        return f": {msgspec.json.decode(body, type=_Problem).detail}"
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ""
