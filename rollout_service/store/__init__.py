"""The store: what must outlive the process. `open_store` is the door; which medium lies behind it is one URL."""

from __future__ import annotations

from pathlib import Path

from rollout_service.errors import ConfigError
from rollout_service.store.memory import MemoryStore
from rollout_service.store.protocol import Store
from rollout_service.store.sqlite import SqliteStore

__all__ = ["MemoryStore", "SqliteStore", "Store", "open_store"]

_SQLITE = "sqlite:///"


def open_store(url: str, *, max_staleness: int) -> Store:
    """The store `url` names, not opened yet (its `open` is); touches no file.

    `sqlite:///runs/a.db` is relative to the working directory, `sqlite:////data/a.db` is absolute, `memory://` keeps
    nothing. Raises ConfigError for any other URL.
    """
    if url == "memory://":
        return MemoryStore(max_staleness)
    if url.startswith(_SQLITE):
        path = url.removeprefix(_SQLITE)
        if not path or path.endswith("/") or "?" in path or "\0" in path:
            raise ConfigError(f"store.url: {url!r} names no file; give sqlite:///relative.db or sqlite:////absolute.db")
        return SqliteStore(Path(path), max_staleness=max_staleness)
    raise ConfigError(
        f"store.url: {url!r} is no store; give sqlite:///relative.db, sqlite:////absolute.db or memory://"
    )
