"""`[server]`: where the service listens, and who may call it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import ip_address

from pydantic import Field, field_validator

from rollout_service.keys import HASH, NAME, Role
from rollout_service.settings.tables import Table

Found = tuple[tuple[str | int, ...], str]
"""A problem: the field's path, and what is wrong with it."""


HOST_NAME = re.compile(r"\[[0-9A-Fa-f:.]{2,64}\]|[A-Za-z0-9_][A-Za-z0-9_.-]{0,253}", re.ASCII)
"""The name in a Host header, without its port."""


class KeySettings(Table):
    """`[[server.keys]]`: one API key, as `rollout-service key create` prints it."""

    name: str = Field(default="", max_length=64, description="For people and the log.")
    role: str = Field(default="", max_length=16, description="admin, trainer, submit or read.")
    hash: str = Field(default="", max_length=128, repr=False, description="sha256: and 64 hexadecimal digits.")

    @field_validator("name")
    @classmethod
    def _a_name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError("expected letters, digits, dots, dashes and underscores, 64 at most")
        return value

    @field_validator("role")
    @classmethod
    def _a_role(cls, value: str) -> str:
        if value not in list(Role):
            raise ValueError(f"expected one of {', '.join(Role)}")
        return value

    @field_validator("hash")
    @classmethod
    def _a_hash(cls, value: str) -> str:
        if not HASH.fullmatch(value):  # the value is not shown: it may be a key that was pasted in the hash's place
            raise ValueError("expected sha256: and 64 hexadecimal digits, as `rollout-service key create` prints them")
        return value


class ServerSettings(Table):
    """`[server]`: where the service listens, and who may call it."""

    host: str = Field(default="127.0.0.1", max_length=255, description="Another than a loopback address needs keys.")
    port: int = Field(default=8080, ge=0, le=65_535, description="0: any free port.")
    keys: list[KeySettings] = Field(
        default=[], max_length=1024, description="None, here and in keys_file: whoever reaches the address may do all."
    )
    keys_file: str = Field(
        default="", max_length=4096, description="TOML file of [[keys]] tables, read again when it changes."
    )
    insecure: bool = Field(default=False, description="Listen on any address without keys.")
    allowed_hosts: list[str] = Field(
        default=[], max_length=64, description="Without keys: names it may be called by, beside loopback ones."
    )

    @field_validator("keys_file")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("a path without control characters is expected")
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _names(cls, value: list[str]) -> list[str]:
        for name in value:
            if not HOST_NAME.fullmatch(name):
                raise ValueError("names or addresses without scheme and port are expected; IPv6 stands in brackets")
        return [name.lower() for name in value]


def server_problems(server: ServerSettings) -> Iterator[Found]:
    """What is wrong with the table as a whole."""
    if not (is_loopback(server.host) or server.keys or server.keys_file or server.insecure):
        yield (
            ("server", "host"),
            "another address than a loopback one (127.0.0.0/8, ::1, localhost) needs API keys: make them with "
            "`rollout-service key create`, or say --insecure where the network itself keeps strangers out",
        )
    for what in ("name", "hash"):
        seen: set[str] = set()
        for position, key in enumerate(server.keys):
            if getattr(key, what) in seen:
                yield ("server", "keys", position, what), "stands there twice"
            seen.add(getattr(key, what))


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
