"""Which engines may be added over HTTP: patterns of addresses, matched against the parsed URL.

What always holds: nothing is resolved, decoded or guessed. A URL is matched only in its plain spelling (ASCII, decimal
port, a name of letters, digits and hyphens, an address as Python prints it), and everything else is refused: other
spellings of numeric addresses (2130706433, 0x7f.1, 127.1), IPv4 inside IPv6, a trailing dot, percent-encoding, names
beyond ASCII. What is contacted is made anew from the parts that were matched. A name pattern never allows a numeric
address, and a network never allows a name. An allowed name is trusted with its DNS: whoever can change where it points
decides which machine is asked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from pydantic import Field, field_validator

from rollout_service.errors import EngineNotAllowed, InvalidField
from rollout_service.settings.tables import Table, environment_name
from rollout_service.settings.urls import engine_url

DEFAULT_PORTS = {"http": 80, "https": 443}
EXPECTED = "expected scheme://host:port, host a name, *.suffix, an address or a network, port a number or *"

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)
_NUMERIC_END = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)", re.ASCII)
"""What resolvers and browsers read as a number wherever it is the last label."""
_PORT = r"[1-9][0-9]{0,4}"
_URL = re.compile(
    rf"(?P<scheme>https?)://(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(?P<port>{_PORT}))?"
    r"(?P<path>(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*)",
    re.ASCII,
)
_PATTERN = re.compile(rf"(?P<scheme>https?)://(?P<host>[^\[\]@?#\s]+|\[[^\[\]]+\]):(?P<port>{_PORT}|\*)", re.ASCII)


class NotPlain(ValueError):
    """A URL in a spelling that is not matched against patterns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where an engine is, taken apart."""

    scheme: str
    host: str
    """Lower case, without brackets."""
    ip: IPv4Address | IPv6Address | None
    """The host, where it is no name."""
    port: int
    """The one written, or the scheme's own."""
    path: str
    """Empty, or with a slash in front."""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if isinstance(self.ip, IPv6Address) else self.host
        port = "" if self.port == DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """Addresses that are allowed. Exactly one of `name`, `suffix` and `network` is set."""

    scheme: str
    name: str | None = None
    suffix: str | None = None
    """With its dot in front: any name that ends so, at any depth, and not the suffix itself."""
    network: IPv4Network | IPv6Network | None = None
    """A single address is a network of one."""
    port: int | None
    """None: every port."""

    def allows(self, address: Address) -> bool:
        if address.scheme != self.scheme or self.port not in (None, address.port):
            return False
        if self.network is not None:
            return address.ip is not None and address.ip in self.network
        if address.ip is not None:
            return False
        if self.suffix is not None:
            return address.host.endswith(self.suffix)
        return address.host == self.name


class RegistrationSettings(Table):
    """`[registration]`: engines that `POST /engines` may add."""

    allowed: list[str] = Field(
        default=[],
        max_length=64,
        description="Patterns scheme://host:port; host: a name, *.suffix, an address or a network (10.0.0.0/8, "
        "[fd00::/8]); port: a number or *. None: no engine can be added. Names are trusted with their DNS.",
    )
    max_engines: int = Field(default=64, ge=1, le=1024, description="Engines in all, the configured ones included.")
    api_key_env: str = Field(
        default="", description="Name of the environment variable that holds the API key of added engines."
    )

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """`allowed`, read."""
        return tuple(map(read_pattern, self.allowed))

    @field_validator("allowed")
    @classmethod
    def _patterns(cls, value: list[str]) -> list[str]:
        for text in value:
            read_pattern(text)
        return value

    @field_validator("api_key_env")
    @classmethod
    def _a_name(cls, value: str) -> str:
        return environment_name(value)


def read_pattern(text: str) -> Pattern:
    """`text` as a pattern. ValueError says what is wrong with it."""
    found = _PATTERN.fullmatch(text.lower()) if text.isascii() else None
    if found is None:
        raise ValueError(f"{EXPECTED}, got {text[:80]!a}")
    scheme, host, port = found["scheme"], found["host"], None if found["port"] == "*" else int(found["port"])
    if port is not None and port > 65_535:
        raise ValueError(f"no port is above 65535, got {text[:80]!a}")
    if host.startswith("["):
        return Pattern(scheme=scheme, network=_network(host[1:-1], text, version=6), port=port)
    if "/" in host or _NUMERIC_END.fullmatch(host):
        return Pattern(scheme=scheme, network=_network(host, text, version=4), port=port)
    name = host.removeprefix("*.")
    if not _NAME.fullmatch(name):
        raise ValueError(f"{EXPECTED}, got {text[:80]!a}")
    if name != host:
        return Pattern(scheme=scheme, suffix=f".{name}", port=port)
    return Pattern(scheme=scheme, name=name, port=port)


def read_address(url: str) -> Address:
    """Where an engine's URL leads. NotPlain, or ValueError where it is no engine's URL at all."""
    if not url.isascii():
        raise NotPlain("only ASCII is matched; write an international name in its xn-- form")
    found = _URL.fullmatch(engine_url(url))
    if found is None:
        raise NotPlain("only plainly written addresses are matched: scheme://host:port, and a simple path at most")
    scheme, host = found["scheme"], found["host"]
    port = int(found["port"] or DEFAULT_PORTS[scheme])
    if host.startswith("[") or _NUMERIC_END.fullmatch(host):
        ip = _ip(host.removeprefix("[").removesuffix("]"), version=6 if host.startswith("[") else 4)
        return Address(scheme=scheme, host=str(ip), ip=ip, port=port, path=found["path"])
    if not _NAME.fullmatch(host):
        raise NotPlain("the host is no plainly written name")
    return Address(scheme=scheme, host=host, ip=None, port=port, path=found["path"])


def allowed_url(url: str, patterns: Sequence[Pattern]) -> str:
    """The plain form of `url`, where one of `patterns` allows it. Raises EngineNotAllowed, InvalidField."""
    try:
        address = read_address(url)
    except NotPlain as error:
        raise EngineNotAllowed(f"url: {error}") from None
    except ValueError as error:
        raise InvalidField(f"url: {error}", field="url") from None
    if not patterns:
        raise EngineNotAllowed("no engine is added over HTTP: registration.allowed has no pattern")
    if not any(pattern.allows(address) for pattern in patterns):
        raise EngineNotAllowed(f"no pattern of registration.allowed matches {address.url}", url=address.url)
    return address.url


def _ip(text: str, *, version: int) -> IPv4Address | IPv6Address:
    try:
        ip = ip_address(text)
    except ValueError:
        raise NotPlain("a numeric address is written out: 127.0.0.1, [::1]") from None
    if ip.version != version or str(ip) != text:
        raise NotPlain(f"a numeric address is written in its shortest plain form: {ip}")
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        raise NotPlain(f"an IPv4 address is written as such: {ip.ipv4_mapped}")
    return ip


def _network(host: str, text: str, *, version: int) -> IPv4Network | IPv6Network:
    try:
        network = ip_network(host)
    except ValueError as error:
        raise ValueError(f"{error} ({text[:80]!a})") from None
    if network.version != version:
        raise ValueError(f"{EXPECTED}; IPv6 stands in brackets, got {text[:80]!a}")
    return network
