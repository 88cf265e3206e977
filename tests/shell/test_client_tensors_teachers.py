"""A teacher's tables in padded and in packed batches: each row at the token it is about."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
import torch

from trainer_client import Sample
from trainer_client.tensors import pack, to_tensors


def sample(mask: list[int], table: dict[str, Any] | None = None, first: int = 10) -> Sample:
    """A sample of tokens first, first + 1, ...; `table` holds what the teacher says."""
    return Sample(
        index=0,
        policy_version=0,
        input_ids=np.arange(first, first + len(mask), dtype=np.int32),
        completion_mask=np.array(mask, np.uint8),
        old_log_probs=np.zeros(len(mask), np.float32),
        **(table or {}),
    )


def says(ids: Any, logprobs: Any) -> dict[str, Any]:
    return {"teacher_id": "t", "teacher_topk_ids": ids, "teacher_topk_logprobs": logprobs}


BINARY = says(
    np.array([[11, 50], [13, -1]], np.int32),
    np.array([[-0.5, -1.5], [-2.5, -inf]], np.float32),
)
JSON = says([[11, 50], [13, -1]], [[-0.5, -1.5], [-2.5, None]])
WIDE = says([[31, 32, 33]], [[-0.25, -1.25, -2.25]])
NO = [-1, -1, -1]


@pytest.mark.parametrize("narrow", [BINARY, JSON], ids=["binary", "json"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_tables_stand_at_the_tokens_they_are_about(narrow: dict[str, Any], side: Any):
    rows = [sample([0, 1, 0, 1], narrow), sample([0, 1], WIDE, first=30), sample([0, 1, 1])]
    batch = to_tensors(rows, 0, padding_side=side)
    ids, logprobs = batch["teacher_topk_ids"], batch["teacher_topk_logprobs"]
    assert (ids.shape, ids.dtype) == ((3, 4, 3), torch.int64)
    assert (logprobs.shape, logprobs.dtype) == ((3, 4, 3), torch.float32)
    assert ids[0].tolist() == [NO, [11, 50, -1], NO, [13, -1, -1]]
    second = [NO, [31, 32, 33]]
    assert ids[1].tolist() == ([NO, NO, *second] if side == "left" else [*second, NO, NO])
    assert ids[2].tolist() == [NO] * 4
    assert logprobs[0, 1].tolist() == [-0.5, -1.5, -inf]
    assert ((ids == -1) == (logprobs == -inf)).all()
    # A row is about the token at its own place.
    assert torch.equal(batch["input_ids"][ids[..., 0] >= 0], ids[..., 0][ids[..., 0] >= 0])


def test_packed_tables_stand_at_the_tokens_they_are_about():
    rows = [sample([0, 1, 0, 1], BINARY), sample([0, 1, 1]), sample([0, 1], WIDE, first=30)]
    batch = pack(rows)
    ids, logprobs = batch["teacher_topk_ids"], batch["teacher_topk_logprobs"]
    assert ids.tolist() == [[NO, [11, 50, -1], NO, [13, -1, -1], NO, NO, NO, NO, [31, 32, 33]]]
    assert logprobs[0, 8].tolist() == [-0.25, -1.25, -2.25]
    assert (ids.dtype, logprobs.dtype) == (torch.int64, torch.float32)


def test_without_a_teacher_the_keys_are_not_there():
    rows = [sample([0, 1, 1])]
    assert not {"teacher_topk_ids", "teacher_topk_logprobs"} & (to_tensors(rows, 0).keys() | pack(rows).keys())


@pytest.mark.parametrize(
    "wrong",
    [says([[11, 50]], [[-0.5, -1.5]]), says([[11], [13]], [[-0.5, -1.5], [-2.5, None]])],
    ids=["a row too few", "of two widths"],
)
def test_a_table_that_does_not_fit_its_sample_is_refused(wrong: dict[str, Any]):
    for batch in (lambda rows: to_tensors(rows, 0), pack):
        with pytest.raises(ValueError, match="teacher_topk_ids"):
            batch([sample([0, 1, 0, 1], wrong)])
