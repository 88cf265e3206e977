"""Every statement the PostgreSQL store runs on its tables, by name. Parameters are bound, never formatted in.

What always holds: many rows are read and written by one statement; nothing that reads standings touches a payload;
state conditions of indexed reads are literal, because a partial index is used only where its condition is seen. A
statement that locks rows and may wait for them reads nothing else that changes: it would be older than the lock.
Columns are named one by one, so that those of a newer schema are no trouble.
"""

from __future__ import annotations

from typing import Final

# --- sent with BEGIN: how to plan, and the lock of the run

# Every statement goes from few keys to their rows, and is planned once a connection: to plan it for its parameters each
# time costs as much as to run it. So a plan that was made while a table was empty must be one that stays right when the
# table has grown. What is off counts as very dear, which is no reason to compile anything.
PLAN: Final = """
SET LOCAL plan_cache_mode = force_generic_plan; SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off;
SET LOCAL enable_mergejoin = off; SET LOCAL jit = off
"""

SHARE_RUN: Final = "SELECT pg_advisory_xact_lock_shared(hashtext('rollout-service run'), hashtext(current_schema()))"

LOCK_RUN: Final = "SELECT pg_advisory_xact_lock(hashtext('rollout-service run'), hashtext(current_schema()))"

LOCK_NAME: Final = "SELECT pg_advisory_xact_lock(hashtext('rollout-service: ' || $1::text), hashtext(current_schema()))"

# Nobody waits for a lock that is tried, so its owner may take longer than other transactions: for a slow disk.
PREPARING: Final = "SET LOCAL idle_in_transaction_session_timeout = '60s'"

TRY_NAME: Final = """
SELECT pg_try_advisory_xact_lock(hashtext('rollout-service: ' || $1::text), hashtext(current_schema()))
"""

# --- the run

READ_RUN: Final = """
SELECT r.policy_version, r.paused, r.final, r.last_seq, r.read_position, r.prompts_fingerprint, r.revision, r.taken,
    r.returns, r.halt, r.streak_failed, r.streak_unproductive, r.pace_relaxed, e.ends, t.*,
    extract(epoch FROM clock_timestamp())::double precision AS now
FROM run AS r,
    (SELECT CASE WHEN is_called THEN last_value ELSE 0 END AS ends FROM group_ends) AS e,
    (SELECT sum(pending)::bigint AS pending, sum(generating)::bigint AS generating, sum(scoring)::bigint AS scoring,
        sum(ready)::bigint AS ready, sum(leased)::bigint AS leased, sum(acked)::bigint AS acked,
        sum(stale)::bigint AS stale, sum(dropped)::bigint AS dropped, sum(failed)::bigint AS failed,
        sum(held_bytes)::bigint AS held_bytes, sum(prompt_bytes)::bigint AS prompt_bytes
    FROM tallies) AS t
WHERE r.id = 1
"""

HOLD_RUN: Final = "SELECT 1 FROM run WHERE id = 1 FOR UPDATE"

WRITE_RUN: Final = """
UPDATE run SET policy_version = $1, paused = $2, final = $3, last_seq = $4, read_position = $5,
    prompts_fingerprint = $6
WHERE id = 1
"""

WRITE_SHARED_RUN: Final = """
UPDATE run SET policy_version = $1, paused = $2, final = $3, last_seq = $4, read_position = $5,
    prompts_fingerprint = $6, revision = $7, taken = $8, returns = $9, halt = $10, streak_failed = $11,
    streak_unproductive = $12, pace_relaxed = $13
WHERE id = 1
"""

COUNT_TAKEN: Final = "UPDATE run SET taken = taken + 1, revision = revision + 1 WHERE id = 1"

# Makes the sums of the ended states what is given, whatever the transitions counted.
SET_ENDED: Final = """
UPDATE tallies AS t SET acked = t.acked + $1 - s.acked, stale = t.stale + $2 - s.stale,
    dropped = t.dropped + $3 - s.dropped, failed = t.failed + $4 - s.failed
FROM (SELECT min(shard) AS shard, sum(acked)::bigint AS acked, sum(stale)::bigint AS stale,
        sum(dropped)::bigint AS dropped, sum(failed)::bigint AS failed
    FROM tallies) AS s
WHERE t.shard = s.shard
"""

