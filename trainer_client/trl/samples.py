"""A leased group as the rows TRL trains on. Pure.

What always holds of a row: its three arrays have one length and hold finite numbers, at least one of its tokens is
trained, its advantage is finite, and every value of `metrics` is a float. Nothing is cut, padded or recomputed.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer_client.errors import ClientError
from trainer_client.types import Group, Sample

NAN = float("nan")
Messages = list[dict[str, Any]]


class UnfitSample(ClientError):
    """A sample that must not be trained on: arrays of different lengths, or a number that is not finite."""


@dataclass(kw_only=True, slots=True)
class RolloutSample:
    """TRL's row, field for field. T = length of prompt and completion together."""

    prompt: Messages
    completion: Messages
    input_ids: NDArray[np.int64]
    """(T,)"""
    completion_mask: NDArray[np.int64]
    """(T,) 1 on tokens to train."""
    old_log_probs: NDArray[np.float32]
    """(T,) the engine's; 0.0 where the mask is 0."""
    advantage: float
    """0.0 where unscored."""
    model_version: int
    """In TRL's own count."""
    group_id: int
    metrics: dict[str, float]
    """NaN: not scored."""
    enqueued_at: float | None = None
    """Unix seconds."""


def to_samples(group: Group, *, version_offset: int, now: float) -> tuple[list[RolloutSample], int]:
    """The rows of a group, and how many of its samples have no token to train (TRL fails on a batch of those).

    `version_offset` = the service's versions minus TRL's. Raises UnfitSample.
    """
    number = group_number(group.group_id)
    rows: list[RolloutSample] = []
    for sample in group.samples:
        ids = np.asarray(sample.input_ids, dtype=np.int64)
        mask = np.asarray(sample.completion_mask, dtype=np.int64)
        log_probs = np.asarray(sample.old_log_probs, dtype=np.float32)
        advantage = float(sample.advantage) if sample.scored else 0.0
        if not len(ids) == len(mask) == len(log_probs):
            raise UnfitSample(
                f"group {group.group_id}, sample {sample.index}: {len(ids)} tokens, {len(mask)} values of "
                f"completion_mask, {len(log_probs)} of old_log_probs"
            )
        if not (np.isfinite(log_probs).all() and math.isfinite(advantage)):
            raise UnfitSample(f"group {group.group_id}, sample {sample.index}: a logprob or advantage is not finite")
        if not mask[1:].any():  # the first token has none before it that could predict it
            continue
        rows.append(
            RolloutSample(
                prompt=_messages(sample.prompt, "user"),
                completion=_messages(sample.completion, "assistant"),
                input_ids=ids,
                completion_mask=mask,
                old_log_probs=log_probs,
                advantage=advantage,
                model_version=sample.policy_version - version_offset,
                group_id=number,
                metrics=_metrics(group, sample),
                enqueued_at=now,
            )
        )
    return rows, len(group.samples) - len(rows)


def group_number(group_id: str) -> int:
    """`g-42` -> 42; any other id -> a negative number of its own. The same id always gives the same number."""
    if (found := re.fullmatch(r"g-(\d{1,18})", group_id)) is not None:
        return int(found[1])
    digest = hashlib.blake2b(group_id.encode(), digest_size=8).digest()
    return -1 - (int.from_bytes(digest, "big") >> 1)


def _metrics(group: Group, sample: Sample) -> dict[str, float]:
    """TRL's own names for rewards; what the program measured stands under `sample_metrics/`."""
    rewards = {f"rewards/{name}": _number(value) for name, value in sample.rewards.items()}
    measured = {f"sample_metrics/{name}": float(value) for name, value in _numeric(sample.metrics).items()}
    return {"reward": _number(sample.reward), "reward_std": _number(group.reward_std), **rewards, **measured}


def _number(value: float | None) -> float:
    return NAN if value is None else float(value)


def _numeric(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    return {k: v for k, v in metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def _messages(said: Any, role: str) -> Messages:
    """TRL's traces concatenate prompt and completion as lists of messages; a text becomes one of `role`."""
    if isinstance(said, list):
        return said
    return [{"role": role, "content": said or ""}]
