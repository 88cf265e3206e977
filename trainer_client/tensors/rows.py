"""Samples as rows of a batch, the one way every module here reads them.

What always holds: rows stand in the order of the groups, and within a group in the order of its samples; none is
dropped; the token arrays of a row have equal lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer_client.types import Group, Sample

__all__ = ["Row", "rows_of", "trained_tokens"]

_TOKEN_FIELDS = ("completion_mask", "old_log_probs")
NO_GROUP = -1
"""`group_index` of a sample that was given without its group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One sample and where it came from."""

    sample: Sample
    group: Group | None
    """None where samples were given alone."""
    group_index: int
    """Position in the list of groups; NO_GROUP where samples were given alone."""

    @property
    def length(self) -> int:
        """Tokens, prompt and completion."""
        return len(self.sample.input_ids)

    @property
    def advantage(self) -> float:
        """0.0 where the sample is unscored."""
        return self.sample.advantage if self.sample.scored else 0.0

    def __str__(self) -> str:
        of = f"group {self.group.group_id}" if self.group is not None else f"rollout {self.sample.rollout_id}"
        return f"{of}, sample {self.sample.index}"


def rows_of(batch: Sequence[Group] | Sequence[Sample]) -> list[Row]:
    """The samples of groups, or samples given alone, in order.

    Raises ValueError where there is none, and for a sample whose arrays differ in length.
    """
    rows: list[Row] = []
    items: Sequence[Group | Sample] = batch
    for position, item in enumerate(items):
        if isinstance(item, Sample):
            rows.append(Row(sample=item, group=None, group_index=NO_GROUP))
        else:
            rows += [Row(sample=sample, group=item, group_index=position) for sample in item.samples]
    if not rows:
        raise ValueError("no samples to make a batch of: the list of groups is empty (an empty lease has none)")
    for row in rows:
        for name in _TOKEN_FIELDS:
            values = len(getattr(row.sample, name))
            if values != row.length:
                raise ValueError(f"{row}: {values} values of {name} for {row.length} tokens")
    return rows


def trained_tokens(batch: Sequence[Group] | Sequence[Sample]) -> int:
    """How many tokens of `batch` have a loss: those with `completion_mask` 1, but for a sample's first token.

    The denominator of a token mean over a whole step. A loss summed over the trained tokens of each micro-batch and
    divided by this number adds up, over all micro-batches and ranks, to the token mean of the step; dividing each
    micro-batch by its own number would give tokens in small micro-batches more weight. Where gradients are averaged
    over `world` ranks (DDP, FSDP), multiply by `world`. 0 for no samples: then there is nothing to train.
    """
    samples = (sample for item in batch for sample in ((item,) if isinstance(item, Sample) else item.samples))
    return sum(int(np.count_nonzero(np.asarray(sample.completion_mask)[1:])) for sample in samples)