# Never below a number that is taken. Not undone with its transaction: to be the last thing in it.
SET_ENDS: Final = """
SELECT setval('group_ends', greatest(e.ends, 1), e.ends > 0)
FROM (SELECT greatest($1::bigint, (SELECT max(end_number) FROM groups WHERE end_number IS NOT NULL)) AS ends) AS e
"""

# --- groups

_STANDING: Final = """
SELECT g.seq, g.prompt_id, g.epoch, g.num_generations, g.state, g.attempt, g.tries, g.version, g.rows, g.payload_bytes,
    g.reason, g.error, g.engine, g.lease_id, g.acked_by, g.end_number, g.owner, g.claim, g.submitted_at, g.changed_at,
    s.settled, s.oks, s.sizes
FROM groups AS g CROSS JOIN LATERAL (
    SELECT array_agg(r.idx) AS settled, array_agg(r.ok) AS oks, array_agg(r.payload_bytes) AS sizes
    FROM rollouts AS r
    WHERE r.seq = g.seq AND r.attempt = g.attempt AND g.outstanding
) AS s
"""


def _standings(which: str) -> str:
    """Standings, with the settled rows of outstanding ones, as `postgres_read.group_from` takes them."""
    return "".join((_STANDING, which))


READ_GROUPS: Final = _standings("WHERE g.seq = ANY($1::bigint[]) ORDER BY g.seq")

READ_OUTSTANDING: Final = _standings("WHERE g.outstanding ORDER BY g.seq")

READ_OLDEST: Final = _standings("WHERE g.outstanding ORDER BY g.seq LIMIT 1")

LIST_ANY: Final = "SELECT seq FROM groups WHERE seq > $1 ORDER BY seq LIMIT $2"

# Each ended state has its own stretch of the index; so many are read of each as may be needed of all. (Compared as a
# row: with the number alone the primary key would seem as good, whose next group of a rare state may be far away.)
LIST_GROUPS: Final = """
SELECT seq FROM (
    (SELECT seq FROM groups WHERE outstanding AND state = ANY($1::text[]) AND seq > $2 ORDER BY seq LIMIT $3)
    UNION ALL
    SELECT e.seq FROM unnest($1::text[]) AS wanted (state) CROSS JOIN LATERAL (
        SELECT seq FROM groups AS g
        WHERE g.state IN ('acked', 'stale', 'dropped', 'failed') AND g.state = wanted.state
            AND (g.state, g.seq) > (wanted.state, $2)
        ORDER BY g.seq LIMIT $3
    ) AS e
) AS found ORDER BY seq LIMIT $3
"""

FIND_PROMPTS: Final = """
SELECT g.prompt_id, g.epoch, g.seq, g.digest
FROM unnest($1::text[], $2::bigint[]) AS k (prompt_id, epoch)
JOIN groups AS g ON g.prompt_id = k.prompt_id AND g.epoch = k.epoch
"""

READ_ENDED_SINCE: Final = "SELECT seq FROM groups WHERE end_number > $1 ORDER BY end_number"

LOCK_GROUPS: Final = """
SELECT seq, owner, claim FROM groups WHERE seq = ANY($1::bigint[]) ORDER BY seq FOR UPDATE
"""

CLAIMS_OF: Final = "SELECT seq, claim FROM groups WHERE owner = $1"

LOCK_CLAIMABLE: Final = """
WITH orphaned AS MATERIALIZED (
    SELECT seq FROM groups WHERE state IN ('generating', 'scoring') AND owner IS NULL
    ORDER BY seq LIMIT $1 FOR UPDATE SKIP LOCKED
), fresh AS MATERIALIZED (
    SELECT seq FROM groups WHERE state = 'pending'
    ORDER BY (attempt = 1), seq LIMIT CASE WHEN $2::boolean THEN $1 - (SELECT count(*) FROM orphaned) ELSE 0 END
    FOR UPDATE SKIP LOCKED
)
SELECT seq FROM orphaned UNION ALL SELECT seq FROM fresh
"""

