"""Whether a database holds a store of ours, and bringing it to this version's schema.

What always holds: a database that holds tables of another program is left exactly as it was; each migration is one
transaction together with its number, so that a crash leaves a version or the next one; of services that start at the
same time one migrates and the others wait. A service beside a newer schema starts only where that works with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Final

import asyncpg

from rollout_service.errors import ConfigError

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from rollout_service.store.postgres_connections import Connections

_WORKS_WITH: Final = re.compile(r"-- works with: ([0-9]+)\n")

_OURS: Final = (
    "run", "groups", "prompts", "rollouts", "scores", "leases", "lease_groups", "checkpoints", "tallies", "replicas",
    "batches", "engines",
)  # fmt: skip
"""Tables whose names would be taken where another program uses the schema."""

_MIGRATIONS: Final = "schema_migrations"
"""Others have a table of this name too; ours is marked."""

PATIENCE_S: Final = 24 * 3600.0
"""Of the client, for a migration and for the wait for one."""

# Without the limits of ordinary transactions: a migration may rewrite a large table.
LOCK: Final = """
SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = 0;
SELECT pg_advisory_xact_lock(hashtext('rollout-service migrations'), hashtext(current_schema()))
"""

MAKE_MIGRATIONS: Final = """
CREATE TABLE schema_migrations (
    version    bigint           PRIMARY KEY,
    name       text             NOT NULL,
    works_with bigint           NOT NULL,
    applied_at double precision NOT NULL
)
"""

MARK: Final = "COMMENT ON TABLE schema_migrations IS 'rollout-service'"

READ_MIGRATIONS: Final = "SELECT version, works_with FROM schema_migrations ORDER BY version"

KEEP_MIGRATION: Final = """
INSERT INTO schema_migrations (version, name, works_with, applied_at)
VALUES ($1, $2, $3, extract(epoch FROM clock_timestamp()))
"""

# From the catalog's own tables: name lookups are answered from a cache that may be older than this transaction.
FIND_TABLES: Final = """
SELECT relname, coalesce(obj_description(oid, 'pg_class') = 'rollout-service', false) AS ours FROM pg_class
WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema()) AND relname = ANY($1::name[])
ORDER BY relname
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    """One numbered file of `migrations/postgres`."""

    version: int
    name: str
    works_with: int
    """The oldest schema version whose service still works beside this one."""
    script: str


def migrations() -> list[Migration]:
    """Ascending from 1 without a gap."""
    folder = resources.files("rollout_service.store") / "migrations" / "postgres"
    found = []
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        number, _, name = file.name.removesuffix(".sql").partition("_")
        script = file.read_text("utf-8")
        header = _WORKS_WITH.match(script)
        if header is None:
            raise AssertionError(f"{file.name} does not say which services work beside it")
        found.append(Migration(version=int(number), name=name, works_with=int(header[1]), script=script))
    if [migration.version for migration in found] != list(range(1, len(found) + 1)):
        raise AssertionError("migrations are numbered 1, 2, 3, ...")
    return found


async def migrate(connections: Connections, name: str, known: list[Migration] | None = None) -> None:
    """Make or migrate the schema. Raises ConfigError where this database may not be used; `name` is how it is called
    in that."""
    known = migrations() if known is None else known
    applied = await connections.look(lambda connection: _applied(connection, name))
    _check_version(name, applied, known)
    for migration in known[len(applied) :]:
        await connections.run(partial(_apply, migration=migration, name=name, known=known))


async def _applied(connection: Connection[Record], name: str) -> dict[int, int]:
    """Version -> works with, of every migration that was applied."""
    if await connection.fetchval("SELECT current_schema()") is None:
        raise ConfigError(f"store {name}: the database user has no default schema (search_path)")
    encoding = await connection.fetchval("SELECT current_setting('server_encoding')")
    if encoding != "UTF8":
        raise ConfigError(f"store {name}: the database is encoded in {encoding}; make one with ENCODING 'UTF8'")
    found = {row["relname"]: row["ours"] for row in await connection.fetch(FIND_TABLES, [*_OURS, _MIGRATIONS])}
    if found.get(_MIGRATIONS):
        return {row["version"]: row["works_with"] for row in await connection.fetch(READ_MIGRATIONS)}
    if found:
        raise ConfigError(f"store {name} is a database of another program (it has a table {next(iter(found))})")
    return {}


def _check_version(name: str, applied: dict[int, int], known: list[Migration]) -> None:
    newest = len(known)
    needed = max((works_with for version, works_with in applied.items() if version > newest), default=0)
    if needed > newest:
        raise ConfigError(
            f"store {name} was migrated by a newer version (schema {max(applied)}, which works with services of schema"
            f" {needed} and newer; this one's is {newest})"
        )


async def _apply(connection: Connection[Record], *, migration: Migration, name: str, known: list[Migration]) -> None:
    await connection.execute(LOCK, timeout=PATIENCE_S)
    applied = await _applied(connection, name)  # anew: another service may have migrated meanwhile
    _check_version(name, applied, known)
    if migration.version in applied:
        return
    try:
        if not applied:
            await connection.execute(MAKE_MIGRATIONS)
            await connection.execute(MARK)
        await connection.execute(migration.script, timeout=PATIENCE_S)
        await connection.execute(KEEP_MIGRATION, migration.version, migration.name, migration.works_with)
    except asyncpg.InsufficientPrivilegeError as exc:
        raise ConfigError(
            f"store {name}: the database user may not make tables in its schema ({exc}); GRANT CREATE, USAGE ON SCHEMA"
        ) from exc
    except (asyncpg.SyntaxOrAccessError, asyncpg.FeatureNotSupportedError) as exc:
        raise ConfigError(f"store {name} cannot be migrated to schema {migration.version}: {exc}") from exc
