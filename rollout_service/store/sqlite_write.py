"""One batch written to an open transaction.

What always holds: the order of the statements is that of the references (leases, groups, lease members, rollouts,
scores), then removals, then the guard over new leases, which therefore judges what this very transaction leaves behind.
Nothing here begins, commits or rolls back: a raised exception means the caller's transaction must go.
"""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from rollout_service.core.group import Group, Lease, LeaseState
from rollout_service.core.model import FinishedRollout, GroupState
from rollout_service.core.records import Batch, NewGroup, RunState
from rollout_service.store import codec
from rollout_service.store import sqlite_queries as sql
from rollout_service.store.standing import forgotten, rows_text


class Refused(Exception):
    """The batch breaks a rule of the store; it says which."""


class BatchWriter:
    """Writes batches through one connection; lives in the thread that owns it."""

    def __init__(self, connection: sqlite3.Connection, *, max_staleness: int) -> None:
        self._connection = connection
        self._max_staleness = max_staleness
        self._last_payload_id: int = connection.execute(sql.LAST_PAYLOAD_ID).fetchone()[0]

    def write(self, batch: Batch) -> None:
        """Raises Refused or sqlite3.Error, leaving a transaction that may not be committed."""
        if batch.run is not None:
            self._connection.execute(sql.WRITE_RUN, _run_row(batch.run))
        new_leases = [lease for lease in batch.leases.values() if not self._updated(lease)]
        self._insert_leases(new_leases)
        self._write_groups(batch)
        self._insert_members(new_leases)
        self._insert_rollouts(batch)
        self._write_scores(batch)
        self._write_checkpoints(batch)  # first: a new one keeps the prompts of what ends in this very batch
        self._forget(batch)
        self._guard(batch, new_leases)

    def _updated(self, lease: Lease) -> bool:
        """Whether the lease was known, and now has its new end and state."""
        return (
            self._connection.execute(sql.UPDATE_LEASE, (lease.expires_at, lease.state.value, lease.lease_id)).rowcount
            == 1
        )

    def _insert_leases(self, leases: list[Lease]) -> None:
        if leases:
            self._connection.executemany(sql.INSERT_LEASE, map(_lease_row, leases))

    def _insert_members(self, leases: list[Lease]) -> None:
        if leases:
            self._connection.executemany(
                sql.INSERT_LEASE_GROUP,
                ((lease.lease_id, at, *member) for lease in leases for at, member in enumerate(lease.groups)),
            )

    def _write_groups(self, batch: Batch) -> None:
        if batch.new_groups:
            many = self._connection.executemany
            many(sql.INSERT_GROUP, (_new_row(new, batch) for new in batch.new_groups.values()))
            many(sql.INSERT_PROMPT, ((seq, codec.encode_prompt(new.prompt)) for seq, new in batch.new_groups.items()))
        moved = [group for seq, group in batch.groups.items() if seq not in batch.new_groups]
        if moved:
            done = self._connection.executemany(sql.UPDATE_GROUP, map(_standing_row, moved)).rowcount
            if done != len(moved):
                raise Refused("a standing of a group that was never submitted")

    def _insert_rollouts(self, batch: Batch) -> None:
        rollouts = {key: rollout for key, rollout in batch.rollouts.items() if not forgotten(key, batch)}
        if not rollouts:
            return
        first = self._last_payload_id + 1
        rows = []
        payloads = []
        for payload_id, ((seq, attempt, index), rollout) in enumerate(rollouts.items(), first):
            if isinstance(rollout, FinishedRollout):
                rows.append((seq, attempt, index, 1, rollout.payload_bytes, payload_id))
                payloads.append((payload_id, codec.encode_finished(rollout)))
            else:
                rows.append((seq, attempt, index, 0, 0, payload_id))
                payloads.append((payload_id, codec.encode_failed(rollout)))
        self._connection.executemany(sql.INSERT_ROLLOUT, rows)
        self._connection.executemany(sql.INSERT_PAYLOAD, payloads)
        self._last_payload_id += len(rollouts)  # a gap after a rollback does no harm

    def _write_scores(self, batch: Batch) -> None:
        scores = [(*key, codec.encode_score(score)) for key, score in batch.scores.items() if not forgotten(key, batch)]
        if scores:
            self._connection.executemany(sql.WRITE_SCORE, scores)

    def _forget(self, batch: Batch) -> None:
        one = self._connection.execute
        if batch.forget_attempts or batch.forget_payloads:
            old = _listed(batch.forget_attempts | batch.forget_payloads)
            one(sql.FORGET_OLD_ROLLOUTS, old)
            one(sql.FORGET_OLD_SCORES, old)
        if batch.forget_payloads:
            ended = _listed(batch.forget_payloads)
            one(sql.FORGET_FINISHED, ended)
            one(sql.FORGET_SCORES, ended)
            one(sql.DELETE_PROMPTS, ended)

    def _write_checkpoints(self, batch: Batch) -> None:
        if batch.forget_checkpoints:
            self._connection.executemany(sql.DELETE_CHECKPOINT, ((name,) for name in sorted(batch.forget_checkpoints)))
        if batch.checkpoints:
            self._connection.executemany(
                sql.INSERT_CHECKPOINT,
                ((c.name, c.number, c.policy_version, c.ends, c.created_at) for c in batch.checkpoints.values()),
            )
        if batch.forget_checkpoints:  # last: a new one may keep what an old one kept
            self._connection.execute(sql.DELETE_KEPT_PROMPTS)

    def _guard(self, batch: Batch, new_leases: list[Lease]) -> None:
        """Design 3.1.5 and 4.1: what is held after this transaction is held by the live lease made with it."""
        one = self._connection.execute
        for group in batch.groups.values():
            if group.state is not GroupState.LEASED:
                continue
            if one(sql.FIND_HOLDER, (group.lease_id, group.seq, group.attempt)).fetchone() is None:
                raise Refused(f"{group.group_id} may not be held by {group.lease_id}, which is over or another's")
        for lease in batch.leases.values():
            if lease.state is not LeaseState.LIVE:
                for (seq,) in one(sql.FIND_STILL_HELD, (lease.lease_id,)).fetchall():
                    raise Refused(f"lease {lease.lease_id} is over and still holds group {seq}")
        live = [lease for lease in new_leases if lease.state is LeaseState.LIVE]
        if live:
            (version,) = one(sql.READ_POLICY_VERSION).fetchone()
            for lease in live:
                self._guard_new(lease, version)

    def _guard_new(self, lease: Lease, version: int) -> None:
        found = self._connection.execute(sql.FIND_UNLEASABLE, (lease.lease_id, version - self._max_staleness))
        for seq, state, attempt, group_version, holder in found.fetchall():
            raise Refused(
                f"lease {lease.lease_id} may not take group {seq}: {state}, attempt {attempt}, version"
                f" {group_version} at policy version {version}, held by {holder}"
            )


