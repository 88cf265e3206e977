"""Looking into a PostgreSQL store, without the service.

What always holds: it only reads, in one transaction, and may be asked while replicas use the store; no message shows a
password.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rollout_service.store import postgres_queries as sql
from rollout_service.store.postgres import PostgresStore
from rollout_service.store.postgres_rows import SET_LIMITS, check_schema, connect, let_go, one_line

READ_RUN: Final = "SELECT policy_version, last_seq FROM run WHERE id = 1"

COUNT_ROWS: Final = """
SELECT 'groups' AS name, count(*) AS rows FROM groups UNION ALL
SELECT 'prompts', count(*) FROM prompts UNION ALL
SELECT 'rollouts', count(*) FROM rollouts UNION ALL
SELECT 'scores', count(*) FROM scores UNION ALL
SELECT 'leases', count(*) FROM leases UNION ALL
SELECT 'lease_groups', count(*) FROM lease_groups
"""

# Payloads are not compressed, so that their size is known without reading them.
SUM_PAYLOADS: Final = """
SELECT ((SELECT coalesce(sum(octet_length(payload)), 0) FROM rollouts)
    + (SELECT coalesce(sum(octet_length(payload)), 0) FROM prompts)
    + (SELECT coalesce(sum(octet_length(payload)), 0) FROM scores))::bigint
"""

# With indexes and long values. Numbers of rows are what the server has counted last, not exact.
READ_TABLES: Final = """
SELECT c.relname AS name, pg_total_relation_size(c.oid)::bigint AS bytes,
    coalesce(s.n_dead_tup, 0)::bigint AS dead_rows,
    extract(epoch FROM greatest(s.last_autovacuum, s.last_vacuum))::double precision AS vacuumed_at
FROM pg_class AS c LEFT JOIN pg_stat_all_tables AS s ON s.relid = c.oid
WHERE c.relkind = 'r' AND c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema())
ORDER BY c.relname
"""

READ_REPLICAS: Final = """
SELECT r.name, r.service, expires_at > now.s AS alive, (now.s - r.seen_at)::double precision AS seen_s_ago,
    (SELECT count(*) FROM groups AS g WHERE g.owner = r.replica_id) AS claims, r.in_flight, r.slots, r.engines,
    r.healthy_engines
FROM replicas AS r, (SELECT extract(epoch FROM clock_timestamp())::double precision AS s) AS now
ORDER BY r.started_at, r.replica_id
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableStats:
    bytes: int
    """With indexes and long values."""
    dead_rows: int
    """Removed or replaced and not vacuumed yet, by the server's own estimate."""
    vacuumed_at: float | None
    """Unix seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaStats:
    name: str
    service: str
    """Its version."""
    alive: bool
    """False: its heartbeat is overdue, and its claims are taken over."""
    seen_s_ago: float
    claims: int
    """Groups it works on."""
    in_flight: int
    slots: int
    engines: int
    healthy_engines: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PostgresStats:
    """What is in a store."""

    schema: int
    """Number of the newest migration in it."""
    database_bytes: int
    """Of the whole database, other schemas included."""
    payload_bytes: int
    """Prompts, rollouts and scores."""
    tables: Mapping[str, TableStats]
    rows: Mapping[str, int]
    """By table, counted."""
    groups: Mapping[str, int]
    """Groups by state, counted."""
    policy_version: int
    submitted: int
    replicas: tuple[ReplicaStats, ...]
    """By start."""

    @property
    def outstanding(self) -> int:
        return sum(self.groups.get(state, 0) for state in ("pending", "generating", "scoring", "ready", "leased"))


async def store_stats(store: PostgresStore) -> PostgresStats:
    """Of the database that `store` is about, which need not be open. Raises ConfigError."""
    connection, server = await connect(store)
    try:
        with one_line(server):
            await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            await connection.execute(SET_LIMITS)
            schema = await check_schema(connection, store.name, exact=False)
            run = await connection.fetchrow(READ_RUN)
            tables = await connection.fetch(READ_TABLES)
            return PostgresStats(
                schema=schema,
                database_bytes=await connection.fetchval("SELECT pg_database_size(current_database())"),
                payload_bytes=await connection.fetchval(SUM_PAYLOADS),
                tables={
                    row["name"]: TableStats(
                        bytes=row["bytes"], dead_rows=row["dead_rows"], vacuumed_at=row["vacuumed_at"]
                    )
                    for row in tables
                },
                rows={row["name"]: row["rows"] for row in await connection.fetch(COUNT_ROWS)},
                groups={row["state"]: row["count"] for row in await connection.fetch(sql.COUNT_GROUPS)},
                policy_version=0 if run is None else run["policy_version"],
                submitted=0 if run is None else run["last_seq"],
                replicas=tuple(ReplicaStats(**row) for row in await connection.fetch(READ_REPLICAS)),
            )
    finally:
        await let_go(connection)