LOCK_TO_SCORE: Final = """
SELECT seq FROM groups WHERE state IN ('generating', 'scoring') AND owner IS NULL AND state = 'scoring'
ORDER BY seq LIMIT $1 FOR UPDATE SKIP LOCKED
"""

LOCK_READY: Final = """
SELECT seq FROM groups WHERE state = 'ready' AND version >= $2
ORDER BY version, seq LIMIT $1 FOR UPDATE SKIP LOCKED
"""

LOCK_OUTDATED: Final = """
SELECT seq FROM groups
WHERE version < $1 AND (state = 'ready' OR (state IN ('generating', 'scoring') AND owner IS NULL))
ORDER BY seq FOR UPDATE
"""

LOCK_OPENED: Final = """
SELECT seq FROM groups WHERE outstanding AND state <> 'pending' ORDER BY seq FOR UPDATE
"""

# Groups and their prompts. $1 to $14 are standings, as for UPDATE_GROUPS; $22 is whose the opened ones are.
INSERT_GROUPS: Final = """
WITH given AS MATERIALIZED (
    SELECT * FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::text[], $7::bigint[],
        $8::text[], $9::text[], $10::text[], $11::text[], $12::text[], $13::bigint[], $14::double precision[],
        $15::text[], $16::bigint[], $17::bytea[], $18::bigint[], $19::bigint[], $20::double precision[], $21::bytea[])
    AS g (seq, state, attempt, tries, version, rows, payload_bytes, reason, error, engine, lease_id, acked_by,
        end_number, changed_at, prompt_id, epoch, digest, num_generations, prompt_bytes, submitted_at, prompt)
), made AS (
    INSERT INTO groups (seq, state, attempt, tries, version, rows, payload_bytes, reason, error, engine, lease_id,
        acked_by, end_number, changed_at, prompt_id, epoch, digest, num_generations, prompt_bytes, submitted_at,
        owner, claim)
    SELECT seq, state, attempt, tries, version, rows, payload_bytes, reason, error, engine, lease_id,
        acked_by, end_number, changed_at, prompt_id, epoch, digest, num_generations, prompt_bytes, submitted_at,
        CASE WHEN state IN ('generating', 'scoring') THEN $22::text END,
        CASE WHEN state IN ('generating', 'scoring') AND $22::text IS NOT NULL THEN 1 ELSE 0 END
    FROM given
)
INSERT INTO prompts (seq, payload) SELECT seq, prompt FROM given
"""

# $15: whose the opened ones are from now on. $16: whether ends are numbered here, in the order given; a group that had
# ended in this attempt keeps its number, and its own here is null. (Asked as a value: EXISTS might be answered by
# reading every group that ever ended.)
_MOVED: Final = """
WITH moved AS MATERIALIZED (
    SELECT m.*, CASE
        WHEN NOT $16::boolean THEN m.end_number
        WHEN m.state IN ('acked', 'stale', 'dropped', 'failed')
            AND (SELECT g.end_number FROM groups AS g WHERE g.seq = m.seq AND g.attempt = m.attempt) IS NULL
        THEN nextval('group_ends') END AS number
    FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::text[], $7::bigint[],
        $8::text[], $9::text[], $10::text[], $11::text[], $12::text[], $13::bigint[], $14::double precision[])
    AS m (seq, state, attempt, tries, version, rows, payload_bytes, reason, error, engine, lease_id, acked_by,
        end_number, changed_at)
)
"""

_MOVE: Final = """
UPDATE groups AS g SET state = m.state, attempt = m.attempt, tries = m.tries, version = m.version, rows = m.rows,
    payload_bytes = m.payload_bytes, reason = m.reason, error = m.error, engine = m.engine, lease_id = m.lease_id,
    acked_by = m.acked_by, changed_at = m.changed_at,
    end_number = CASE
        WHEN $16 AND m.state IN ('acked', 'stale', 'dropped', 'failed') THEN coalesce(m.number, g.end_number)
        ELSE m.number END,
    owner = CASE WHEN m.state IN ('generating', 'scoring') THEN $15::text END,
    claim = g.claim + CASE
        WHEN m.state IN ('generating', 'scoring') AND $15::text IS NOT NULL AND g.owner IS DISTINCT FROM $15::text
        THEN 1 ELSE 0 END
FROM moved AS m WHERE g.seq = m.seq
RETURNING g.seq, g.owner, g.claim
"""