def _listed(seqs: set[int]) -> tuple[str]:
    return (json.dumps(sorted(seqs)),)


def _run_row(run: RunState) -> tuple[Any, ...]:
    return (
        run.policy_version,
        run.paused,
        run.final,
        run.last_seq,
        run.read_position,
        run.prompts_fingerprint,
        run.ends,
        run.ended.get(GroupState.ACKED, 0),
        run.ended.get(GroupState.STALE, 0),
        run.ended.get(GroupState.DROPPED, 0),
        run.ended.get(GroupState.FAILED, 0),
    )


def _new_row(new: NewGroup, batch: Batch) -> tuple[Any, ...]:
    group = new.group
    standing = batch.groups.get(group.seq, group)
    return (
        group.prompt_id,
        group.epoch,
        new.digest,
        group.num_generations,
        group.submitted_at,
        *_standing_row(standing),
    )


def _standing_row(group: Group) -> tuple[Any, ...]:
    return (
        group.state.value,
        group.attempt,
        group.tries,
        group.version,
        rows_text(group),
        group.payload_bytes,
        None if group.reason is None else group.reason.value,
        None if group.error is None else codec.printable(group.error),
        group.engine,
        group.lease_id,
        group.acked_by,
        group.end_number,
        group.changed_at,
        group.seq,
    )


def _lease_row(lease: Lease) -> tuple[Any, ...]:
    return (
        lease.lease_id,
        lease.request_id,
        lease.consumer,
        lease.max_groups,
        lease.min_groups,
        lease.lease_s,
        lease.policy_version,
        lease.created_at,
        lease.expires_at,
        lease.state.value,
    )
