"""What TRL 1.16's async trainer needs on a machine without a GPU; on one with a GPU leave this out.

`install()` changes two things that are hard-wired in TRL: the accelerator's peak speed, for which it asks CUDA, is not
known; attention over packed sequences is PyTorch's own instead of a FlashAttention-3 kernel from the hub. It also keeps
TRL from warning that its trainer is experimental.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    *_: Any,
    softmax_scale: float | None = None,
    **__: Any,
) -> torch.Tensor:
    """Causal attention, segment by segment, (tokens, heads, width): a segment's queries are the last of its keys."""
    out = torch.empty_like(q)
    bounds = zip(starts_q.tolist(), starts_q[1:].tolist(), starts_k.tolist(), starts_k[1:].tolist(), strict=False)
    for from_q, to_q, from_k, to_k in bounds:
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q[from_q:to_q], k[from_k:to_k], v[from_k:to_k]))
        rows, columns = to_q - from_q, to_k - from_k
        seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        attended = scaled_dot_product_attention(queries, keys, values, seen, scale=softmax_scale, enable_gqa=True)
        out[from_q:to_q] = attended[0].transpose(0, 1)
    return out


def install() -> None:
    """Before a trainer is made."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
