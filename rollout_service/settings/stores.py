"""The tables about what outlives the process, and about sharing it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from rollout_service.settings.tables import TERABYTE, Table

POSTGRES = ("postgresql", "postgres")
"""Schemes of a URL."""


class StoreSettings(Table):
    """`[store]`: where everything is that must outlive the process."""

    url: str = Field(
        default="sqlite:///rollout.db",
        max_length=4096,
        description="sqlite:/// and a path (relative to the working directory; four slashes: absolute); postgresql:// "
        "for several replicas that share the run; or memory:// (nothing outlives the process; for tests).",
    )
    max_lease_bytes: int = Field(
        default=2**28, ge=1, le=TERABYTE, description="A lease is cut at so many bytes, never below one group."
    )
    pool_size: int = Field(
        default=8, ge=2, le=64, description="PostgreSQL: connections of this replica for its transactions; two more."
    )
    statement_timeout_s: float = Field(
        default=10.0, ge=0.1, le=600, description="PostgreSQL: how long one statement may take, waiting included."
    )

    @field_validator("url")
    @classmethod
    def _known_kind(cls, value: str) -> str:
        scheme, _, rest = value.partition("://")
        if scheme in POSTGRES:
            if not rest.partition("?")[0].partition("/")[2] or not value.isprintable() or "#" in value:
                raise ValueError("expected postgresql://user@host/database")
            return value
        if scheme.partition("+")[0] in POSTGRES:
            raise ValueError(f"expected postgresql:// alone: the driver is ours, not {scheme.partition('+')[2]!r}")
        if value == "memory://":
            return value
        path = rest.removeprefix("/")
        if scheme != "sqlite" or not rest.startswith("/") or not path or path.endswith("/"):
            raise ValueError("expected sqlite:/// and the path of a file, postgresql:// or memory://")
        if ":memory:" in path or not set(path).isdisjoint("?#") or not path.isprintable():
            raise ValueError("expected a plain path after sqlite:/// (for a store in memory: memory://)")
        return value

    @property
    def sqlite_path(self) -> Path | None:
        """The SQLite file, or None for another store."""
        return Path(self.url.removeprefix("sqlite:///")) if self.url.startswith("sqlite:") else None

    @property
    def shared(self) -> bool:
        """Whether several replicas may use it at once."""
        return self.url.partition("://")[0] in POSTGRES


class ReplicaSettings(Table):
    """`[replica]`: this service as one of several that share a run (`store.url = "postgresql://…"`)."""

    name: str = Field(
        default="", max_length=128, description="For people, in /status; empty: the host's name and server.port."
    )
    lease_s: float = Field(
        default=10.0,
        ge=1,
        le=300,
        description="How long its groups stay its own after its last heartbeat; there are five in that time.",
    )

    @field_validator("name")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("expected printable characters")
        return value
