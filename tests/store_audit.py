"""What must hold in a store's tables at every moment, whoever wrote them: rule by rule, read by SQL alone.

What always holds: an audit is one consistent look that changes nothing, so it may be taken while services are at work;
it returns one line for each rule that is broken, with some of the rows that break it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import asyncpg

SHOWN: Final = 5
"""Rows of a broken rule that are told."""

OUTSTANDING: Final = ("pending", "generating", "scoring", "ready", "leased")
ENDED: Final = ("acked", "stale", "dropped", "failed")
"""Written <outstanding> and <ended> in the rules."""

# Each gives the rows that break it, and is the same for both databases.
RULES: Final[Mapping[str, str]] = {
    "as many groups as were submitted": """
        SELECT run.last_seq, (SELECT count(*) FROM groups) AS counted FROM run
        WHERE run.last_seq <> (SELECT count(*) FROM groups)""",
    "groups are numbered without a gap": "SELECT seq FROM groups WHERE seq > (SELECT last_seq FROM run)",
    "an acked group was in the lease that it was acked under": """
        SELECT g.seq, g.attempt, g.acked_by FROM groups AS g WHERE g.state = 'acked' AND NOT EXISTS (
            SELECT 1 FROM lease_groups AS m
            WHERE m.lease_id = g.acked_by AND m.seq = g.seq AND m.attempt = g.attempt)""",
    # It names its one holder, so that no two hold it.
    "a leased group is held by a live lease that was made with it": """
        SELECT g.seq, g.attempt, g.lease_id FROM groups AS g WHERE g.state = 'leased' AND NOT EXISTS (
            SELECT 1 FROM lease_groups AS m JOIN leases AS l ON l.lease_id = m.lease_id
            WHERE m.lease_id = g.lease_id AND m.seq = g.seq AND m.attempt = g.attempt AND l.state = 'live')""",
    "only leased groups are held, and only acked ones acked": """
        SELECT seq, state, lease_id, acked_by FROM groups
        WHERE (state = 'leased') <> (lease_id IS NOT NULL) OR (state = 'acked') <> (acked_by IS NOT NULL)""",
    "a live lease holds something": """
        SELECT l.lease_id FROM leases AS l WHERE l.state = 'live' AND NOT EXISTS (
            SELECT 1 FROM lease_groups AS m JOIN groups AS g ON g.seq = m.seq
            WHERE m.lease_id = l.lease_id AND g.lease_id = l.lease_id)""",
    "a lease was made with a group": """
        SELECT l.lease_id FROM leases AS l
        WHERE NOT EXISTS (SELECT 1 FROM lease_groups AS m WHERE m.lease_id = l.lease_id)""",
    "a request_id made one lease": """
        SELECT request_id, count(*) FROM leases WHERE request_id IS NOT NULL GROUP BY request_id HAVING count(*) > 1""",
    "a lease names no attempt that never was": """
        SELECT m.lease_id, m.seq, m.attempt FROM lease_groups AS m JOIN groups AS g ON g.seq = m.seq
        WHERE m.attempt > g.attempt""",
    "every group that ended has a number, and no other one does": """
        SELECT seq, state, end_number FROM groups
        WHERE (state IN <ended>) <> (end_number IS NOT NULL)""",
    "end numbers are unique": """
        SELECT end_number, count(*) FROM groups WHERE end_number IS NOT NULL
        GROUP BY end_number HAVING count(*) > 1""",
    "identities are unique": "SELECT prompt_id, epoch FROM groups GROUP BY prompt_id, epoch HAVING count(*) > 1",
    "an outstanding group has its prompt": """
        SELECT g.seq, g.state FROM groups AS g
        WHERE g.state IN <outstanding> AND NOT EXISTS (SELECT 1 FROM prompts AS p WHERE p.seq = g.seq)""",
    "a prompt that ended stays only for a checkpoint or a live lease": """
        SELECT p.seq FROM prompts AS p JOIN groups AS g ON g.seq = p.seq
        WHERE g.state IN <ended> AND NOT EXISTS (SELECT 1 FROM checkpoints) AND NOT EXISTS (
            SELECT 1 FROM lease_groups AS m JOIN leases AS l ON l.lease_id = m.lease_id
            WHERE m.seq = g.seq AND l.state = 'live')""",
    "finished rollouts of a group that ended stay only for a live lease": """
        SELECT r.seq, r.attempt, r.idx FROM rollouts AS r JOIN groups AS g ON g.seq = r.seq
        WHERE g.state IN <ended> AND r.ok AND NOT EXISTS (
            SELECT 1 FROM lease_groups AS m JOIN leases AS l ON l.lease_id = m.lease_id
            WHERE m.seq = g.seq AND l.state = 'live')""",
    "scores of a group that ended stay only for a live lease": """
        SELECT s.seq, s.attempt FROM scores AS s JOIN groups AS g ON g.seq = s.seq
        WHERE g.state IN <ended> AND NOT EXISTS (
            SELECT 1 FROM lease_groups AS m JOIN leases AS l ON l.lease_id = m.lease_id
            WHERE m.seq = g.seq AND l.state = 'live')""",
    "a rollout is of a row of the current attempt": """
        SELECT r.seq, r.attempt, r.idx FROM rollouts AS r LEFT JOIN groups AS g ON g.seq = r.seq
        WHERE g.seq IS NULL OR r.attempt <> g.attempt OR r.idx >= g.num_generations""",
    "a score is of the current attempt": """
        SELECT s.seq, s.attempt FROM scores AS s LEFT JOIN groups AS g ON g.seq = s.seq
        WHERE g.seq IS NULL OR s.attempt <> g.attempt""",
    "a prompt is of a group": """
        SELECT p.seq FROM prompts AS p LEFT JOIN groups AS g ON g.seq = p.seq WHERE g.seq IS NULL""",
    "what is scored has every rollout": """
        SELECT g.seq, g.state, g.rows FROM groups AS g
        WHERE g.state IN ('scoring', 'ready', 'leased') AND length(replace(g.rows, '-', '')) <> (
            SELECT count(*) FROM rollouts AS r WHERE r.seq = g.seq AND r.attempt = g.attempt)""",
    "what is ready has a score and what it says is finished": """
        SELECT g.seq, g.state, g.rows FROM groups AS g
        WHERE g.state IN ('ready', 'leased') AND (
            NOT EXISTS (SELECT 1 FROM scores AS s WHERE s.seq = g.seq AND s.attempt = g.attempt)
            OR length(g.rows) - length(replace(g.rows, 'f', '')) <> (
                SELECT count(*) FROM rollouts AS r WHERE r.seq = g.seq AND r.attempt = g.attempt AND r.ok))""",
    "nothing is of a version that was never posted": """
        SELECT seq, version FROM groups WHERE state IN ('generating', 'scoring', 'ready', 'leased')
            AND version > (SELECT policy_version FROM run)""",
    "a checkpoint is of an end that was": """
        SELECT name, ends FROM checkpoints AS c WHERE EXISTS (SELECT 1 FROM checkpoints AS o
            WHERE o.number > c.number AND o.ends < c.ends)""",
}

STALENESS: Final = """
    SELECT m.lease_id, m.seq, g.version, l.policy_version
    FROM lease_groups AS m JOIN leases AS l ON l.lease_id = m.lease_id
        JOIN groups AS g ON g.seq = m.seq AND g.attempt = m.attempt
    WHERE g.version < l.policy_version - ({}) OR g.version > l.policy_version
