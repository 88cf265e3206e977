"""Moving a run from one durable store to another: from SQLite to PostgreSQL, and back.

What always holds: the source is not in use and is not changed; the target is new, and whoever opens it finds either
nothing or the whole run, which was read back and compared before. Memory is bounded, however long the run. Only what
replicas know of each other stays behind, with the engines that were added and removed by hand, and in SQLite a halt,
which no restart of a service there outlives.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from rollout_service.core.model import GroupState
from rollout_service.errors import ConfigError
from rollout_service.store import MemoryStore, SqliteStore, open_store, sqlite_rows
from rollout_service.store.raw_rows import Content, Contents, Source, Table, Target
from rollout_service.store.standing import run_as_kept

Progress = Callable[[str, int], None]
"""Told what is under way, "copied" or "verified", and how many rows were so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """A copy that took effect."""

    source: Content
    target: Content
    left_behind: tuple[str, ...]
    """What the target has no place for; for people."""

    def table(self) -> list[tuple[str, str, str]]:
        """(what, in the source, in the target), for people."""
        sides = [_facts(self.source), _facts(self.target)]
        return [("", "source", "target"), *((name, value, sides[1][name]) for name, value in sides[0].items())]


def _facts(content: Content) -> dict[str, str]:
    run = content.run.run
    facts = {"policy version": run.policy_version, "groups submitted": run.last_seq}
    facts |= {f"  {state}": content.groups.get(state, 0) for state in GroupState}
    facts |= {name.replace("_", " "): count for name, count in content.rows.items() if name != Table.GROUPS}
    facts |= {"payload bytes": content.payload_bytes, "ends": run.ends}
    return {name: f"{value:,}" for name, value in facts.items()}


async def copy_store(source_url: str, target_url: str, *, progress: Progress | None = None) -> Copied:
    """Copy the run in `source_url` into the new store `target_url`.

    Raises ConfigError, one line without a password, where that cannot be; then the target is as it was.
    """
    if source_url == target_url:
        raise ConfigError("SOURCE and TARGET are the same store")
    source, target = _store("SOURCE", source_url), _store("TARGET", target_url)
    async with _reading(source) as reader, _writing(target) as writer:
        run = await reader.run()
        read = Contents()
        done = 0
        for table in Table:
            async for rows in reader.rows(table):
                read.add(table, rows)
                await writer.write(table, rows)
                done += len(rows)
                if progress is not None:
                    progress("copied", done)
        was = read.content(run)
        flaw = was.flaw()
        if flaw is not None:
            raise ConfigError(f"{_name(source)} is not sound: {flaw}")
        kept = await writer.complete(was.run)
        found = await _content(writer, progress)
        if found != replace(was, run=replace(kept, run=run_as_kept(kept.run))):
            raise ConfigError(f"{_name(target)}: what was read back is not what was written; nothing was copied")
        left_behind = _left_behind(was, found, engines=await reader.engines())
        await writer.publish()
    return Copied(source=was, target=found, left_behind=left_behind)


async def _content(store: Source, progress: Progress | None) -> Content:
    found = Contents()
    done = 0
    for table in Table:
        async for rows in store.rows(table):
            found.add(table, rows)
            done += len(rows)
            if progress is not None:
                progress("verified", done)
    return found.content(await store.run())


def _left_behind(was: Content, found: Content, *, engines: int) -> tuple[str, ...]:
    left = []
    if was.run.halt is not None and found.run.halt is None:
        left.append(f"the halt ({was.run.halt.reason}): a service on SQLite begins without one")
    if engines:
        left.append(f"what was asked for by hand at {engines} engines: add and remove them again")
    return tuple(left)


def _store(which: str, url: str) -> Any:
    try:
        store = open_store(url, max_staleness=0)
    except ConfigError as exc:
        raise ConfigError(f"{which}: {str(exc).removeprefix('store.url: ')}") from exc
    if isinstance(store, MemoryStore):
        raise ConfigError(f"{which}: memory:// keeps nothing")
    return store


def _name(store: Any) -> str:
    return f"store {store.path if isinstance(store, SqliteStore) else store.name}"


@asynccontextmanager
async def _reading(store: Any) -> AsyncIterator[Source]:
    if isinstance(store, SqliteStore):
        with sqlite_rows.source(store.path) as found:
            yield found
        return
    async with _postgres().source(store) as found:
        yield found


@asynccontextmanager
async def _writing(store: Any) -> AsyncIterator[Target]:
    if isinstance(store, SqliteStore):
        with sqlite_rows.target(store.path) as found:
            yield found
        return
    async with _postgres().target(store) as found:
        yield found


def _postgres() -> Any:
    """Needs what not everybody has installed."""
    return import_module("rollout_service.store.postgres_rows")
