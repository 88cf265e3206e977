"""Leased groups as JSON bytes, in pieces.

What always holds: the pieces in a row are one strict JSON document (no NaN, no Infinity, valid UTF-8); logprobs are the
engine's float32 values exactly; no piece costs more than one sample's tokens at once, so that a thread that writes
pieces lets the event loop have its turn every few milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from math import isfinite
from typing import Any

import msgspec

from rollout_service.core.group import Lease
from rollout_service.core.model import FinishedRollout, FinishReason, agreed
from rollout_service.core.records import GroupPayload, RowScore
from rollout_service.core.sequences import TokenSequence, token_sequences
from rollout_service.orchestrator.views import LeaseAnswer

PIECE_ITEMS = 16_384
"""Numbers encoded in one C call: about a millisecond, during which no other thread runs."""

_encode = msgspec.json.Encoder().encode


def timestamp(unix_seconds: float) -> str:
    """RFC 3339 in UTC with milliseconds: `2026-01-31T12:00:00.250Z`."""
    moment = datetime.fromtimestamp(unix_seconds, UTC)
    return moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def lease_head(answer: LeaseAnswer) -> bytes:
    """The document up to its groups, which follow it separated by commas, and `TAIL`."""
    lease = answer.lease
    head = {
        "lease_id": lease and lease.lease_id,
        "expires_at": lease and timestamp(lease.expires_at),
        "status": answer.status,
        "policy_version": answer.policy_version,
        "outstanding": answer.outstanding,
    }
    return bytes(_encode(head)[:-1] + b',"groups":[')


TAIL = b"]}"


def lease_pieces(answer: LeaseAnswer, sampling: Mapping[str, Any]) -> Iterator[bytes]:
    """The whole document. For a thread: see `PIECE_ITEMS`."""
    yield lease_head(answer)
    if answer.lease is not None:
        for number, payload in enumerate(answer.payloads):
            if number:
                yield b","
            yield from _group_pieces(payload, answer.lease, sampling)
    yield TAIL


def _group_pieces(payload: GroupPayload, lease: Lease, sampling: Mapping[str, Any]) -> Iterator[bytes]:
    yield group_head(payload, lease, sampling)
    first = True
    for rollout, score, about in group_rollouts(payload):
        for number, sequence in enumerate(sequences_of(rollout)):
            yield about if first else b"," + about
            first = False
            yield from _array("input_ids", sequence.input_ids)
            yield from _array("completion_mask", sequence.completion_mask)
            yield from _array("old_log_probs", sequence.old_log_probs)
            if number < len(score.teacher):
                teacher = score.teacher[number]
                yield b',"teacher_id":' + _encode(teacher.teacher_id)
                yield from _table("teacher_topk_ids", teacher.ids, teacher.columns)
                yield from _table("teacher_topk_logprobs", teacher.logprobs, teacher.columns)
            yield b"}"
    yield TAIL


def sequences_of(rollout: FinishedRollout) -> tuple[TokenSequence, ...]:
    """The samples of a rollout."""
    return token_sequences(rollout.turns, fork_threshold=rollout.fork_threshold)


def group_head(payload: GroupPayload, lease: Lease, sampling: Mapping[str, Any]) -> bytes:
    """A scored group up to its samples, which follow it separated by commas, and `TAIL`.

    `sampling` is the configured one, under the prompt's own.
    """
    group, prompt, score = payload.group, payload.prompt, payload.score
    if prompt is None or score is None or group.version is None:
        raise ValueError(f"{group.group_id} is {group.state} and has nothing to deliver")
    survivors = _survivors(payload)
    modes = {rollout.logprobs_mode for rollout in survivors}
    head = {
        "group_id": group.group_id,
        "prompt_id": group.prompt_id,
        "epoch": group.epoch,
        "attempt": group.attempt,
        "num_generations": group.num_generations,
        "policy_version": group.version,
        "staleness": lease.policy_version - group.version,
        "zero_variance": score.zero_variance,
        "reward_mean": score.mean,
        "reward_std": score.std,
        "columns": prompt.columns,
        # As it was asked for; the configuration may be another one since.
        "sampling": agreed([r.sampling for r in survivors if r.sampling]) or {**sampling, **prompt.sampling},
        "logprobs_mode": modes.pop() if len(modes) == 1 else None,
    }
    return bytes(_encode(head)[:-1] + b',"samples":[')


def group_rollouts(payload: GroupPayload) -> Iterator[tuple[FinishedRollout, RowScore, bytes]]:
    """Every survivor by row, its score, and what its samples share: an object without its arrays and closing brace."""
    group, score = payload.group, payload.score
    if score is None or group.version is None:
        raise ValueError(f"{group.group_id} is {group.state} and has nothing to deliver")
    for rollout in _survivors(payload):
        row_score = score.rows.get(rollout.index) or RowScore(reward=None, rewards={}, advantage=0.0)
        rollout_id = f"{group.group_id}.{group.attempt}.{rollout.index}"
        yield rollout, row_score, _encode(_about(rollout, rollout_id, group.version, row_score))[:-1]


def _survivors(payload: GroupPayload) -> list[FinishedRollout]:
    return [rollout for _, rollout in sorted(payload.rollouts.items()) if isinstance(rollout, FinishedRollout)]


def _about(rollout: FinishedRollout, rollout_id: str, version: int, score: RowScore) -> dict[str, Any]:
    """What all samples of one rollout share."""
    spans = [span for turn in rollout.turns for span in turn.weight_versions]
    about = {
        "rollout_id": rollout_id,
        "index": rollout.index,
        "policy_version": version,
        "prompt": rollout.prompt,
        "completion": rollout.completion,
        "reward": score.reward,
        "rewards": score.rewards,
        "advantage": score.advantage,
        "scored": score.reward is not None or bool(score.teacher),
        "finish_reason": rollout.finish_reason,
        "truncated": rollout.finish_reason is FinishReason.LENGTH,
        "metrics": {name: float(value) for name, value in rollout.metrics.items() if isfinite(value)},
    }
    if spans:
        about["weight_versions"] = spans
    versions = [turn.version for turn in rollout.turns]
    if None not in versions and (len(versions) > 1 or versions != [version]):
        about["turn_versions"] = versions
    return about


def _array(name: str, values: Any) -> Iterator[bytes]:
    """`,"name":[…]` for an array or bytes."""
    yield b',"' + name.encode() + b'":['
    for start in range(0, len(values), PIECE_ITEMS):
        piece = _encode(list(values[start : start + PIECE_ITEMS]))[1:-1]
        yield piece if start == 0 else b"," + piece
    yield b"]"


def _table(name: str, values: Any, columns: int) -> Iterator[bytes]:
    """`,"name":[[…],…]` for a flat array of rows; what is not finite becomes null."""
    yield b',"' + name.encode() + b'":['
    step = max(1, PIECE_ITEMS // columns) * columns
    for start in range(0, len(values), step):
        flat = list(values[start : start + step])
        piece = _encode([flat[i : i + columns] for i in range(0, len(flat), columns)])[1:-1]
        yield piece if start == 0 else b"," + piece
    yield b"]"
