"""Every statement the SQLite store runs on its tables, by name. Parameters are bound, never formatted in."""

from __future__ import annotations

from typing import Final

# --- the run

READ_RUN: Final = """
SELECT policy_version, paused, final, last_seq, read_position, prompts_fingerprint, ends, acked, stale, dropped, failed
FROM run WHERE id = 1
"""

WRITE_RUN: Final = """
UPDATE run SET policy_version = ?, paused = ?, final = ?, last_seq = ?, read_position = ?, prompts_fingerprint = ?,
    ends = ?, acked = ?, stale = ?, dropped = ?, failed = ?
WHERE id = 1
"""

READ_POLICY_VERSION: Final = "SELECT policy_version FROM run WHERE id = 1"

# --- groups

INSERT_GROUP: Final = """
INSERT INTO groups (prompt_id, epoch, digest, num_generations, submitted_at, state, attempt, tries, version, rows,
    payload_bytes, reason, error, engine, lease_id, acked_by, end_number, changed_at, seq)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

UPDATE_GROUP: Final = """
UPDATE groups SET state = ?, attempt = ?, tries = ?, version = ?, rows = ?, payload_bytes = ?, reason = ?, error = ?,
    engine = ?, lease_id = ?, acked_by = ?, end_number = ?, changed_at = ?
WHERE seq = ?
"""

FIND_PROMPT: Final = "SELECT seq, digest FROM groups WHERE prompt_id = ? AND epoch = ?"

# The columns of a standing, in the order sqlite_read.group_from takes them.
READ_GROUP: Final = """
SELECT seq, prompt_id, epoch, num_generations, state, attempt, tries, version, rows, payload_bytes, reason, error,
    engine, lease_id, acked_by, submitted_at, changed_at, end_number
FROM groups WHERE seq = ?
"""

READ_OUTSTANDING: Final = """
SELECT seq, prompt_id, epoch, num_generations, state, attempt, tries, version, rows, payload_bytes, reason, error,
    engine, lease_id, acked_by, submitted_at, changed_at, end_number
FROM groups WHERE state IN ('pending', 'generating', 'scoring', 'ready', 'leased')
ORDER BY seq
"""

LIST_ANY: Final = """
SELECT seq, prompt_id, epoch, num_generations, state, attempt, tries, version, rows, payload_bytes, reason, error,
    engine, lease_id, acked_by, submitted_at, changed_at, end_number
FROM groups WHERE seq > ? ORDER BY seq LIMIT ?
"""

LIST_OUTSTANDING: Final = """
SELECT seq, prompt_id, epoch, num_generations, state, attempt, tries, version, rows, payload_bytes, reason, error,
    engine, lease_id, acked_by, submitted_at, changed_at, end_number
FROM groups WHERE state IN ('pending', 'generating', 'scoring', 'ready', 'leased') AND state = ? AND seq > ?
ORDER BY seq LIMIT ?
"""

LIST_ENDED: Final = """
SELECT seq, prompt_id, epoch, num_generations, state, attempt, tries, version, rows, payload_bytes, reason, error,
    engine, lease_id, acked_by, submitted_at, changed_at, end_number
FROM groups WHERE state IN ('acked', 'stale', 'dropped', 'failed') AND state = ? AND seq > ?
ORDER BY seq LIMIT ?
"""

# --- prompts, rollouts, scores

INSERT_PROMPT: Final = "INSERT INTO prompts (seq, payload) VALUES (?, ?)"

READ_PROMPT: Final = "SELECT payload FROM prompts WHERE seq = ?"

# While there is a checkpoint every prompt stays: a group that ends now ends after it.
# Of a JSON list of groups.
DELETE_PROMPTS: Final = """
DELETE FROM prompts WHERE seq IN (SELECT value FROM json_each(?)) AND NOT EXISTS (SELECT 1 FROM checkpoints)
"""

# What no checkpoint needs any more: prompts of groups that had ended by the oldest one. Prompts are few, ended groups
# are many: so it begins at the prompts.
DELETE_KEPT_PROMPTS: Final = """
DELETE FROM prompts WHERE seq IN (
    SELECT p.seq FROM prompts AS p CROSS JOIN groups AS g ON g.seq = p.seq
    WHERE g.end_number <= (SELECT coalesce(min(ends), 9223372036854775807) FROM checkpoints)
        AND NOT EXISTS (
            SELECT 1 FROM lease_groups AS m JOIN leases AS l ON l.lease_id = m.lease_id
            WHERE m.seq = p.seq AND l.state = 'live'
        )
)
"""

LAST_PAYLOAD_ID: Final = "SELECT coalesce(max(id), 0) FROM payloads"

INSERT_PAYLOAD: Final = "INSERT INTO payloads (id, payload) VALUES (?, ?)"

INSERT_ROLLOUT: Final = """
INSERT INTO rollouts (seq, attempt, idx, ok, payload_bytes, payload_id) VALUES (?, ?, ?, ?, ?, ?)
"""

# The settled rows of every outstanding group's current attempt; reads no payload.
READ_OUTSTANDING_ROLLOUTS: Final = """
SELECT g.seq, r.idx, r.ok, r.payload_bytes
FROM groups AS g CROSS JOIN rollouts AS r ON r.seq = g.seq AND r.attempt = g.attempt
WHERE g.state IN ('pending', 'generating', 'scoring', 'ready', 'leased')
"""

READ_SETTLED: Final = "SELECT idx, ok, payload_bytes FROM rollouts WHERE seq = ? AND attempt = ?"

READ_ROLLOUTS: Final = """
SELECT r.idx, r.ok, r.payload_bytes, p.payload
FROM rollouts AS r JOIN payloads AS p ON p.id = r.payload_id
WHERE r.seq = ? AND r.attempt = ?
ORDER BY r.idx
"""

WRITE_SCORE: Final = """
INSERT INTO scores (seq, attempt, payload) VALUES (?, ?, ?)
ON CONFLICT (seq, attempt) DO UPDATE SET payload = excluded.payload
"""

READ_SCORE: Final = "SELECT payload FROM scores WHERE seq = ? AND attempt = ?"

# These take a JSON list of groups: after a bump there are hundreds, and one statement each would hold up its aborts.
FORGET_OLD_ROLLOUTS: Final = """
DELETE FROM rollouts WHERE seq IN (SELECT value FROM json_each(?))
    AND attempt < (SELECT attempt FROM groups WHERE groups.seq = rollouts.seq)
