"""The order of rows within an epoch: a function of (seed, epoch, number of rows) alone.

It is the same in every process and under every Python, because a stored cursor is a position in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from random import Random

FILE_ORDER = -1
"""The seed that leaves rows as they stand in the file."""


def epoch_order(rows: int, *, seed: int, epoch: int) -> Sequence[int]:
    """Row numbers in the order they are read in `epoch`."""
    if seed == FILE_ORDER:
        return range(rows)
    order = array("q", range(rows))
    draw = Random(f"{seed}:{epoch}").random  # noqa: S311 - an order, no secret
    # Python promises the same random() for a seed for ever, and promises nothing of the kind for shuffle().
    for last in range(rows - 1, 0, -1):
        other = int(draw() * (last + 1))
        order[last], order[other] = order[other], order[last]
    return order