UPDATE_GROUPS: Final = "".join((_MOVED, _MOVE))

# --- prompts, rollouts, scores

READ_PROMPTS: Final = "SELECT seq, payload FROM prompts WHERE seq = ANY($1::bigint[])"

# All there is of groups: rollouts and scores of attempts that are given, so that what is found belongs to the standings
# it was asked for, and prompts ($1). OFFSET 0 keeps the order in which tables are joined: from the keys to their rows,
# however few rows there were when it was planned.
READ_PAYLOADS: Final = """
SELECT 'rollout' AS kind, r.seq, r.idx, r.ok, r.payload_bytes, r.payload
FROM unnest($1::bigint[], $2::bigint[]) AS k (seq, attempt) CROSS JOIN LATERAL (
    SELECT o.seq, o.idx, o.ok, o.payload_bytes, o.payload FROM rollouts AS o
    WHERE o.seq = k.seq AND o.attempt = k.attempt OFFSET 0
) AS r
UNION ALL
SELECT 'score', s.seq, NULL, NULL, NULL, s.payload
FROM unnest($1::bigint[], $2::bigint[]) AS k (seq, attempt) CROSS JOIN LATERAL (
    SELECT o.seq, o.payload FROM scores AS o WHERE o.seq = k.seq AND o.attempt = k.attempt OFFSET 0
) AS s
UNION ALL
SELECT 'prompt', seq, NULL, NULL, NULL, payload FROM prompts WHERE seq = ANY($1::bigint[])
"""

SUM_TOKENS: Final = """
SELECT g.seq, r.tokens
FROM groups AS g CROSS JOIN LATERAL (
    SELECT sum(o.output_tokens)::bigint AS tokens FROM rollouts AS o
    WHERE o.seq = g.seq AND o.attempt = g.attempt AND o.ok
) AS r
WHERE g.seq = ANY($1::bigint[]) AND r.tokens IS NOT NULL
"""

INSERT_SETTLED: Final = """
WITH scored AS (
    INSERT INTO scores (seq, attempt, payload) SELECT * FROM unnest($8::bigint[], $9::bigint[], $10::bytea[])
    ON CONFLICT (seq, attempt) DO UPDATE SET payload = excluded.payload
)
INSERT INTO rollouts (seq, attempt, idx, ok, payload_bytes, output_tokens, payload)
SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::boolean[], $5::bigint[], $6::bigint[], $7::bytea[])
"""

# $1: groups of which earlier attempts go; $2: those of them of which all goes. While there is a checkpoint every prompt
# stays: a group that ends now ends after it. Rows are found as in READ_PAYLOADS and removed by where they are, which
# stays so within the statement: the groups are locked, and nobody else writes or removes rows of theirs.
FORGET: Final = """
WITH old_scores AS (
    DELETE FROM scores WHERE ctid = ANY(ARRAY(
        SELECT s.at FROM groups AS g CROSS JOIN LATERAL (
            SELECT o.ctid AS at FROM scores AS o
            WHERE o.seq = g.seq AND (o.attempt < g.attempt OR g.seq = ANY($2::bigint[])) OFFSET 0
        ) AS s
        WHERE g.seq = ANY($1::bigint[])
    ))
), old_prompts AS (
    DELETE FROM prompts WHERE seq = ANY($2::bigint[]) AND NOT EXISTS (SELECT 1 FROM checkpoints)
)
DELETE FROM rollouts WHERE ctid = ANY(ARRAY(
    SELECT r.at FROM groups AS g CROSS JOIN LATERAL (
        SELECT o.ctid AS at FROM rollouts AS o
        WHERE o.seq = g.seq AND (o.attempt < g.attempt OR (o.ok AND g.seq = ANY($2::bigint[]))) OFFSET 0
    ) AS r
    WHERE g.seq = ANY($1::bigint[])
))
"""

# --- checkpoints

READ_CHECKPOINTS: Final = "SELECT name, number, policy_version, ends, created_at FROM checkpoints ORDER BY number"

