"""URLs of the configuration: http(s) with a host, no credentials (they would reach logs and metrics), one spelling.

Messages never repeat the URL: it may hold what is refused.
"""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

import idna

MAX_LENGTH = 2048


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


def same_engine(url: str) -> tuple[str, str, int, str]:
    """Equal for two spellings of one engine's URL (a default port, the host's letters)."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return parts.scheme, parts.hostname or "", port, parts.path