"""

FORGET_OLD_SCORES: Final = """
DELETE FROM scores WHERE seq IN (SELECT value FROM json_each(?))
    AND attempt < (SELECT attempt FROM groups WHERE groups.seq = scores.seq)
"""

FORGET_FINISHED: Final = "DELETE FROM rollouts WHERE seq IN (SELECT value FROM json_each(?)) AND ok = 1"

FORGET_SCORES: Final = "DELETE FROM scores WHERE seq IN (SELECT value FROM json_each(?))"

# --- checkpoints

INSERT_CHECKPOINT: Final = """
INSERT INTO checkpoints (name, number, policy_version, ends, created_at) VALUES (?, ?, ?, ?, ?)
"""

DELETE_CHECKPOINT: Final = "DELETE FROM checkpoints WHERE name = ?"

READ_CHECKPOINTS: Final = "SELECT name, number, policy_version, ends, created_at FROM checkpoints ORDER BY number"

READ_ENDED_SINCE: Final = "SELECT seq FROM groups WHERE end_number > ? ORDER BY end_number"

# --- leases

UPDATE_LEASE: Final = "UPDATE leases SET expires_at = ?, state = ? WHERE lease_id = ?"

INSERT_LEASE: Final = """
INSERT INTO leases (lease_id, request_id, consumer, max_groups, min_groups, lease_s, policy_version, created_at,
    expires_at, state)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

INSERT_LEASE_GROUP: Final = "INSERT INTO lease_groups (lease_id, position, seq, attempt) VALUES (?, ?, ?, ?)"

# A group that a lease made just now may not carry: not held by it in that attempt, or of a version before the oldest.
FIND_UNLEASABLE: Final = """
SELECT g.seq, g.state, g.attempt, g.version, g.lease_id
FROM lease_groups AS m JOIN groups AS g ON g.seq = m.seq
WHERE m.lease_id = ?
    AND (g.state <> 'leased' OR g.lease_id <> m.lease_id OR g.attempt <> m.attempt OR g.version < ?)
ORDER BY m.position LIMIT 1
"""

# Whether a live lease was made with this group in this attempt.
FIND_HOLDER: Final = """
SELECT 1 FROM lease_groups AS m JOIN leases AS l ON l.lease_id = m.lease_id
WHERE m.lease_id = ? AND m.seq = ? AND m.attempt = ? AND l.state = 'live'
"""

FIND_STILL_HELD: Final = """
SELECT g.seq FROM lease_groups AS m JOIN groups AS g ON g.seq = m.seq
WHERE m.lease_id = ? AND g.lease_id = m.lease_id LIMIT 1
"""

READ_LEASE: Final = """
SELECT lease_id, request_id, consumer, max_groups, min_groups, lease_s, policy_version, created_at, expires_at, state
FROM leases WHERE lease_id = ?
"""

READ_LEASE_BY_REQUEST: Final = """
SELECT lease_id, request_id, consumer, max_groups, min_groups, lease_s, policy_version, created_at, expires_at, state
FROM leases WHERE request_id = ?
"""

READ_LIVE_LEASES: Final = """
SELECT lease_id, request_id, consumer, max_groups, min_groups, lease_s, policy_version, created_at, expires_at, state
FROM leases WHERE state = 'live' ORDER BY created_at, lease_id
"""

READ_LEASE_GROUPS: Final = "SELECT seq, attempt FROM lease_groups WHERE lease_id = ? ORDER BY position"

# --- for people

READ_SUBMITTED: Final = "SELECT last_seq FROM run WHERE id = 1"

COUNT_GROUPS: Final = "SELECT state, count(*) FROM groups GROUP BY state"

COUNT_ROWS: Final = """
SELECT 'groups', count(*) FROM groups UNION ALL
SELECT 'prompts', count(*) FROM prompts UNION ALL
SELECT 'rollouts', count(*) FROM rollouts UNION ALL
SELECT 'payloads', count(*) FROM payloads UNION ALL
SELECT 'scores', count(*) FROM scores UNION ALL
SELECT 'leases', count(*) FROM leases UNION ALL
SELECT 'lease_groups', count(*) FROM lease_groups
"""

SUM_PAYLOADS: Final = """
SELECT (SELECT coalesce(sum(length(payload)), 0) FROM payloads)
    + (SELECT coalesce(sum(length(payload)), 0) FROM prompts)
    + (SELECT coalesce(sum(length(payload)), 0) FROM scores)
"""
