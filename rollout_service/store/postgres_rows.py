"""A PostgreSQL store as rows, to move a run from it or into it.

What always holds: everything is one transaction, so that a copy into a store is all or nothing and one from it changes
nothing; it is alone: replicas neither join nor write meanwhile, and it is refused where one is alive. No message shows
a password.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from rollout_service.core.model import prompt_size
from rollout_service.core.shared import SharedRun
from rollout_service.errors import ConfigError, StoreUnavailable
from rollout_service.store import codec, postgres_read, postgres_schema
from rollout_service.store import postgres_queries as sql
from rollout_service.store.postgres import PostgresStore
from rollout_service.store.postgres_read import kept, restored
from rollout_service.store.postgres_server import DATABASE_ERRORS, Server
from rollout_service.store.raw_rows import PART_ROWS, PAYLOADS, Row, Table, parts, stretches

if TYPE_CHECKING:
    from asyncpg import Connection, Record

STATEMENT_S: Final = 3600.0
"""The longest statement of a copy counts and adds up a whole table."""

CLOSE_S: Final = 1.0
"""For the server to hear that a connection is over; then it is cut."""

# A session may have limits of its own, made for short transactions. What this server does not know is left alone.
SET_LIMITS: Final = """
SELECT set_config(s.name, wanted.value, true)
FROM (VALUES ('statement_timeout', '1h'), ('lock_timeout', '5s'), ('idle_in_transaction_session_timeout', '10min'),
    ('transaction_timeout', '0')) AS wanted (name, value)
JOIN pg_settings AS s ON s.name = wanted.name
"""

# Anything but off is the operator's choice.
SYNC: Final = """
SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'
"""

# A replica joins and beats by writing here.
KEEP_OUT: Final = "LOCK TABLE replicas IN SHARE ROW EXCLUSIVE MODE"

FIND_ALIVE: Final = """
SELECT name, (now.s - seen_at)::double precision AS ago, (expires_at - now.s)::double precision AS left_s
FROM replicas, (SELECT extract(epoch FROM clock_timestamp())::double precision AS s) AS now
WHERE expires_at > now.s ORDER BY expires_at DESC LIMIT 1
"""

FIND_RUN: Final = """
SELECT EXISTS (SELECT 1 FROM groups) OR EXISTS (SELECT 1 FROM leases) OR EXISTS (SELECT 1 FROM checkpoints)
    OR EXISTS (SELECT 1 FROM engines)
    OR policy_version <> 0 OR last_seq <> 0 OR read_position <> 0 OR paused OR final OR halt IS NOT NULL AS used,
    last_seq, policy_version, revision
