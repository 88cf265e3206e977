"""What is read from a SQLite connection, as values. Every function runs in the thread that uses the connection."""

from __future__ import annotations

import heapq
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

from rollout_service.core.group import Checkpoint, Group, Lease, LeaseState
from rollout_service.core.model import TERMINAL, DropReason, FailedRollout, FinishedRollout, GroupState, Prompt
from rollout_service.core.records import GroupPayload, RunState, Snapshot, StoredPrompt
from rollout_service.store import codec
from rollout_service.store import sqlite_queries as sql
from rollout_service.store.standing import ordered, rows_as_read, rows_from

Settled = Mapping[int, tuple[bool, int]]
"""Row -> (finished?, payload bytes)."""


def snapshot(connection: sqlite3.Connection) -> Snapshot:
    """Reads standings and narrow rows only: no payload is touched, however much of it there is."""
    settled: defaultdict[int, dict[int, tuple[bool, int]]] = defaultdict(dict)
    for seq, index, ok, size in connection.execute(sql.READ_OUTSTANDING_ROLLOUTS):
        settled[seq][index] = (bool(ok), size)
    rows = connection.execute(sql.READ_OUTSTANDING).fetchall()
    return Snapshot(
        run=_run(connection),
        groups=tuple(group_from(row, settled.get(row[0], {})) for row in rows),
        leases=tuple(_lease_from(connection, row) for row in connection.execute(sql.READ_LIVE_LEASES).fetchall()),
        checkpoints=tuple(
            Checkpoint(name=row[0], number=row[1], policy_version=row[2], ends=row[3], created_at=row[4])
            for row in connection.execute(sql.READ_CHECKPOINTS)
        ),
    )


def find_prompts(
    connection: sqlite3.Connection, keys: Collection[tuple[str, int]]
) -> dict[tuple[str, int], StoredPrompt]:
    found = {}
    for key in keys:
        row = connection.execute(sql.FIND_PROMPT, key).fetchone()
        if row is not None:
            found[key] = StoredPrompt(seq=row[0], digest=row[1])
    return found


def groups(connection: sqlite3.Connection, seqs: Collection[int]) -> dict[int, Group]:
    found = {}
    for seq in seqs:
        row = connection.execute(sql.READ_GROUP, (seq,)).fetchone()
        if row is not None:
            found[seq] = _standing(connection, row)
    return found


def payloads(connection: sqlite3.Connection, seqs: Sequence[int]) -> list[GroupPayload]:
    return [payload for seq in seqs if (payload := _payload(connection, seq)) is not None]


def prompts(connection: sqlite3.Connection, seqs: Sequence[int]) -> dict[int, Prompt]:
    found = {}
    for seq in seqs:
        row = connection.execute(sql.READ_PROMPT, (seq,)).fetchone()
        if row is not None:
            found[seq] = codec.decode_prompt(row[0])
    return found


def list_groups(connection: sqlite3.Connection, states: Collection[GroupState], after: int, limit: int) -> list[Group]:
    wanted = ordered(states)
    if len(wanted) == len(GroupState):
        rows: Iterable[tuple[Any, ...]] = connection.execute(sql.LIST_ANY, (after, limit)).fetchall()
        return [_standing(connection, row) for row in rows]
    runs = []
    for state in wanted:
        query = sql.LIST_ENDED if state in TERMINAL else sql.LIST_OUTSTANDING
        runs.append(
            [_standing(connection, row) for row in connection.execute(query, (state.value, after, limit)).fetchall()]
        )
    return list(islice(heapq.merge(*runs, key=attrgetter("seq")), limit))


def lease(connection: sqlite3.Connection, lease_id: str) -> Lease | None:
    row = connection.execute(sql.READ_LEASE, (lease_id,)).fetchone()
    return None if row is None else _lease_from(connection, row)


def lease_by_request(connection: sqlite3.Connection, request_id: str) -> Lease | None:
    row = connection.execute(sql.READ_LEASE_BY_REQUEST, (request_id,)).fetchone()
    return None if row is None else _lease_from(connection, row)


def ended_since(connection: sqlite3.Connection, ends: int) -> list[int]:
    return [row[0] for row in connection.execute(sql.READ_ENDED_SINCE, (ends,))]


def group_from(row: tuple[Any, ...], settled: Settled) -> Group:
    """`row` in the column order of READ_GROUP."""
    state = GroupState(row[4])
    if state in TERMINAL:
        waiting, finished, failed = rows_from(row[8])
        size = row[9]
    else:
        waiting, finished, failed, size = rows_as_read(row[8], settled)
    return Group(
        seq=row[0],
        prompt_id=row[1],
        epoch=row[2],
        num_generations=row[3],
        state=state,
        attempt=row[5],
        tries=row[6],
        version=row[7],
        waiting=waiting,
        finished=finished,
        failed=failed,
        payload_bytes=size,
        reason=None if row[10] is None else DropReason(row[10]),
        error=row[11],
        engine=row[12],
        lease_id=row[13],
        acked_by=row[14],
        submitted_at=row[15],
        changed_at=row[16],
        end_number=row[17],
    )


def _standing(connection: sqlite3.Connection, row: tuple[Any, ...]) -> Group:
    if row[4] in TERMINAL:
        return group_from(row, {})
    settled = connection.execute(sql.READ_SETTLED, (row[0], row[5])).fetchall()
    return group_from(row, {index: (bool(ok), size) for index, ok, size in settled})


def _payload(connection: sqlite3.Connection, seq: int) -> GroupPayload | None:
    row = connection.execute(sql.READ_GROUP, (seq,)).fetchone()
    if row is None:
        return None
    key = (seq, row[5])
    settled = {}
    rollouts: dict[int, FinishedRollout | FailedRollout] = {}
    for index, ok, size, data in connection.execute(sql.READ_ROLLOUTS, key):
        settled[index] = (bool(ok), size)
        rollouts[index] = codec.decode_finished(data, index) if ok else codec.decode_failed(data, index)
    prompt = connection.execute(sql.READ_PROMPT, (seq,)).fetchone()
    score = connection.execute(sql.READ_SCORE, key).fetchone()
    return GroupPayload(
        group=group_from(row, settled),
        prompt=None if prompt is None else codec.decode_prompt(prompt[0]),
        rollouts=rollouts,
        score=None if score is None else codec.decode_score(score[0]),
    )


def _run(connection: sqlite3.Connection) -> RunState:
    row = connection.execute(sql.READ_RUN).fetchone()
    ended = zip((GroupState.ACKED, GroupState.STALE, GroupState.DROPPED, GroupState.FAILED), row[7:], strict=True)
    return RunState(
        policy_version=row[0],
        paused=bool(row[1]),
        final=bool(row[2]),
        last_seq=row[3],
        read_position=row[4],
        prompts_fingerprint=row[5],
        ended={state: count for state, count in ended if count},
        ends=row[6],
    )


def _lease_from(connection: sqlite3.Connection, row: tuple[Any, ...]) -> Lease:
    return Lease(
        lease_id=row[0],
        request_id=row[1],
        consumer=row[2],
        max_groups=row[3],
        min_groups=row[4],
        lease_s=row[5],
        policy_version=row[6],
        created_at=row[7],
        expires_at=row[8],
        state=LeaseState(row[9]),
        groups=tuple(connection.execute(sql.READ_LEASE_GROUPS, (row[0],)).fetchall()),
    )
