"""Leased groups as padded torch tensors.

What always holds: a row is the sample as the service gave it, padded; nothing is dropped, cut or recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from trainer_client.tensors.rows import rows_of
from trainer_client.tensors.teachers import teacher_arrays
from trainer_client.types import Group, Sample

__all__ = ["to_tensors"]


def to_tensors(
    groups: Sequence[Group] | Sequence[Sample],
    pad_token_id: int,
    *,
    padding_side: Literal["left", "right"] = "right",
    device: torch.device | str | None = None,
) -> dict[str, torch.Tensor]:
    """Stack the samples of `groups` into one padded batch.

    B = samples over all groups, L = length of the longest (prompt and completion together).

    | key | shape, dtype | holds | padding |
    | --- | --- | --- | --- |
    | `input_ids` | (B, L) int64 | prompt and completion | `pad_token_id` |
    | `attention_mask` | (B, L) int64 | 1 on the sample's tokens | 0 |
    | `completion_mask` | (B, L) int64 | 1 on tokens to train, 0 on context | 0 |
    | `old_log_probs` | (B, L) float32 | logprob of `input_ids[b, t]` given `input_ids[b, :t]`; 0.0 on context | 0.0 |
    | `advantages` | (B,) float32 | one for the whole sample; 0.0 where it is unscored | |
    | `group_index` | (B,) int64 | the row's group, as a position in `groups`; -1 for samples given alone | |
    | `sample_index` | (B,) int64 | the row's rollout in its group (`Sample.index`) | |
    | `teacher_topk_ids` | (B, L, K) int64 | a teacher's most likely tokens in place of `input_ids[b, t]` | -1 |
    | `teacher_topk_logprobs` | (B, L, K) float32 | their logprobs given `input_ids[b, :t]` | -inf |

    The last two are there only where a teacher scored a sample (distillation); K is the widest table's, and they are
    padded on context too.

    `old_log_probs`, `completion_mask` and the teacher's tables stand at the token they are about, so a model's logits
    are shifted against them: `logits[:, :-1].log_softmax(-1)` gathered at `input_ids[:, 1:]` goes with
    `old_log_probs[:, 1:]`, `completion_mask[:, 1:]` and `teacher_topk_ids[:, 1:]`. Padding is "right" (default) or
    "left"; positions for left padding come from `attention_mask.cumsum(-1) - 1`.

    Raises ValueError for no groups, for groups without samples, and for a sample whose arrays differ in length.
    """
    if padding_side not in ("left", "right"):
        raise ValueError(f'padding_side is "left" or "right", not {padding_side!r}')
    rows = rows_of(groups)
    longest = max(row.length for row in rows)

    input_ids = np.full((len(rows), longest), pad_token_id, dtype=np.int64)
    attention_mask = np.zeros((len(rows), longest), dtype=np.int64)
    completion_mask = np.zeros((len(rows), longest), dtype=np.int64)
    old_log_probs = np.zeros((len(rows), longest), dtype=np.float32)
    starts: list[tuple[int, int]] = []
    for b, row in enumerate(rows):
        place = slice(longest - row.length, longest) if padding_side == "left" else slice(0, row.length)
        starts.append((b, place.start))
        input_ids[b, place] = row.sample.input_ids
        attention_mask[b, place] = 1
        completion_mask[b, place] = row.sample.completion_mask
        old_log_probs[b, place] = row.sample.old_log_probs
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "completion_mask": completion_mask,
        "old_log_probs": old_log_probs,
        "advantages": np.array([row.advantage for row in rows], dtype=np.float32),
        "group_index": np.array([row.group_index for row in rows], dtype=np.int64),
        "sample_index": np.array([row.sample.index for row in rows], dtype=np.int64),
    }
    arrays |= teacher_arrays(rows, starts, (len(rows), longest))
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
