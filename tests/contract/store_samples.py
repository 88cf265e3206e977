"""Values a store is tested with: groups of four rollouts in every state, and batches that bring them there."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

from rollout_service.core.group import Checkpoint, Group, Lease
from rollout_service.core.model import (
    DropReason,
    FailedRollout,
    FailureReason,
    FinishedRollout,
    FinishReason,
    GroupState,
    Prompt,
    Turn,
)
from rollout_service.core.records import Batch, GroupScore, NewGroup, RowScore, RunState
from rollout_service.core.shared import SharedRun, Whole

MAX_STALENESS = 2
N = 4
ROWS = tuple(range(N))


def pending(seq: int, **changed: Any) -> Group:
    standing = Group(
        seq=seq,
        prompt_id=f"prompt-{seq}",
        epoch=0,
        num_generations=N,
        waiting=ROWS,
        submitted_at=1000.0 + seq,
        changed_at=1000.0 + seq,
    )
    return replace(standing, **changed)


def generating(seq: int, *, version: int = 0, **changed: Any) -> Group:
    whole = {"waiting": (), "running": frozenset(ROWS)}
    return pending(seq, state=GroupState.GENERATING, version=version, **{**whole, **changed})


def settled(seq: int, state: GroupState, *, version: int = 0, **changed: Any) -> Group:
    whole = {"waiting": (), "finished": frozenset(ROWS), "payload_bytes": N * finished(0).payload_bytes}
    return pending(seq, state=state, version=version, **{**whole, **changed})


def ready(seq: int, **changed: Any) -> Group:
    return settled(seq, GroupState.READY, **changed)


def leased(seq: int, lease_id: str, **changed: Any) -> Group:
    return settled(seq, GroupState.LEASED, lease_id=lease_id, **changed)


def acked(seq: int, lease_id: str, **changed: Any) -> Group:
    return settled(seq, GroupState.ACKED, acked_by=lease_id, **changed)


def dropped(seq: int, **changed: Any) -> Group:
    return pending(seq, state=GroupState.DROPPED, reason=DropReason.CANCELLED, **changed)


def prompt(seq: int) -> Prompt:
    return Prompt(
        prompt_id=f"prompt-{seq}",
        messages=[{"role": "user", "content": f"Frage {seq}: wie groß?"}],
        columns={"answer": seq, "nested": {"a": [1, 2.5, None, True, "ü"]}},
        num_generations=N,
        sampling={"temperature": 0.5},
    )


def new_group(seq: int) -> NewGroup:
    return NewGroup(group=pending(seq), prompt=prompt(seq), digest=b"digest-%d" % seq)


def finished(index: int, text: str = "grün") -> FinishedRollout:
    turn = Turn(
        prompt_ids=array("i", [1, 2, 3]),
        output_ids=array("i", [2**31 - 1, 0, index]),
        logprobs=array("f", [-0.1, -1e-7, -20.5]),
        finish_reason=FinishReason.STOP,
        text=text,
        message={"role": "assistant", "content": text},
        weight_versions=({"version": "7", "start": 0, "end": 3},),
        engine="e-0",
    )
    return FinishedRollout(
        index=index,
        prompt=[{"role": "user", "content": "?"}],
        completion=[{"role": "assistant", "content": text}],
        turns=(turn,),
        metrics={"duration_s": 0.25},
        logprobs_mode="processed_logprobs",
    )


def failed(index: int) -> FailedRollout:
    return FailedRollout(
        index=index,
        reason=FailureReason.SERVER_ERROR,
        error="the engine said nö",
        engine="http://127.0.0.1:8000",
        attempts=3,
        wasted_tokens=12,
    )


def score(reward: float | None = 1.0) -> GroupScore:
    rows = {row: RowScore(reward=reward, rewards={"accuracy": reward, "length": None}, advantage=0.5) for row in ROWS}
    return GroupScore(rows=rows, mean=reward, std=0.0, zero_variance=True, errors={"judge": "timed out"})


def lease(lease_id: str, *seqs: int, attempt: int = 1, **changed: Any) -> Lease:
    made = Lease(
        lease_id=lease_id,
        max_groups=8,
        min_groups=1,
        lease_s=600,
        policy_version=0,
        created_at=2000.0,
        expires_at=2600.0,
        groups=tuple((seq, attempt) for seq in seqs),
    )
    return replace(made, **changed)


def checkpoint(name: str, number: int, **changed: Any) -> Checkpoint:
    return replace(Checkpoint(name=name, number=number, policy_version=3, ends=0, created_at=5000.0), **changed)


def submitted(*seqs: int) -> Batch:
    return Batch(run=RunState(last_seq=max(seqs)), new_groups={seq: new_group(seq) for seq in seqs})


def scored(*seqs: int, version: int = 0) -> Batch:
    """Groups that are submitted, generated and scored, all at once."""
    batch = submitted(*seqs)
    for seq in seqs:
        batch.groups[seq] = ready(seq, version=version)
        batch.rollouts.update({(seq, 1, row): finished(row) for row in ROWS})
        batch.scores[seq, 1] = score()
    return batch


def leasing(made: Lease, *, version: int = 0) -> Batch:
    groups = {seq: leased(seq, made.lease_id, attempt=attempt, version=version) for seq, attempt in made.groups}
    return Batch(leases={made.lease_id: made}, groups=groups)


async def at_once(run: SharedRun, whole: Whole) -> None:
    """Prepares nothing."""