FROM run WHERE id = 1
"""

READ: Final[Mapping[Table, str]] = {
    Table.LEASES: """
        SELECT lease_id, request_id, consumer, max_groups, min_groups, lease_s, policy_version, created_at, expires_at,
            state FROM leases""",
    Table.GROUPS: """
        SELECT g.seq, g.prompt_id, g.epoch, g.digest, g.num_generations, g.state, g.attempt, g.tries, g.version, g.rows,
            g.payload_bytes, g.reason, g.error, g.engine, g.lease_id, g.acked_by, g.end_number, g.submitted_at,
            g.changed_at, p.payload
        FROM groups AS g LEFT JOIN prompts AS p ON p.seq = g.seq ORDER BY g.seq""",
    Table.LEASE_GROUPS: "SELECT lease_id, position, seq, attempt FROM lease_groups",
    Table.ROLLOUTS: """
        SELECT seq, attempt, idx, ok, payload_bytes, payload FROM rollouts ORDER BY seq, attempt, idx""",
    Table.SCORES: "SELECT seq, attempt, payload FROM scores ORDER BY seq, attempt",
    Table.CHECKPOINTS: "SELECT name, number, policy_version, ends, created_at FROM checkpoints",
}

# In the order of READ; what is long is not read for it.
READ_SIZES: Final[Mapping[Table, str]] = {
    Table.GROUPS: """
        SELECT coalesce(octet_length(p.payload), 0) AS size
        FROM groups AS g LEFT JOIN prompts AS p ON p.seq = g.seq ORDER BY g.seq""",
    Table.ROLLOUTS: "SELECT octet_length(payload) AS size FROM rollouts ORDER BY seq, attempt, idx",
    Table.SCORES: "SELECT octet_length(payload) AS size FROM scores ORDER BY seq, attempt",
}

# As SQL of its own, and not as the driver's cursors: those keep a name in the session, which a pooler shares out.
DECLARE_ROWS: Final = "DECLARE copied_rows NO SCROLL CURSOR FOR "
DECLARE_SIZES: Final = "DECLARE copied_sizes NO SCROLL CURSOR FOR "
FETCH_ROWS: Final = "FETCH FORWARD {} FROM copied_rows"
FETCH_SIZES: Final = "FETCH FORWARD 1000 FROM copied_sizes"
CLOSE: Final = "CLOSE ALL"

WRITE: Final[Mapping[Table, str]] = {
    Table.LEASES: """
        INSERT INTO leases (lease_id, request_id, consumer, max_groups, min_groups, lease_s, policy_version, created_at,
            expires_at, state)
        SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[],
            $7::bigint[], $8::double precision[], $9::double precision[], $10::text[])""",
    Table.GROUPS: """
        WITH given AS MATERIALIZED (
            SELECT * FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bytea[], $5::bigint[], $6::text[],
                $7::bigint[], $8::bigint[], $9::bigint[], $10::text[], $11::bigint[], $12::text[], $13::text[],
                $14::text[], $15::text[], $16::text[], $17::bigint[], $18::double precision[],
                $19::double precision[], $20::bytea[], $21::bigint[])
            AS g (seq, prompt_id, epoch, digest, num_generations, state, attempt, tries, version, rows, payload_bytes,
                reason, error, engine, lease_id, acked_by, end_number, submitted_at, changed_at, prompt, prompt_bytes)
        ), made AS (
            INSERT INTO groups (seq, prompt_id, epoch, digest, num_generations, state, attempt, tries, version, rows,
                payload_bytes, reason, error, engine, lease_id, acked_by, end_number, submitted_at, changed_at,
                prompt_bytes)
            SELECT seq, prompt_id, epoch, digest, num_generations, state, attempt, tries, version, rows, payload_bytes,
                reason, error, engine, lease_id, acked_by, end_number, submitted_at, changed_at, prompt_bytes
            FROM given
        )
        INSERT INTO prompts (seq, payload) SELECT seq, prompt FROM given WHERE prompt IS NOT NULL""",
    Table.LEASE_GROUPS: sql.INSERT_LEASE_GROUPS,
    Table.ROLLOUTS: """
        INSERT INTO rollouts (seq, attempt, idx, ok, payload_bytes, payload, output_tokens)
        SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::boolean[], $5::bigint[], $6::bytea[],
            $7::bigint[])""",
    Table.SCORES: """
        INSERT INTO scores (seq, attempt, payload) SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bytea[])""",
    Table.CHECKPOINTS: sql.INSERT_CHECKPOINTS,
}

_TEXTS: Final[Mapping[Table, tuple[int, ...]]] = {Table.LEASES: (1, 2), Table.GROUPS: (1, 12, 13)}
"""Columns in which there may be a character that PostgreSQL cannot hold."""

_TRIGGERED: Final = ("groups", "rollouts", "scores")

TALLY: Final = """
INSERT INTO tallies (pending, generating, scoring, ready, leased, acked, stale, dropped, failed, held_bytes,
    prompt_bytes)
SELECT count(*) FILTER (WHERE state = 'pending'), count(*) FILTER (WHERE state = 'generating'),
    count(*) FILTER (WHERE state = 'scoring'), count(*) FILTER (WHERE state = 'ready'),
    count(*) FILTER (WHERE state = 'leased'), count(*) FILTER (WHERE state = 'acked'),
    count(*) FILTER (WHERE state = 'stale'), count(*) FILTER (WHERE state = 'dropped'),
    count(*) FILTER (WHERE state = 'failed'),
    coalesce(sum(payload_bytes) FILTER (WHERE state IN ('scoring', 'ready')), 0),
    coalesce(sum(prompt_bytes) FILTER (WHERE state IN ('pending', 'generating', 'scoring', 'ready', 'leased')), 0)