"""

SQLITE_RULES: Final[Mapping[str, str]] = {
    "counters are what a count finds": """
        SELECT 'acked', acked FROM run WHERE acked <> (SELECT count(*) FROM groups WHERE state = 'acked') UNION ALL
        SELECT 'stale', stale FROM run WHERE stale <> (SELECT count(*) FROM groups WHERE state = 'stale') UNION ALL
        SELECT 'dropped', dropped FROM run
            WHERE dropped <> (SELECT count(*) FROM groups WHERE state = 'dropped') UNION ALL
        SELECT 'failed', failed FROM run WHERE failed <> (SELECT count(*) FROM groups WHERE state = 'failed')""",
    "ends are counted": """
        SELECT ends, (SELECT max(end_number) FROM groups) FROM run
        WHERE ends < (SELECT coalesce(max(end_number), 0) FROM groups)""",
    "every rollout has its payload, and every payload its rollout": """
        SELECT 'payload', id FROM payloads WHERE id NOT IN (SELECT payload_id FROM rollouts)
        UNION ALL SELECT 'rollout', payload_id FROM rollouts WHERE payload_id NOT IN (SELECT id FROM payloads)""",
}

POSTGRES_RULES: Final[Mapping[str, str]] = {
    "counters are what a count finds": """
        SELECT t::text AS counters, c::text AS counted FROM (
            SELECT sum(pending) AS pending, sum(generating) AS generating, sum(scoring) AS scoring,
                sum(ready) AS ready, sum(leased) AS leased, sum(acked) AS acked, sum(stale) AS stale,
                sum(dropped) AS dropped, sum(failed) AS failed, sum(held_bytes) AS held_bytes,
                sum(prompt_bytes) AS prompt_bytes
            FROM tallies
        ) AS t, (
            SELECT count(*) FILTER (WHERE state = 'pending') AS pending,
                count(*) FILTER (WHERE state = 'generating') AS generating,
                count(*) FILTER (WHERE state = 'scoring') AS scoring,
                count(*) FILTER (WHERE state = 'ready') AS ready, count(*) FILTER (WHERE state = 'leased') AS leased,
                count(*) FILTER (WHERE state = 'acked') AS acked, count(*) FILTER (WHERE state = 'stale') AS stale,
                count(*) FILTER (WHERE state = 'dropped') AS dropped,
                count(*) FILTER (WHERE state = 'failed') AS failed,
                coalesce(sum(payload_bytes) FILTER (WHERE state IN ('scoring', 'ready')), 0) AS held_bytes,
                coalesce(sum(prompt_bytes) FILTER (WHERE state IN <outstanding>), 0) AS prompt_bytes
            FROM groups
        ) AS c
        WHERE t::text <> c::text""",
    "identity, of the counters alone": """
        SELECT run.last_seq, t.n FROM run, (SELECT sum(pending + generating + scoring + ready + leased + acked + stale
            + dropped + failed) AS n FROM tallies) AS t
        WHERE run.last_seq <> t.n""",
    "ends are counted": """
        SELECT e.last_value, g.n FROM group_ends AS e, (SELECT max(end_number) AS n FROM groups) AS g
        WHERE g.n > CASE WHEN e.is_called THEN e.last_value ELSE 0 END""",
    "only what is generated or scored has an owner, under a claim": """
        SELECT seq, state, owner, claim FROM groups
        WHERE owner IS NOT NULL AND (state NOT IN ('generating', 'scoring') OR claim < 1)""",
    "an outstanding group knows the size of its prompt": """
        SELECT seq, prompt_bytes FROM groups WHERE state IN <outstanding> AND prompt_bytes <= 0""",
}

PARENTLESS: Final = """
    SELECT g.seq, g.owner FROM groups AS g
    WHERE g.owner IS NOT NULL AND NOT EXISTS (SELECT 1 FROM replicas AS r WHERE r.replica_id = g.owner)
