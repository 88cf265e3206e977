"""URLs of the configuration: http(s) with a host, no credentials (they would reach logs and metrics), one spelling.

An entry of `[[engines]]` may also name where engines are listed: a DNS name, or a file. Messages never repeat the URL:
it may hold what is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import idna

MAX_LENGTH = 2048
DNS_SCHEME, FILE_SCHEME = "dns://", "file:"
_DNS_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_][a-z0-9_-]{0,62})*\.?", re.ASCII)
_NUMERIC = re.compile(r"(.*\.)?([0-9]+|0x[0-9a-f]*)\.?", re.ASCII)
"""What resolvers read as a number wherever it is the last label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DnsName:
    """An engine at each of its addresses, over http."""

    host: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginesFile:
    """A file with the URL of an engine on each line."""

    path: Path
    """Relative to the working directory, or absolute."""


def http_url(value: str, *, secrets: str = "engines take a key by api_key_env") -> SplitResult:
    """The parts of an http(s) URL. ValueError says what is wrong with it; `secrets`: where credentials belong."""
    if not value:
        raise ValueError("expected an http:// or https:// URL, got nothing")
    if len(value) > MAX_LENGTH or not value.isprintable() or " " in value:
        raise ValueError(f"expected a URL of at most {MAX_LENGTH} characters without spaces or control characters")
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"not a URL: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"credentials do not belong in a URL; {secrets}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected an http:// or https:// URL with a host")
    if "xn--" in parts.hostname or not parts.hostname.isascii():
        try:  # as HTTP clients do before they connect
            idna.decode(idna.encode(parts.hostname, uts46=True))
        except UnicodeError:
            raise ValueError("the host is no international name") from None
    if port == 0:
        raise ValueError("port 0 is no port to connect to")
    if parts.fragment:
        raise ValueError("a fragment (#…) has no meaning here")
    return parts


def engine_url(value: str) -> str:
    """An engine's base URL, without a slash at its end."""
    parts = http_url(value)
    if parts.query:
        raise ValueError("a query (?…) has no meaning in an engine's base URL")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError("expected the server's base URL without /v1")
    return parts._replace(netloc=parts.netloc.lower(), path=parts.path.rstrip("/")).geturl()


def engines_source(value: str) -> DnsName | EnginesFile | None:
    """Where `value` says engines are listed; None where it is none of these schemes. ValueError says what is wrong."""
    if not value.lower().startswith((DNS_SCHEME, FILE_SCHEME)):
        return None
    if len(value) > MAX_LENGTH or not value.isprintable():
        raise ValueError(f"at most {MAX_LENGTH} characters, and no control characters, are expected")
    scheme, _, rest = value.partition(":")
    return _engines_file(rest) if scheme.lower() == "file" else _dns_name(rest.removeprefix("//").lower())


def engine_entry(value: str) -> str:
    """The `url` of an `[[engines]]` table in one spelling: an engine's base URL, or where engines are listed."""
    match engines_source(value):
        case DnsName(host=host, port=port):
            return f"{DNS_SCHEME}{host}:{port}"
        case EnginesFile(path=path):
            return f"{FILE_SCHEME}{path}"
        case None:
            return engine_url(value)


def _dns_name(rest: str) -> DnsName:
    if "@" in rest:
        raise ValueError("credentials do not belong in a URL; engines take a key by api_key_env")
    host, colon, port = rest.partition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port, re.ASCII) or not 0 < int(port) < 2**16:
        raise ValueError("expected dns://name:port, with a port from 1 to 65535 and nothing behind it")
    if _NUMERIC.fullmatch(host):
        raise ValueError("dns:// takes a name; an engine at an address is http://address:port")
    if not _DNS_NAME.fullmatch(host):
        raise ValueError("expected dns://name:port, the name of letters, digits, hyphens and dots (others as xn--)")
    return DnsName(host=host, port=int(port))


def _engines_file(rest: str) -> EnginesFile:
    if rest.startswith("//"):
        if not rest.startswith("///"):
            raise ValueError("expected file:relative/path or file:/absolute/path; file:// would name a host")
        rest = "/" + rest.lstrip("/")
    if not rest or rest.endswith("/") or not set(rest).isdisjoint("?#"):
        raise ValueError("expected file: and the path of a file, without ? and #")
    return EnginesFile(path=Path(rest))


def one_spelling(url: str) -> str:
    """The same for all spellings of one engine's URL (see `same_engine`), itself a URL. ValueError: it is none."""
    scheme, host, port, path = same_engine(url)
    named = f"[{host}]" if ":" in host else host
    return f"{scheme}://{named}{'' if port == (443 if scheme == 'https' else 80) else f':{port}'}{path}"


def same_engine(url: str) -> tuple[str, str, int, str]:
    """Equal for two spellings of one engine's URL (a default port, the host's letters)."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return parts.scheme, parts.hostname or "", port, parts.path.rstrip("/")
