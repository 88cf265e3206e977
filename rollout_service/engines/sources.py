"""Where engines are listed: a DNS name, or a file. A look gives all that is listed now, or fails as a whole.

What always holds: nothing is guessed from half an answer. A name that does not resolve, a file that cannot be read, is
empty, or has one line that is no engine's URL is a `LookFailed`, never a shorter list. A file is read to `MAX_FILE`
bytes, a list has at most `MAX_LISTED` engines, and nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Protocol

from rollout_service.engines.vllm import EngineSpec
from rollout_service.settings.urls import DnsName, EnginesFile, engine_url, engines_source, same_engine

MAX_FILE = 2**20
"""Bytes of a file of engines."""
MAX_LISTED = 1024
"""Engines of one source; also the most `registration.max_engines` may be."""

Resolve = Callable[[str, int], Awaitable[Collection[str]]]
"""(host, port) -> its numeric addresses, IPv4 and IPv6. Raises OSError (gaierror is one), UnicodeError."""


class LookFailed(Exception):
    """A source could not be read, or does not hold what it should; the text is for people."""


class Source(Protocol):
    """Lists engines."""

    @property
    def name(self) -> str:
        """As it is configured."""

    async def look(self) -> Sequence[EngineSpec]:
        """What it lists now, each engine once. Raises LookFailed."""


class DnsSource:
    """An engine at each address of a name. A name with both kinds of addresses lists both: an engine that is reached by
    either is listed twice then, so such a name should have one kind."""

    def __init__(self, spec: EngineSpec, where: DnsName, resolve: Resolve) -> None:
        """`spec`: of each engine found, but for its URL."""
        self._spec = spec
        self._where = where
        self._resolve = resolve

    @property
    def name(self) -> str:
        return self._spec.url

    async def look(self) -> Sequence[EngineSpec]:
        try:
            found = await self._resolve(self._where.host, self._where.port)
        except (OSError, UnicodeError) as error:
            raise LookFailed(f"{self._where.host} cannot be resolved: {_why(error)}") from None
        if not found:
            raise LookFailed(f"{self._where.host} has no address")
        return _specs(self._spec, [_address_url(address, self._where.port) for address in sorted(found)])


class FileSource:
    """An engine on each line of a file; what follows a `#` is a comment.

    Write it anew beside its place and rename it: half a file would be taken for all of it.
    """

    def __init__(self, spec: EngineSpec, where: EnginesFile) -> None:
        """`spec`: of each engine found, but for its URL."""
        self._spec = spec
        self._where = where

    @property
    def name(self) -> str:
        return self._spec.url

    async def look(self) -> Sequence[EngineSpec]:
        return _specs(self._spec, await asyncio.to_thread(read_engines, self._where.path))


def source_of(spec: EngineSpec, resolve: Resolve | None = None) -> Source | None:
    """The source that `spec.url` names; None where it is one engine. `resolve`: getaddrinfo, unless given.

    Raises ValueError.
    """
    match engines_source(spec.url):
        case DnsName() as where:
            return DnsSource(spec, where, resolve or addresses_of)
        case EnginesFile() as where:
            return FileSource(spec, where)
        case None:
            return None


async def addresses_of(host: str, port: int) -> Collection[str]:
    """What the machine's resolver says of `host`."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {str(entry[4][0]) for entry in found}


def read_engines(path: Path) -> list[str]:
    """The engines' URLs in the file at `path`. Blocks. Raises LookFailed."""
    try:
        # Without O_NONBLOCK a pipe would be waited for.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise LookFailed(f"{path} is no file")
            with os.fdopen(file, "rb", closefd=False) as reader:
                raw = reader.read(MAX_FILE + 1)
        finally:
            os.close(file)
    except OSError as error:
        raise LookFailed(f"{path} cannot be read: {_why(error)}") from None
    if len(raw) > MAX_FILE:
        raise LookFailed(f"{path} has more than {MAX_FILE} bytes")
    if not raw.strip():
        # Just being written, more likely than meant; a comment says that it is meant.
        raise LookFailed(f"{path} is empty; where there are no engines for now, write a comment (#) there")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LookFailed(f"{path} is not UTF-8 (byte {error.start})") from None
    urls = []
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.partition("#")[0].strip()
        if content:
            try:
                urls.append(engine_url(content))
            except ValueError as error:
                raise LookFailed(f"{path}, line {number}: {error}") from None
    return urls


def _address_url(address: str, port: int) -> str:
    try:
        ip = ip_address(address)
    except ValueError:
        raise LookFailed(f"{address[:80]!a} is no address") from None
    if isinstance(ip, IPv6Address) and ip.scope_id is not None:
        raise LookFailed(f"{ip} is an address of one network interface; no engine's URL can name it")
    return f"http://[{ip}]:{port}" if isinstance(ip, IPv6Address) else f"http://{ip}:{port}"


def _specs(spec: EngineSpec, urls: Sequence[str]) -> Sequence[EngineSpec]:
    found = {same_engine(url): replace(spec, url=url) for url in urls}
    if len(found) > MAX_LISTED:
        raise LookFailed(f"{len(found)} engines; at most {MAX_LISTED} are taken")
    return list(found.values())


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
