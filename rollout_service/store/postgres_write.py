"""One batch written to an open transaction.

What always holds: the order of the statements is that of the references (new groups, leases with the groups that move,
rollouts and scores), then removals, then the guard over what is held, which therefore judges what this very transaction
leaves behind. A statement is sent once however many rows it has. Nothing here begins, commits or rolls back: a raised
exception means the caller's transaction must go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from rollout_service.core.group import Group, Lease
from rollout_service.core.model import FailedRollout, FinishedRollout, GroupState, prompt_size
from rollout_service.core.records import Batch, NewGroup, RunState
from rollout_service.core.shared import EngineWish
from rollout_service.errors import BatchRefused
from rollout_service.store import codec
from rollout_service.store import postgres_queries as sql
from rollout_service.store.postgres_read import aside, kept, run_row, wish_from
from rollout_service.store.standing import forgotten, rows_text

if TYPE_CHECKING:
    from asyncpg import Connection, Record

OPENED: Final = frozenset({GroupState.GENERATING, GroupState.SCORING})
"""States in which somebody works on a group."""

MESSAGE_BYTES: Final = 16 * 1024 * 1024
"""Payloads sent with one statement, about: bounds the memory of both sides, however large a batch is."""

RACED: Final = frozenset({"groups_pkey", "groups_prompt_id_epoch_key", "leases_pkey", "leases_request_id_key"})
"""Unique keys that another transaction may have taken meanwhile; a batch that breaks any other is wrong."""

Settled = tuple[tuple[int, int, int], FinishedRollout | FailedRollout]


class Refused(BatchRefused):
    """The batch breaks a rule of the store; it says which."""

    def __init__(self, rule: object) -> None:
        super().__init__(f"the store refused a batch: {rule}")


@contextmanager
def refusals(raced: frozenset[str] = RACED) -> Iterator[None]:
    """What the schema refuses, as a refusal. Unique keys in `raced` are left to who can try again."""
    try:
        yield
    except asyncpg.UniqueViolationError as exc:
        if exc.constraint_name in raced:
            raise
        raise Refused(exc) from exc
    except (asyncpg.IntegrityConstraintViolationError, asyncpg.DataError, ValueError, OverflowError) as exc:
        raise Refused(exc) from exc


class BatchWriter:
    """Writes batches through one connection, inside one transaction.

    `numbered`: ends are numbered by the store, in the order of `batch.groups`; else they are as the batch says.
    """

    def __init__(self, connection: Connection[Record], *, max_staleness: int, numbered: bool) -> None:
        self._connection = connection
        self._max_staleness = max_staleness
        self._numbered = numbered
        self._new_leases: list[str] = []

    async def write(self, batch: Batch, *, owner: str | None) -> dict[int, int]:
        """Everything but the run. Seq -> claim of the groups in it that belong to `owner` now.

        Raises Refused, or asyncpg's error of a unique key in RACED.
        """
        # A new group that ends at once, or goes into a new lease, is written as it was submitted first: so it gets its
        # number among the others, and is there before its lease.
        later = {seq for seq in batch.new_groups if self._moves_later(batch.groups.get(seq))}
        claims = await self._submit(batch, owner, later)
        new_leases, moved = await self._move(batch, owner, later)
        claims |= moved
        await self._insert_settled(batch)
        await self._write_checkpoints(batch)  # first: a new one keeps the prompts of what ends in this very batch
        await self._forget(batch)
        self._new_leases += new_leases
        held = [seq for seq, group in batch.groups.items() if group.state is GroupState.LEASED]
        if held or batch.leases:
            await self._guard(held, list(batch.leases), new_leases)
        return claims

    async def guard_again(self) -> None:
        """To be called when the policy version was written after leases were."""
        if self._new_leases:
            await self._guard([], [], self._new_leases)

    def _moves_later(self, standing: Group | None) -> bool:
        if standing is None:
            return False
        leased = standing.lease_id is not None or standing.acked_by is not None
        return leased or (self._numbered and standing.state.terminal)

    async def _submit(self, batch: Batch, owner: str | None, later: Collection[int]) -> dict[int, int]:
        """Insert new groups; the claims of those that `owner` opens with it."""
        if not batch.new_groups:
            return {}
        size = sum(prompt_size(new.prompt) for new in batch.new_groups.values())
        rows = await aside(lambda: [_new_row(new, batch, later) for new in batch.new_groups.values()], size)
        for part in _parts(rows, lambda row: len(row[-1])):
            await self._connection.execute(sql.INSERT_GROUPS, *_columns(part, 21), owner)
        if owner is None:
            return {}
        standings = (batch.groups.get(seq, new.group) for seq, new in batch.new_groups.items())
        return {group.seq: 1 for group in standings if group.state in OPENED}

    async def _move(self, batch: Batch, owner: str | None, later: Collection[int]) -> tuple[list[str], dict[int, int]]:
        """Write leases and what became of groups; ids of the leases that are new, claims that belong to `owner` now."""
        moved = [group for seq, group in batch.groups.items() if seq not in batch.new_groups or seq in later]
        if not moved and not batch.leases:
            return [], {}
        standings = _columns(map(_standing_row, moved), 14)
        if batch.leases:
            leases = batch.leases.values()
            members = [(lease.lease_id, at, *member) for lease in leases for at, member in enumerate(lease.groups)]
            columns = *_columns(map(_lease_row, leases), 10), *_columns(members, 4)
            found = await self._connection.fetch(sql.WRITE_LEASES, *standings, owner, self._numbered, *columns)
        else:
            found = await self._connection.fetch(sql.UPDATE_GROUPS, *standings, owner, self._numbered)
        new_leases = [row["lease_id"] for row in found if batch.leases and row["lease_id"] is not None]
        if len(found) - len(new_leases) != len(moved):
            raise Refused("a standing of a group that was never submitted")
        return new_leases, {row["seq"]: row["claim"] for row in found if owner is not None and row["owner"] == owner}

    async def _insert_settled(self, batch: Batch) -> None:
        rollouts = [(key, rollout) for key, rollout in batch.rollouts.items() if not forgotten(key, batch)]
        scored = [(key, score) for key, score in batch.scores.items() if not forgotten(key, batch)]
        if not rollouts and not scored:
            return
        scores = await aside(lambda: [(*key, codec.encode_score(score)) for key, score in scored], 4096 * len(scored))
        for part in _parts(rollouts, _size) or [[]]:
            rows = await aside(partial(_rollout_rows, part), sum(map(_size, part)))
            await self._connection.execute(sql.INSERT_SETTLED, *_columns(rows, 7), *_columns(scores, 3))
            scores = []

    async def _write_checkpoints(self, batch: Batch) -> None:
        if batch.forget_checkpoints:
            await self._connection.execute(sql.DELETE_CHECKPOINTS, list(batch.forget_checkpoints))
        if batch.checkpoints:
            rows = [(c.name, c.number, c.policy_version, c.ends, c.created_at) for c in batch.checkpoints.values()]
            await self._connection.execute(sql.INSERT_CHECKPOINTS, *_columns(rows, 5))
        if batch.forget_checkpoints:  # last: a new one may keep what an old one kept
            await self._connection.execute(sql.DELETE_KEPT_PROMPTS)

    async def _forget(self, batch: Batch) -> None:
        if batch.forget_attempts or batch.forget_payloads:
            old = list(batch.forget_attempts | batch.forget_payloads)
            await self._connection.execute(sql.FORGET, old, list(batch.forget_payloads))

    async def _guard(self, held: list[int], leases: list[str], new_leases: list[str]) -> None:
        """Design 3.1.5 and 4.1: what is held after this transaction is held by the live lease made with it."""
        found = await self._connection.fetchrow(sql.FIND_BAD_HOLDS, held, leases, new_leases, self._max_staleness)
        if found is None:
            return
        lease_id, seq = found["lease_id"], found["seq"]
        if found["rule"] == 0:
            raise Refused(f"group {seq} may not be held by {lease_id}, which is over or another's")
        if found["rule"] == 1:
            raise Refused(f"lease {lease_id} is over and still holds group {seq}")
        raise Refused(
            f"lease {lease_id} may not take group {seq}: {found['state']}, attempt {found['attempt']}, version"
            f" {found['version']} at policy version {found['policy_version']}, held by {found['holder']}"
        )


async def write_run(connection: Connection[Record], run: RunState) -> None:
    """The run as it is given, its counts of ended groups included. Raises Refused."""
    ended = [run.ended.get(state, 0) for state in _COUNTED]
    if min(ended) < 0 or run.ends < 0:
        raise Refused("a negative count in the run")
    if sum(ended) > run.last_seq:
        raise Refused("more groups ended than were submitted")
    await connection.execute(sql.WRITE_RUN, *run_row(run))


async def write_wish(connection: Connection[Record], wish: EngineWish) -> EngineWish:
    """What is kept of it."""
    limit = None if wish.max_inflight is None else str(wish.max_inflight)
    row = await connection.fetchrow(sql.WISH, wish.engine_id, wish.url, wish.wanted, limit, float(wish.drain_s))
    assert row is not None  # noqa: S101 - for mypy: it returns what it wrote
    return wish_from(row)


async def write_ends(connection: Connection[Record], run: RunState) -> None:
    """To be the last thing in its transaction: the sequence does not go back with it."""
    await connection.execute(sql.SET_ENDED, *(run.ended.get(state, 0) for state in _COUNTED))
    await connection.execute(sql.SET_ENDS, run.ends)


_COUNTED: Final = (GroupState.ACKED, GroupState.STALE, GroupState.DROPPED, GroupState.FAILED)
"""In the order of SET_ENDED."""


def _columns(rows: Iterable[Sequence[Any]], count: int) -> list[list[Any]]:
    """`rows` of `count` values each, as arrays for unnest."""
    columns: list[list[Any]] = [[] for _ in range(count)]
    for row in rows:
        for column, value in zip(columns, row, strict=True):
            column.append(value)
    return columns


def _parts(rows: Sequence[Any], size: Any) -> list[list[Any]]:
    """`rows` in stretches of about MESSAGE_BYTES."""
    parts: list[list[Any]] = []
    room = 0
    for row in rows:
        if room <= 0:
            parts.append([])
            room = MESSAGE_BYTES
        parts[-1].append(row)
        room -= size(row)
    return parts


def _size(settled: Settled) -> int:
    return settled[1].payload_bytes if isinstance(settled[1], FinishedRollout) else 1024


def _rollout_rows(rollouts: list[Settled]) -> list[tuple[Any, ...]]:
    return [_rollout_row(key, rollout) for key, rollout in rollouts]


def _rollout_row(key: tuple[int, int, int], rollout: FinishedRollout | FailedRollout) -> tuple[Any, ...]:
    if isinstance(rollout, FinishedRollout):
        return *key, True, rollout.payload_bytes, rollout.output_tokens, codec.encode_finished(rollout)
    return *key, False, 0, 0, codec.encode_failed(rollout)


def _new_row(new: NewGroup, batch: Batch, later: Collection[int]) -> tuple[Any, ...]:
    group = new.group
    return (
        *_standing_row(group if group.seq in later else batch.groups.get(group.seq, group)),
        kept(group.prompt_id),
        group.epoch,
        new.digest,
        group.num_generations,
        prompt_size(new.prompt),
        group.submitted_at,
        codec.encode_prompt(new.prompt),
    )


def _standing_row(group: Group) -> tuple[Any, ...]:
    return (
        group.seq,
        group.state.value,
        group.attempt,
        group.tries,
        group.version,
        rows_text(group),
        group.payload_bytes,
        None if group.reason is None else group.reason.value,
        None if group.error is None else kept(codec.printable(group.error)),
        None if group.engine is None else kept(group.engine),
        group.lease_id,
        group.acked_by,
        group.end_number,
        group.changed_at,
    )


def _lease_row(lease: Lease) -> tuple[Any, ...]:
    return (
        lease.lease_id,
        None if lease.request_id is None else kept(lease.request_id),
        None if lease.consumer is None else kept(lease.consumer),
        lease.max_groups,
        lease.min_groups,
        lease.lease_s,
        lease.policy_version,
        lease.created_at,
        lease.expires_at,
        lease.state.value,
    )