FROM groups
"""

# The first plans over these tables are made for what is in them now.
ANALYZE: Final = "ANALYZE groups, prompts, rollouts, scores, leases, lease_groups, tallies, run"


class PostgresSource:
    """Reads through the transaction on `connection`. Use `source`."""

    def __init__(self, connection: Connection[Record], server: Server) -> None:
        self._connection, self._server = connection, server

    async def run(self) -> SharedRun:
        with one_line(self._server):
            found, _, _ = await postgres_read.run(self._connection)
        return replace(found, revision=0, taken=0)

    async def engines(self) -> int:
        with one_line(self._server):
            found: int = await self._connection.fetchval("SELECT count(*) FROM engines")
        return found

    async def rows(self, table: Table) -> AsyncIterator[Sequence[Row]]:
        with one_line(self._server):
            await self._connection.execute(DECLARE_ROWS + READ[table])
            if table in PAYLOADS:
                await self._connection.execute(DECLARE_SIZES + READ_SIZES[table])
                while sizes := [row["size"] for row in await self._connection.fetch(FETCH_SIZES)]:
                    for stretch in stretches(sizes, int):
                        yield await self._fetched(table, len(stretch))
            else:
                while found := await self._fetched(table, PART_ROWS):
                    yield found
            await self._connection.execute(CLOSE)

    async def _fetched(self, table: Table, count: int) -> list[Row]:
        rows = await self._connection.fetch(FETCH_ROWS.format(count))
        return list(_converted(table, map(tuple, rows), restored))


class PostgresTarget(PostgresSource):
    """Writes through the transaction on `connection`. Use `target`."""

    def __init__(self, connection: Connection[Record], server: Server, *, revision: int) -> None:
        super().__init__(connection, server)
        self._revision = revision

    async def write(self, table: Table, rows: Sequence[Row]) -> None:
        with one_line(self._server):
            for part in parts(table, _converted(table, rows, kept)):
                columns = zip(*(_completed(table, row) for row in part), strict=True)
                await self._connection.execute(WRITE[table], *map(list, columns))

    async def complete(self, run: SharedRun) -> SharedRun:
        connection = self._connection
        # Above whatever a replica knew of this database before: what it decided then is not committed.
        written = replace(run, revision=self._revision + 1, taken=0)
        with one_line(self._server):
            await connection.execute(sql.WRITE_SHARED_RUN, *postgres_read.shared_run_row(written))
            await connection.execute("DELETE FROM tallies")
            await connection.execute(TALLY)
            for table in _TRIGGERED:
                await connection.execute(f"ALTER TABLE {table} ENABLE TRIGGER USER")
            await connection.execute(ANALYZE)
            await connection.fetchval(sql.SET_ENDS, run.run.ends)  # not undone with the rest, and written anew then
        return run

    async def publish(self) -> None:
        try:
            await self._connection.execute("COMMIT")
        except DATABASE_ERRORS as exc:
            raise ConfigError(
                f"{self._server.told(exc)}, during the commit: it may have taken effect; run it again, and it says that"
                " the store is not empty where it has"
            ) from exc


@asynccontextmanager
async def source(store: PostgresStore) -> AsyncIterator[PostgresSource]:
    """Raises ConfigError where there is no store of this version, a replica is alive, or the database is in trouble."""
    server = _server(store)
    connection = await _connected(server)
    try:
        with one_line(server):
            await connection.execute("BEGIN READ ONLY")
            await connection.execute(SET_LIMITS)
            await check_schema(connection, store.name)
        await _be_alone(connection, server, store.name)
        yield PostgresSource(connection, server)
    finally:
        await let_go(connection)


@asynccontextmanager
async def target(store: PostgresStore) -> AsyncIterator[PostgresTarget]:
    """Raises ConfigError where there is a run already, a replica is alive, or the database is in trouble."""
    try:
        await store.open()  # makes the schema
    except StoreUnavailable as exc:
        raise ConfigError(f"store {store.name}: {exc}") from exc
    finally:
        await store.close()
    server = _server(store)
    connection = await _connected(server)
    try:
        with one_line(server):
            await connection.execute("BEGIN")
            await connection.execute(SET_LIMITS)
            await connection.execute(SYNC)
            await check_schema(connection, store.name)
        await _be_alone(connection, server, store.name)
        with one_line(server):
            found = await connection.fetchrow(FIND_RUN)
            if found is None or found["used"]:
                facts = "" if found is None else f" ({found['last_seq']} groups, version {found['policy_version']})"
                raise ConfigError(f"store {store.name} is not empty: it has a run{facts}; copy into a new database")
            # They judge steps of a run, of which these rows are the outcome: the failed rollouts of a group that ended
            # are of no row that is generated. Keys, references and checks judge the rows as ever.
            for table in _TRIGGERED:
                await connection.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")
        yield PostgresTarget(connection, server, revision=found["revision"])
    finally:
        await let_go(connection)


async def check_schema(connection: Connection[Record], name: str, *, exact: bool = True) -> int:
    """The schema of the store in this database. Raises ConfigError where there is none, or (`exact`) another one than
    this version's."""
    newest = len(postgres_schema.migrations())
    tables = await connection.fetch(postgres_schema.FIND_TABLES, ["schema_migrations"])
    if not tables or not tables[0]["ours"]:
        raise ConfigError(f"store {name} does not exist: there is no run in this database")
    found: int = max(row["version"] for row in await connection.fetch(postgres_schema.READ_MIGRATIONS))
    if exact and found > newest:
        raise ConfigError(f"store {name} was migrated by a newer version (schema {found}; this one knows {newest})")
    if exact and found < newest:
        raise ConfigError(
            f"store {name} is of an older version (schema {found}, this one's is {newest}); start a replica once, which"
            " brings it up to date"
        )
    return found