"""


async def audit_postgres(url: str, *, max_staleness: int | None = None, at_rest: bool = False) -> list[str]:
    """What is broken in the database at `url`. `at_rest`: nobody is about to find claims of a replica that is gone."""
    rules = {**RULES, **POSTGRES_RULES, **_staleness(max_staleness)}
    if at_rest:
        rules["an owner is a replica that is known"] = PARENTLESS
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            found = {rule: await connection.fetch(_spelled(query)) for rule, query in rules.items()}
    finally:
        await connection.close()
    return _told({rule: [tuple(row) for row in rows] for rule, rows in found.items()})


def audit_sqlite(path: Path, *, max_staleness: int | None = None) -> list[str]:
    """What is broken in the file `path`."""
    rules = {**RULES, **SQLITE_RULES, **_staleness(max_staleness)}
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        return _told({rule: connection.execute(_spelled(query)).fetchall() for rule, query in rules.items()})


def _spelled(query: str) -> str:
    for name, states in (("<outstanding>", OUTSTANDING), ("<ended>", ENDED)):
        query = query.replace(name, str(states))
    return query


def _staleness(max_staleness: int | None) -> dict[str, str]:
    if max_staleness is None:
        return {}
    return {f"no lease was made with a group staler than {max_staleness}": STALENESS.format(int(max_staleness))}


def _told(found: Mapping[str, Sequence[tuple[Any, ...]]]) -> list[str]:
    lines = []
    for rule, rows in found.items():
        if rows:
            shown = ", ".join(str(row[0] if len(row) == 1 else row) for row in rows[:SHOWN])
            more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
            lines.append(f"broken: {rule}: {shown}{more}")
    return lines