DELETE_CHECKPOINTS: Final = "DELETE FROM checkpoints WHERE name = ANY($1::text[])"

INSERT_CHECKPOINTS: Final = """
INSERT INTO checkpoints (name, number, policy_version, ends, created_at)
SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::double precision[])
"""

# What no checkpoint needs any more: prompts of groups that had ended by the oldest one. Prompts are few, ended groups
# are many: so it begins at the prompts.
DELETE_KEPT_PROMPTS: Final = """
DELETE FROM prompts AS p
WHERE (SELECT g.end_number FROM groups AS g WHERE g.seq = p.seq)
        <= (SELECT coalesce(min(ends), 9223372036854775807) FROM checkpoints)
    AND p.seq <> ALL(ARRAY(
        SELECT m.seq FROM leases AS l JOIN lease_groups AS m ON m.lease_id = l.lease_id WHERE l.state = 'live'
    ))
"""

# --- leases

_LEASE: Final = """
SELECT l.lease_id, l.request_id, l.consumer, l.max_groups, l.min_groups, l.lease_s, l.policy_version, l.created_at,
    l.expires_at, l.state,
    ARRAY(SELECT m.seq FROM lease_groups AS m WHERE m.lease_id = l.lease_id ORDER BY m.position) AS seqs,
    ARRAY(SELECT m.attempt FROM lease_groups AS m WHERE m.lease_id = l.lease_id ORDER BY m.position) AS attempts
FROM leases AS l
"""


def _leases(which: str) -> str:
    """Leases as `postgres_read.lease_from` takes them. Their members never change, so these may be read with a lock."""
    return "".join((_LEASE, which))


READ_LEASE: Final = _leases("WHERE l.lease_id = $1")
READ_LEASE_BY_REQUEST: Final = _leases("WHERE l.request_id = $1")
READ_LIVE_LEASES: Final = _leases("WHERE l.state = 'live' ORDER BY l.created_at, l.lease_id")

# With every group it was made with: whoever asks for it by its id is about to deal with them.
LOCK_LEASE: Final = "".join(
    (
        "WITH held AS MATERIALIZED (",
        _leases("WHERE l.lease_id = $1 FOR UPDATE OF l"),
        """
), locked AS MATERIALIZED (
    SELECT seq FROM groups WHERE seq = ANY(ARRAY(SELECT unnest(seqs) FROM held)) ORDER BY seq FOR UPDATE
)
SELECT held.*, ARRAY(SELECT seq FROM locked) AS locked FROM held
""",
    )
)
LOCK_LEASE_BY_REQUEST: Final = _leases("WHERE l.request_id = $1 FOR UPDATE OF l")
LOCK_LIVE_LEASES: Final = _leases("WHERE l.state = 'live' ORDER BY l.created_at, l.lease_id FOR UPDATE OF l")
LOCK_LEASES_DUE: Final = _leases(
    "WHERE l.state = 'live' AND l.expires_at <= $1 ORDER BY l.expires_at, l.lease_id LIMIT $2"
    " FOR UPDATE OF l SKIP LOCKED"
)

COUNT_LIVE_LEASES: Final = "SELECT count(*) FROM leases WHERE state = 'live'"

# Leases and the groups that go into them and out of them; $1 to $16 as for UPDATE_GROUPS. Known leases ($17 to $26) get
# their new end and state, new ones their members ($27 to $30); the ids of those that are new come back too. References
# are checked when the statement has done everything.
WRITE_LEASES: Final = "".join(
    (
        _MOVED,
        """, given AS MATERIALIZED (
    SELECT * FROM unnest($17::text[], $18::text[], $19::text[], $20::bigint[], $21::bigint[], $22::bigint[],
        $23::bigint[], $24::double precision[], $25::double precision[], $26::text[])
    AS l (lease_id, request_id, consumer, max_groups, min_groups, lease_s, policy_version, created_at, expires_at,
        state)
), known AS (
    UPDATE leases AS l SET expires_at = given.expires_at, state = given.state
    FROM given WHERE l.lease_id = given.lease_id
    RETURNING l.lease_id
), made AS (
    INSERT INTO leases (lease_id, request_id, consumer, max_groups, min_groups, lease_s, policy_version, created_at,
        expires_at, state)
    SELECT * FROM given WHERE lease_id NOT IN (SELECT lease_id FROM known)
    RETURNING lease_id
), members AS (
    INSERT INTO lease_groups (lease_id, position, seq, attempt)
    SELECT * FROM unnest($27::text[], $28::bigint[], $29::bigint[], $30::bigint[])
    AS m (lease_id, position, seq, attempt) WHERE m.lease_id IN (SELECT lease_id FROM made)
), changed AS (""",
        _MOVE,
        """)
SELECT NULL AS lease_id, seq, owner, claim FROM changed UNION ALL SELECT lease_id, NULL, NULL, NULL FROM made
""",
    )
)