async def connect(store: PostgresStore) -> tuple[Connection[Record], Server]:
    """A connection of its own to the database of `store`. Raises ConfigError."""
    server = _server(store)
    return await _connected(server), server


async def let_go(connection: Connection[Record]) -> None:
    """Close it, and with it undo what was not committed."""
    try:
        await connection.close(timeout=CLOSE_S)
    except DATABASE_ERRORS:  # it is cut now, which the server takes for the same
        connection.terminate()


async def _be_alone(connection: Connection[Record], server: Server, name: str) -> None:
    with one_line(server):
        try:
            await connection.execute(sql.LOCK_RUN)
            await connection.execute(KEEP_OUT)
        except asyncpg.LockNotAvailableError as exc:
            raise ConfigError(f"store {name} is in use: somebody else is at work in it") from exc
        alive = await connection.fetchrow(FIND_ALIVE)
    if alive is not None:
        raise ConfigError(
            f"store {name} is in use: replica {alive['name']} was alive {max(alive['ago'], 0):.0f} s ago; stop every"
            f" replica (one that was killed counts as alive for {alive['left_s']:.0f} s more)"
        )


def _server(store: PostgresStore) -> Server:
    return Server(store.url, statement_timeout_s=STATEMENT_S)


async def _connected(server: Server) -> Connection[Record]:
    try:
        return await server.connect()
    except StoreUnavailable as exc:
        raise ConfigError(str(exc)) from exc


@contextmanager
def one_line(server: Server) -> Iterator[None]:
    """What the database says, as a refusal that is short and shows no password."""
    try:
        yield
    except (*DATABASE_ERRORS, StoreUnavailable) as exc:
        text = str(exc) if isinstance(exc, StoreUnavailable) else server.told(exc)
        raise ConfigError(text if len(text) <= 500 else f"{text[:500]}…") from exc


def _converted(table: Table, rows: Iterable[Row], convert: Any) -> Iterator[Row]:
    texts = _TEXTS.get(table, ())
    for row in rows:
        if any(row[at] is not None for at in texts):
            values = list(row)
            for at in texts:
                values[at] = None if row[at] is None else convert(row[at])
            yield tuple(values)
        else:
            yield row


def _completed(table: Table, row: Row) -> Row:
    """`row` with what this store keeps beside it."""
    try:
        if table is Table.GROUPS:  # only of outstanding groups is it counted, and those have their prompts
            return *row, 0 if row[-1] is None else prompt_size(codec.decode_prompt(row[-1]))
        if table is Table.ROLLOUTS:
            _, _, index, ok, _, payload = row
            return *row, codec.decode_finished(payload, index).output_tokens if ok else 0
    except codec.CodecError as exc:
        raise ConfigError(f"a payload of group {row[0]} cannot be read: {exc}") from exc
    return row
