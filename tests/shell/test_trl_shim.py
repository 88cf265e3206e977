"""The example's attention over packed sequences is the one of a plain causal pass."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from examples.trl_async_grpo.shim import flash_attn_varlen_func


def test_a_segment_sees_its_path_and_nothing_else():
    """Sequences of 5 and 6 tokens share their first 3: packed as 3 segments they give what each gives alone."""
    torch.manual_seed(0)
    shared, tails = 3, (2, 3)
    q, k, v = (torch.randn(shared + sum(tails), heads, 8) for heads in (4, 2, 2))
    rows = [list(range(3)), [3, 4], [5, 6, 7]]
    paths = [rows[0], rows[0] + rows[1], rows[0] + rows[2]]
    index = torch.tensor([i for path in paths for i in path])
    starts_q, starts_k = torch.tensor([0, 3, 5, 8]), torch.tensor([0, 3, 8, 14])
    out = flash_attn_varlen_func(q, k[index], v[index], starts_q, starts_k, 3, 6, softmax_scale=0.3, causal=True)
    for path, own in zip(paths, rows, strict=True):
        alone = scaled_dot_product_attention(
            *(x[path].transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(out[own], alone[0].transpose(0, 1)[-len(own) :])