INSERT_LEASE_GROUPS: Final = """
INSERT INTO lease_groups (lease_id, position, seq, attempt)
SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[])
"""

# What is held after this transaction is held by the live lease made with it. $1: groups that are leased now, $2: leases
# that were written, $3: those of them that are new, $4: the largest staleness. The policy version needs no lock of its
# own: who changes it is alone.
FIND_BAD_HOLDS: Final = """
WITH run_now AS MATERIALIZED (SELECT policy_version FROM run WHERE id = 1)
SELECT 0 AS rule, g.lease_id, g.seq, g.state, g.attempt, g.version, g.lease_id AS holder, run_now.policy_version
FROM run_now CROSS JOIN groups AS g
WHERE g.seq = ANY($1::bigint[]) AND g.state = 'leased' AND NOT EXISTS (
    SELECT 1 FROM lease_groups AS m JOIN leases AS l ON l.lease_id = m.lease_id
    WHERE m.lease_id = g.lease_id AND m.seq = g.seq AND m.attempt = g.attempt AND l.state = 'live'
)
UNION ALL
SELECT 1, l.lease_id, g.seq, g.state, g.attempt, g.version, g.lease_id, run_now.policy_version
FROM run_now CROSS JOIN leases AS l JOIN lease_groups AS m ON m.lease_id = l.lease_id JOIN groups AS g ON g.seq = m.seq
WHERE l.lease_id = ANY($2::text[]) AND l.state <> 'live' AND g.lease_id = l.lease_id
UNION ALL
SELECT 2, l.lease_id, g.seq, g.state, g.attempt, g.version, g.lease_id, run_now.policy_version
FROM run_now CROSS JOIN leases AS l JOIN lease_groups AS m ON m.lease_id = l.lease_id JOIN groups AS g ON g.seq = m.seq
WHERE l.lease_id = ANY($3::text[]) AND l.state = 'live' AND (
    g.state <> 'leased' OR g.lease_id <> m.lease_id OR g.attempt <> m.attempt
    OR g.version < run_now.policy_version - $4::bigint
)
LIMIT 1
"""

# Groups in leases made at the current version that these still hold, and ($1) that were acked under them.
FIND_PACED: Final = """
SELECT g.seq
FROM leases AS l JOIN lease_groups AS m ON m.lease_id = l.lease_id JOIN groups AS g ON g.seq = m.seq
WHERE l.policy_version = (SELECT policy_version FROM run WHERE id = 1)
    AND ($1::boolean OR l.state = 'live')
    AND (g.lease_id = l.lease_id OR ($1::boolean AND g.acked_by = l.lease_id))
"""

# --- engines

WISH: Final = """
INSERT INTO engines (engine_id, url, wanted, max_inflight, drain_s, asked_at)
VALUES ($1, $2, $3, $4, $5, extract(epoch FROM clock_timestamp()))
ON CONFLICT (engine_id) DO UPDATE SET number = DEFAULT, url = excluded.url, wanted = excluded.wanted,
    max_inflight = CASE WHEN engines.wanted AND excluded.wanted
        THEN coalesce(excluded.max_inflight, engines.max_inflight) ELSE excluded.max_inflight END,
    drain_s = excluded.drain_s, asked_at = excluded.asked_at
RETURNING engine_id, url, number, wanted, max_inflight, drain_s
"""

READ_WANTED: Final = "SELECT engine_id FROM engines WHERE wanted"

