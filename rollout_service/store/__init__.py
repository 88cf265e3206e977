"""The store: what must outlive the process. `open_store` is the door; which medium lies behind it is one URL.

`open_shared_store` is the door for replicas that share one.
"""

from __future__ import annotations

from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_service.errors import ConfigError
from rollout_service.store.memory import MemoryStore
from rollout_service.store.protocol import Store
from rollout_service.store.sqlite import SqliteStore

if TYPE_CHECKING:
    from rollout_service.store.postgres import PostgresStore

__all__ = ["MemoryStore", "SqliteStore", "Store", "open_shared_store", "open_store"]

_SQLITE = "sqlite:///"
_POSTGRES = ("postgresql://", "postgres://")


def open_store(url: str, *, max_staleness: int) -> Store:
    """The store `url` names, not opened yet (its `open` is); touches no file and no network.

    `sqlite:///runs/a.db` is relative to the working directory, `sqlite:////data/a.db` is absolute, `memory://` keeps
    nothing, for `postgresql://` see `open_shared_store`. Raises ConfigError for any other URL.
    """
    if url == "memory://":
        return MemoryStore(max_staleness)
    if url.startswith(_SQLITE):
        path = url.removeprefix(_SQLITE)
        if not path or path.endswith("/") or "?" in path or "\0" in path:
            raise ConfigError(f"store.url: {url!r} names no file; give sqlite:///relative.db or sqlite:////absolute.db")
        return SqliteStore(Path(path), max_staleness=max_staleness)
    if url.startswith(_POSTGRES):
        return open_shared_store(url, max_staleness=max_staleness)
    raise ConfigError(
        f"store.url: {_harmless(url)!r} is no store; give sqlite:///relative.db, sqlite:////absolute.db, memory:// or"
        " postgresql://user@host/database"
    )


def open_shared_store(
    url: str, *, max_staleness: int, pool_size: int = 8, statement_timeout_s: float = 10.0
) -> PostgresStore:
    """The store replicas share, `postgresql://user@host/database`, not opened yet; touches no network.

    `pool_size`: transactions of this process at the same time. `statement_timeout_s`: the longest a statement or a wait
    for a lock may take. Raises ConfigError for another URL, and where what it needs is not installed.
    """
    if not url.startswith(_POSTGRES):
        raise ConfigError(f"store.url: {_harmless(url)!r} cannot be shared; give postgresql://user@host/database")
    if util.find_spec("asyncpg") is None:
        raise ConfigError("store.url: PostgreSQL needs more to be installed: pip install 'rollout-service[postgres]'")
    from rollout_service.store.postgres import PostgresStore  # nobody else needs what it imports

    return PostgresStore(url, max_staleness=max_staleness, pool_size=pool_size, statement_timeout_s=statement_timeout_s)


def _harmless(url: str) -> str:
    """A URL of an unknown kind, without what may be a password in it."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://…{rest.rpartition('@')[2]}" if "@" in rest else url
