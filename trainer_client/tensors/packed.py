"""Samples one after the other in one row without padding, for attention over segments of different lengths.

What always holds: no token attends or is predicted across the boundary between two samples as long as the model honours
`cu_seqlens` or `position_ids`; the first token of a sample is never trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

import numpy as np
import torch

from trainer_client.tensors.rows import rows_of
from trainer_client.tensors.teachers import teacher_arrays
from trainer_client.types import Group, Sample

__all__ = ["IGNORED_LABEL", "PackedBatch", "pack"]

IGNORED_LABEL = -100
"""`ignore_index` of torch's cross entropy."""


class PackedBatch(TypedDict):
    """N samples of T tokens in all."""

    input_ids: torch.Tensor
    """(1, T) int64, prompt and completion of each sample, samples in the order they were given."""
    position_ids: torch.Tensor
    """(1, T) int64, 0, 1, 2, … within each sample."""
    labels: torch.Tensor
    """(1, T) int64, `input_ids` on tokens to train, -100 elsewhere; not shifted."""
    cu_seqlens: torch.Tensor
    """(N + 1,) int32, sample i is tokens `cu_seqlens[i]:cu_seqlens[i + 1]`."""
    max_seqlen: int
    """Tokens of the longest sample; a plain int, so that attention need not wait for the device."""
    completion_mask: torch.Tensor
    """(1, T) int64, 1 on tokens to train; 0 on context and on the first token of every sample."""
    old_log_probs: torch.Tensor
    """(1, T) float32, logprob of the token given its sample before it; 0.0 on context."""
    token_advantages: torch.Tensor
    """(1, T) float32, the advantage of the token's sample, on context too."""
    advantages: torch.Tensor
    """(N,) float32, one for the whole sample; 0.0 where it is unscored."""
    group_index: torch.Tensor
    """(N,) int64, the sample's group as a position in what was given; -1 for samples given alone."""
    sample_index: torch.Tensor
    """(N,) int64, the sample's rollout in its group (`Sample.index`)."""
    teacher_topk_ids: NotRequired[torch.Tensor]
    """(1, T, K) int64, a teacher's most likely tokens in place of each token to train; -1 fills up, and on context.
    There only where a teacher scored a sample (distillation); K is the widest table's."""
    teacher_topk_logprobs: NotRequired[torch.Tensor]
    """(1, T, K) float32, their logprobs; -inf where the id is -1."""


def pack(samples: Sequence[Group] | Sequence[Sample], *, device: torch.device | str | None = None) -> PackedBatch:
    """Pack the samples of groups, or samples given alone, into one row. Shapes and dtypes: `PackedBatch`.

    **Attention.** flash-attn takes `flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
    max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, causal=True)`: int32 offsets that begin with 0 and end with T.
    A Hugging Face model takes `model(input_ids, position_ids=position_ids, use_cache=False)` and finds samples where
    positions restart, but only **without a cache and without an `attention_mask`** (`DataCollatorWithFlattening` makes
    the same layout); with flash attention it also takes the offsets, as `cu_seq_lens_q`, `cu_seq_lens_k`,
    `max_length_q`, `max_length_k`. A model that knows neither lets a sample attend to the one before it, and says
    nothing: use `to_tensors`.

    **Which logits go with which token.** `logits[0, t]` predicts token t + 1, also where t + 1 is the next sample's
    first token, about which it knows nothing. So that token has label -100 and mask 0, and one shift over the whole row
    is right:

        log_probs = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]
        goes with     completion_mask[:, 1:], old_log_probs[:, 1:], token_advantages[:, 1:], labels[:, 1:]

    `labels` are not shifted because Hugging Face's loss shifts them itself.

    Raises ValueError for no samples, and for a sample whose arrays differ in length.
    """
    rows = rows_of(samples)
    lengths = np.array([row.length for row in rows], dtype=np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    input_ids = np.empty((1, total), dtype=np.int64)
    position_ids = np.empty((1, total), dtype=np.int64)
    completion_mask = np.empty((1, total), dtype=np.int64)
    old_log_probs = np.empty((1, total), dtype=np.float32)
    for row, end in zip(rows, ends.tolist(), strict=True):
        begin = end - row.length
        input_ids[0, begin:end] = row.sample.input_ids
        position_ids[0, begin:end] = np.arange(row.length)
        completion_mask[0, begin:end] = row.sample.completion_mask
        completion_mask[0, begin : min(begin + 1, end)] = 0  # nothing predicts it
        old_log_probs[0, begin:end] = row.sample.old_log_probs
    advantages = np.array([row.advantage for row in rows], dtype=np.float32)
    labels = np.where(completion_mask != 0, input_ids, IGNORED_LABEL)

    def tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    batch = PackedBatch(
        input_ids=tensor(input_ids),
        position_ids=tensor(position_ids),
        labels=tensor(labels),
        cu_seqlens=tensor(np.concatenate([[0], ends]).astype(np.int32)),
        max_seqlen=int(lengths.max()),
        completion_mask=tensor(completion_mask),
        old_log_probs=tensor(old_log_probs),
        token_advantages=tensor(np.repeat(advantages, lengths)[None]),
        advantages=tensor(advantages),
        group_index=tensor(np.array([row.group_index for row in rows], dtype=np.int64)),
        sample_index=tensor(np.array([row.sample.index for row in rows], dtype=np.int64)),
    )
    starts = [(0, end - row.length) for row, end in zip(rows, ends.tolist(), strict=True)]
    if tables := teacher_arrays(rows, starts, (1, total)):
        batch["teacher_topk_ids"] = tensor(tables["teacher_topk_ids"])
        batch["teacher_topk_logprobs"] = tensor(tables["teacher_topk_logprobs"])
    return batch