READ_WISHES: Final = "SELECT engine_id, url, number, wanted, max_inflight, drain_s FROM engines ORDER BY number"

REMEMBER_REMOVAL: Final = """
UPDATE engines SET asked_at = extract(epoch FROM clock_timestamp()) WHERE number = $1 AND NOT wanted
"""

FORGET_REMOVAL: Final = """
DELETE FROM engines
WHERE number = $1 AND NOT wanted AND asked_at < extract(epoch FROM clock_timestamp()) - $2::double precision
"""

# --- replicas

READ_RIVALS: Final = """
SELECT name, rules, prompts FROM replicas
WHERE replica_id <> $1 AND expires_at > extract(epoch FROM clock_timestamp()) ORDER BY started_at, replica_id
"""

JOIN: Final = """
INSERT INTO replicas (replica_id, name, service, rules, prompts, slots, in_flight, engines, healthy_engines, enforced,
    stale_groups, aborted_rollouts, started_at, seen_at, expires_at)
SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, now.s, now.s, now.s + $13::double precision
FROM (SELECT extract(epoch FROM clock_timestamp())::double precision AS s) AS now
ON CONFLICT (replica_id) DO UPDATE SET name = excluded.name, service = excluded.service, rules = excluded.rules,
    prompts = excluded.prompts, slots = excluded.slots, in_flight = excluded.in_flight, engines = excluded.engines,
    healthy_engines = excluded.healthy_engines, enforced = excluded.enforced, stale_groups = excluded.stale_groups,
    aborted_rollouts = excluded.aborted_rollouts, seen_at = excluded.seen_at, expires_at = excluded.expires_at
"""

BEAT: Final = """
UPDATE replicas SET name = $2, service = $3, rules = $4, prompts = $5, slots = $6, in_flight = $7, engines = $8,
    healthy_engines = $9, enforced = $10, stale_groups = $11, aborted_rollouts = $12, seen_at = now.s,
    expires_at = now.s + $13::double precision
FROM (SELECT extract(epoch FROM clock_timestamp())::double precision AS s) AS now
WHERE replica_id = $1
RETURNING replica_id
"""

# One whose heartbeat is under way is not locked out of it, but looked at again next time.
LOCK_OVERDUE: Final = """
SELECT replica_id, name FROM replicas WHERE expires_at <= extract(epoch FROM clock_timestamp())
ORDER BY replica_id FOR UPDATE SKIP LOCKED
"""

# What those of $1 own, and what is owned by a replica nobody knows: it was expelled while it claimed.
LOCK_FORFEIT: Final = """
SELECT seq FROM groups WHERE owner IS NOT NULL
    AND (owner = ANY($1::text[]) OR NOT EXISTS (SELECT 1 FROM replicas AS r WHERE r.replica_id = groups.owner))
ORDER BY seq FOR UPDATE
"""

DISOWN: Final = "UPDATE groups SET owner = NULL WHERE seq = ANY($1::bigint[]) AND owner IS NOT NULL"

LOCK_OWNED: Final = "SELECT seq FROM groups WHERE owner = $1 ORDER BY seq FOR UPDATE"

FORGET_REPLICAS: Final = """
WITH numbers AS (DELETE FROM batches WHERE replica_id = ANY($1::text[]))
DELETE FROM replicas WHERE replica_id = ANY($1::text[])
"""

READ_REPLICAS: Final = """
SELECT r.replica_id, r.name, r.service, r.rules, r.prompts, r.slots, r.in_flight, r.engines, r.healthy_engines,
    r.enforced, r.stale_groups, r.aborted_rollouts, r.started_at, r.seen_at, r.expires_at,
    (SELECT count(*) FROM groups AS g WHERE g.owner = r.replica_id) AS claims
FROM replicas AS r ORDER BY r.started_at, r.replica_id
"""

ONCE: Final = """
INSERT INTO batches AS b (replica_id, number) VALUES ($1, $2)
ON CONFLICT (replica_id) DO UPDATE SET number = excluded.number WHERE b.number < excluded.number
RETURNING number
"""

# --- for people

COUNT_GROUPS: Final = "SELECT state, count(*) FROM groups GROUP BY state"
