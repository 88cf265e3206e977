"""Reading the run, standings, payloads and leases through one open transaction.

What always holds: nothing here writes, locks, begins or ends a transaction; payloads are decoded beside the event loop
where there is much of them. Rows of outstanding groups are told from their settled rollouts (`standing`).
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rollout_service.core.changes import Halt
from rollout_service.core.group import Checkpoint, Group, Lease, LeaseState
from rollout_service.core.model import TERMINAL, DropReason, FailedRollout, FinishedRollout, GroupState, Prompt
from rollout_service.core.records import GroupPayload, GroupScore, RunState, Snapshot, StoredPrompt
from rollout_service.core.shared import Claimed, EngineWish, Overview, Replica, SeenReplica, SharedRun, Whole
from rollout_service.core.streaks import Streak
from rollout_service.errors import StoreUnavailable
from rollout_service.store import codec
from rollout_service.store import postgres_queries as sql
from rollout_service.store.standing import ordered, rows_as_read, rows_from

if TYPE_CHECKING:
    from asyncpg import Connection, Record

T = TypeVar("T")

ASIDE_BYTES: Final = 512 * 1024
"""Payloads of more bytes are encoded and decoded in a thread: about a millisecond of work."""

_ESCAPE: Final = "\uf8ff"


def kept(text: str) -> str:
    """`text` without the one character PostgreSQL cannot hold; `restored` gives it back."""
    if "\0" not in text and _ESCAPE not in text:
        return text
    return text.replace(_ESCAPE, _ESCAPE + "e").replace("\0", _ESCAPE + "0")


def restored(text: str) -> str:
    if _ESCAPE not in text:
        return text
    return text.replace(_ESCAPE + "0", "\0").replace(_ESCAPE + "e", _ESCAPE)


async def aside(work: Callable[[], T], size: int) -> T:
    """What `work` returns, from a thread where it is about many bytes."""
    return work() if size < ASIDE_BYTES else await asyncio.to_thread(work)


# --- the run


async def run(connection: Connection[Record]) -> tuple[SharedRun, Whole, float]:
    """The run's row, its counters and the store's time."""
    row = await connection.fetchrow(sql.READ_RUN)
    if row is None:
        raise StoreUnavailable("the row of the run is gone")
    return shared_run_from(row), whole_from(row), row["now"]


def whole_from(row: Record) -> Whole:
    return Whole(
        counts={state: row[state.value] for state in GroupState},
        held_bytes=row["held_bytes"],
        prompt_bytes=row["prompt_bytes"],
    )


def shared_run_from(row: Record) -> SharedRun:
    halt = row["halt"]
    return SharedRun(
        run=RunState(
            policy_version=row["policy_version"],
            paused=row["paused"],
            final=row["final"],
            last_seq=row["last_seq"],
            read_position=row["read_position"],
            prompts_fingerprint=row["prompts_fingerprint"],
            ended={state: row[state.value] for state in GroupState if state.terminal and row[state.value]},
            ends=row["ends"],
        ),
        revision=row["revision"],
        taken=row["taken"],
        returns=row["returns"],
        halt=None if halt is None else Halt(**json.loads(halt)),
        streak=Streak(failed=row["streak_failed"], unproductive=row["streak_unproductive"]),
        pace_relaxed=row["pace_relaxed"],
    )


def run_row(run: RunState) -> tuple[Any, ...]:
    """For WRITE_RUN."""
    return (
        run.policy_version,
        run.paused,
        run.final,
        run.last_seq,
        run.read_position,
        run.prompts_fingerprint,
    )


def shared_run_row(run: SharedRun) -> tuple[Any, ...]:
    """For WRITE_SHARED_RUN."""
    return (
        *run_row(run.run),
        run.revision,
        run.taken,
        run.returns,
        None if run.halt is None else json.dumps(asdict(run.halt)),  # ASCII: any text can be kept so
        run.streak.failed,
        run.streak.unproductive,
        run.pace_relaxed,
    )


async def snapshot(connection: Connection[Record]) -> Snapshot:
    shared, _, _ = await run(connection)
    return Snapshot(
        run=shared.run,
        groups=tuple(group_from(row) for row in await connection.fetch(sql.READ_OUTSTANDING)),
        leases=tuple(lease_from(row) for row in await connection.fetch(sql.READ_LIVE_LEASES)),
        checkpoints=tuple(await checkpoints(connection)),
    )


async def overview(connection: Connection[Record]) -> Overview:
    shared, whole, now = await run(connection)
    oldest = await connection.fetchrow(sql.READ_OLDEST)
    leases = await connection.fetchval(sql.COUNT_LIVE_LEASES)
    seen = await connection.fetch(sql.READ_REPLICAS)
    return Overview(
        run=shared,
        whole=whole,
        oldest=None if oldest is None else group_from(oldest),
        leases=leases,
        replicas=tuple(_seen_from(row) for row in seen),
        now=now,
    )


async def wishes(connection: Connection[Record]) -> list[EngineWish]:
    """By number."""
    return [wish_from(row) for row in await connection.fetch(sql.READ_WISHES)]


def wish_from(row: Record) -> EngineWish:
    limit = row["max_inflight"]
    return EngineWish(**{**row, "max_inflight": int(limit) if limit is not None and limit.isdigit() else limit})


async def checkpoints(connection: Connection[Record]) -> list[Checkpoint]:
    """By number."""
    return [Checkpoint(**row) for row in await connection.fetch(sql.READ_CHECKPOINTS)]


# --- groups


async def find_prompts(
    connection: Connection[Record], keys: Collection[tuple[str, int]]
) -> dict[tuple[str, int], StoredPrompt]:
    rows = await connection.fetch(sql.FIND_PROMPTS, [kept(name) for name, _ in keys], [epoch for _, epoch in keys])
    return {
        (restored(row["prompt_id"]), row["epoch"]): StoredPrompt(seq=row["seq"], digest=row["digest"]) for row in rows
    }


async def standings(connection: Connection[Record], seqs: Iterable[int]) -> list[Claimed]:
    """Those that exist, by number."""
    rows = await connection.fetch(sql.READ_GROUPS, list(seqs))
    return [Claimed(group=group_from(row), owner=row["owner"], claim=row["claim"]) for row in rows]


async def groups(connection: Connection[Record], seqs: Iterable[int]) -> dict[int, Group]:
    return {found.group.seq: found.group for found in await standings(connection, seqs)}


async def list_groups(
    connection: Connection[Record], states: Collection[GroupState], after: int, limit: int
) -> list[Group]:
    wanted = ordered(states)
    if len(wanted) == len(GroupState):
        rows = await connection.fetch(sql.LIST_ANY, after, limit)
    else:
        rows = await connection.fetch(sql.LIST_GROUPS, [state.value for state in wanted], after, limit)
    return list((await groups(connection, [row["seq"] for row in rows])).values())


async def ended_since(connection: Connection[Record], ends: int) -> list[int]:
    return [row["seq"] for row in await connection.fetch(sql.READ_ENDED_SINCE, ends)]


async def tokens(connection: Connection[Record], seqs: Collection[int]) -> dict[int, int]:
    return {row["seq"]: row["tokens"] for row in await connection.fetch(sql.SUM_TOKENS, list(seqs))}


def group_from(row: Record, settled: Mapping[int, tuple[bool, int]] | None = None) -> Group:
    """`row` as READ_GROUPS gives it; `settled` where it was read otherwise: row -> (finished?, payload bytes)."""
    state = GroupState(row["state"])
    if state in TERMINAL:
        waiting, finished, failed = rows_from(row["rows"])
        size = row["payload_bytes"]
    else:
        if settled is None:
            marks = zip(row["oks"] or (), row["sizes"] or (), strict=True)
            settled = dict(zip(row["settled"] or (), marks, strict=True))
        waiting, finished, failed, size = rows_as_read(row["rows"], settled)
    return Group(
        seq=row["seq"],
        prompt_id=restored(row["prompt_id"]),
        epoch=row["epoch"],
        num_generations=row["num_generations"],
        state=state,
        attempt=row["attempt"],
        tries=row["tries"],
        version=row["version"],
        waiting=waiting,
        finished=finished,
        failed=failed,
        payload_bytes=size,
        reason=None if row["reason"] is None else DropReason(row["reason"]),
        error=None if row["error"] is None else restored(row["error"]),
        engine=None if row["engine"] is None else restored(row["engine"]),
        lease_id=row["lease_id"],
        acked_by=row["acked_by"],
        end_number=row["end_number"],
        submitted_at=row["submitted_at"],
        changed_at=row["changed_at"],
    )


# --- payloads


async def payloads(connection: Connection[Record], seqs: Sequence[int]) -> list[GroupPayload]:
    rows = {row["seq"]: row for row in await connection.fetch(sql.READ_GROUPS, list(set(seqs)))}
    if not rows:
        return []
    found = await connection.fetch(sql.READ_PAYLOADS, list(rows), [row["attempt"] for row in rows.values()])
    groups = [rows[seq] for seq in seqs if seq in rows]
    return await aside(lambda: _payloads(groups, found), sum(row["payload_bytes"] or 0 for row in found))


def _payloads(groups: list[Record], found: list[Record]) -> list[GroupPayload]:
    settled: dict[int, dict[int, tuple[bool, int]]] = defaultdict(dict)
    rollouts: dict[int, dict[int, FinishedRollout | FailedRollout]] = defaultdict(dict)
    prompt_of: dict[int, Prompt] = {}
    score_of: dict[int, GroupScore] = {}
    for row in found:
        seq, data = row["seq"], row["payload"]
        match row["kind"]:
            case "prompt":
                prompt_of[seq] = codec.decode_prompt(data)
            case "score":
                score_of[seq] = codec.decode_score(data)
            case _:
                index, ok = row["idx"], row["ok"]
                settled[seq][index] = (ok, row["payload_bytes"])
                decode = codec.decode_finished if ok else codec.decode_failed
                rollouts[seq][index] = decode(data, index)
    return [
        GroupPayload(
            group=group_from(row, settled[row["seq"]]),
            prompt=prompt_of.get(row["seq"]),
            rollouts=dict(sorted(rollouts[row["seq"]].items())),
            score=score_of.get(row["seq"]),
        )
        for row in groups
    ]


async def prompts(connection: Connection[Record], seqs: Sequence[int]) -> dict[int, Prompt]:
    rows = await connection.fetch(sql.READ_PROMPTS, list(seqs))
    return await aside(
        lambda: {row["seq"]: codec.decode_prompt(row["payload"]) for row in rows},
        sum(len(row["payload"]) for row in rows),
    )


# --- leases and replicas


async def lease(connection: Connection[Record], query: str, key: str) -> Lease | None:
    """By one of the queries for a lease."""
    row = await connection.fetchrow(query, kept(key))
    return None if row is None else lease_from(row)


def lease_from(row: Record) -> Lease:
    return Lease(
        lease_id=row["lease_id"],
        request_id=None if row["request_id"] is None else restored(row["request_id"]),
        consumer=None if row["consumer"] is None else restored(row["consumer"]),
        max_groups=row["max_groups"],
        min_groups=row["min_groups"],
        lease_s=row["lease_s"],
        policy_version=row["policy_version"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        state=LeaseState(row["state"]),
        groups=tuple(zip(row["seqs"], row["attempts"], strict=True)),
    )


def _seen_from(row: Record) -> SeenReplica:
    facts = dict(row)
    times = {name: facts.pop(name) for name in ("started_at", "seen_at", "expires_at", "claims")}
    return SeenReplica(replica=Replica(**facts), **times)


def replica_row(replica: Replica) -> tuple[Any, ...]:
    """For JOIN and BEAT, but the last parameter."""
    return (
        replica.replica_id,
        replica.name,
        replica.service,
        replica.rules,
        replica.prompts,
        replica.slots,
        replica.in_flight,
        replica.engines,
        replica.healthy_engines,
        replica.enforced,
        replica.stale_groups,
        replica.aborted_rollouts,
    )
