"""Teachers' tables of a batch, at the places of the tokens they are about.

What always holds: row t of a sample's table stands at the t-th token of it whose mask is 1, and at no other; everywhere
else, and where a sample has no table or a narrower one, ids are -1 and logprobs -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer_client.tensors.rows import Row

__all__ = ["teacher_arrays"]


def teacher_arrays(
    rows: Sequence[Row], starts: Sequence[tuple[int, int]], shape: tuple[int, int]
) -> dict[str, np.ndarray[Any, Any]]:
    """`teacher_topk_ids` (*shape, K) int64 and `teacher_topk_logprobs` (*shape, K) float32, K = the widest table's.

    Row i's first token is at `starts[i]` of a batch of `shape`. Empty where no sample has a table. Raises ValueError
    where a table has another number of rows than its sample has tokens to train.
    """
    tables = {i: _table(row) for i, row in enumerate(rows) if row.sample.teacher_topk_ids is not None}
    if not tables:
        return {}
    widest = max(ids.shape[1] for ids, _ in tables.values())
    all_ids = np.full((*shape, widest), -1, dtype=np.int64)
    all_logprobs = np.full((*shape, widest), -np.inf, dtype=np.float32)
    for i, (ids, logprobs) in tables.items():
        b, start = starts[i]
        places = start + np.flatnonzero(np.asarray(rows[i].sample.completion_mask))
        if not len(places) == len(ids) == len(logprobs):
            raise ValueError(f"{rows[i]}: {len(ids)} rows of teacher_topk_ids for {len(places)} tokens to train")
        all_ids[b, places, : ids.shape[1]] = ids
        all_logprobs[b, places, : ids.shape[1]] = logprobs
    return {"teacher_topk_ids": all_ids, "teacher_topk_logprobs": all_logprobs}


def _table(row: Row) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(T, K) each; None, which is how JSON says -inf, becomes that."""
    ids = np.asarray(row.sample.teacher_topk_ids)
    given = row.sample.teacher_topk_logprobs
    logprobs = given if isinstance(given, np.ndarray) else _floats(given or ())
    if ids.ndim != 2 or ids.shape != logprobs.shape:
        raise ValueError(f"{row}: teacher_topk_ids {ids.shape} and teacher_topk_logprobs {logprobs.shape} differ")
    return ids, logprobs


def _floats(rows: Sequence[Sequence[float | None]]) -> np.ndarray[Any, Any]:
    return np.array([[-np.inf if value is None else value for value in row] for row in rows], dtype=np.float32)
