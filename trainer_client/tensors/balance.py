"""The samples of a step divided among ranks and micro-batches.

What always holds: every sample is in exactly one micro-batch; no micro-batch has more tokens than the budget; every
rank has as many micro-batches as every other; the same samples give the same division on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import msgspec
import numpy as np

from trainer_client.tensors.rows import Row, rows_of
from trainer_client.types import Group, Lease, Sample

__all__ = ["micro_batches", "shard"]


def shard(lease: Lease | Sequence[Group], rank: int, world: int) -> list[Group]:
    """The groups of one rank, `groups[rank::world]`. No group is split; with fewer groups than ranks, some get none.

    Raises ValueError unless 0 <= rank < world.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank is from 0 to world - 1, not {rank} of {world}")
    groups = lease.groups if isinstance(lease, Lease) else lease
    return list(groups[rank::world])


@overload
def micro_batches(
    samples: Sequence[Group], token_budget: int, *, world: int = 1, linear: int = 0
) -> list[list[list[Group]]]: ...
@overload
def micro_batches(
    samples: Sequence[Sample], token_budget: int, *, world: int = 1, linear: int = 0
) -> list[list[list[Sample]]]: ...
def micro_batches(
    samples: Sequence[Group] | Sequence[Sample], token_budget: int, *, world: int = 1, linear: int = 0
) -> list[list[list[Group]]] | list[list[list[Sample]]]:
    """Divide the samples of a step; `[rank][i]` is micro-batch i of that rank, ready for `pack` or `to_tensors`.

    From groups come groups that have only the micro-batch's samples (a group may be in several of them: advantages are
    computed already, so nothing needs it whole); from samples come samples. Order within a micro-batch is as given.

    - `token_budget`: most tokens of a micro-batch, prompt and completion, padding not counted.
    - `world`: ranks. Every one has to be given all samples of the step and gets the same answer (`RolloutDataset` with
      `whole_step=True`). All have as many micro-batches, heavy ones first, and those of one i cost about the same, so
      that ranks that meet in every forward (FSDP) wait little. None is empty unless the budget forces more of them than
      there are samples, or there are fewer samples than ranks; then the last ones are `[]`, and a rank that has one
      must still meet the others, with a row of loss 0 say.
    - `linear`: cost of a sample of L tokens is L² + linear · L. L² is attention: scores and weighted sum take
      4·L²·h FLOPs a layer at hidden size h. The matrix multiplications take 24·L·h², so `linear = 6 * h` counts both
      (Narayanan et al. 2021, arXiv 2104.04473, whose batch of B at length s costs 96·B·s·l·h²·(1 + s/(6h) + …)).
      0: attention alone.

    Longest first, each to the micro-batch of least cost that has room for it (LPT; Graham 1969: where the budget does
    not bind, the heaviest is at most 4/3 - 1/(3m) times the best possible with m micro-batches). As few micro-batches
    as bisection finds this to work with.

    Raises ValueError for no samples, for a sample longer than the budget (naming it: nothing is cut or dropped), for a
    sample whose arrays differ in length, and for a budget or world below 1.
    """
    if token_budget < 1 or world < 1 or linear < 0:
        raise ValueError(
            f"token_budget and world are at least 1 and linear at least 0, not {token_budget}, {world}, {linear}"
        )
    rows = rows_of(samples)
    for row in rows:
        if row.length > token_budget:
            raise ValueError(f"{row}: {row.length} tokens are more than the token_budget of {token_budget}")
    lengths = np.array([row.length for row in rows], dtype=np.int64)
    counted = np.maximum(lengths, 1)  # no sample is free, or two such would share a micro-batch and leave one empty
    costs = counted * counted + linear * counted
    ranks = _to_ranks(_fewest(lengths, costs, token_budget, world), costs, world)
    if isinstance(samples[0], Group):
        return [[_as_groups([rows[i] for i in indexes]) for indexes in mine] for mine in ranks]
    return [[[rows[i].sample for i in indexes] for indexes in mine] for mine in ranks]


_Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


def _fewest(lengths: _Ints, costs: _Ints, budget: int, world: int) -> list[list[int]]:
    """Indexes of samples by micro-batch; their number is a multiple of `world`."""
    halves = int(np.count_nonzero(lengths * 2 > budget))  # no two of these share a micro-batch
    count = max(1, -(-int(lengths.sum()) // (budget * world)), -(-halves // world))
    too_few, step = count - 1, 1
    # Ends: with a micro-batch for every sample each goes to an empty one.
    while (found := _fill(lengths, costs, budget, count * world)) is None:
        too_few, count, step = count, count + step, 2 * step
    while too_few + 1 < count:
        middle = (too_few + count) // 2
        fewer = _fill(lengths, costs, budget, middle * world)
        if fewer is None:
            too_few = middle
        else:
            found, count = fewer, middle
    return found


def _fill(lengths: _Ints, costs: _Ints, budget: int, count: int) -> list[list[int]] | None:
    """LPT into `count` micro-batches; None where a sample finds no room."""
    full = np.iinfo(np.int64).max
    tokens = np.zeros(count, dtype=np.int64)
    load = np.zeros(count, dtype=np.int64)
    filled: list[list[int]] = [[] for _ in range(count)]
    for index in np.argsort(-costs, kind="stable").tolist():
        open_load = np.where(tokens + lengths[index] <= budget, load, full)
        least = int(open_load.argmin())  # the first of equals: the same on every rank
        if open_load[least] == full:
            return None
        filled[least].append(index)
        tokens[least] += lengths[index]
        load[least] += costs[index]
    return filled


def _to_ranks(filled: list[list[int]], costs: _Ints, world: int) -> list[list[list[int]]]:
    """Heavy micro-batches first, as many of similar cost as there are ranks at a time, the heaviest of these to the
    rank that has least so far."""
    by_cost = sorted(
        ((int(costs[np.array(indexes, dtype=np.int64)].sum()), sorted(indexes)) for indexes in filled),
        key=lambda pair: -pair[0],
    )
    ranks: list[list[list[int]]] = [[] for _ in range(world)]
    total = [0] * world
    for begin in range(0, len(by_cost), world):
        least_first = sorted(range(world), key=lambda rank: total[rank])
        for rank, (cost, indexes) in zip(least_first, by_cost[begin : begin + world], strict=True):
            ranks[rank].append(indexes)
            total[rank] += cost
    return ranks


def _as_groups(rows: Sequence[Row]) -> list[Group]:
    """Groups with these samples only, in the order given."""
    found: dict[int, tuple[Group, list[Sample]]] = {}
    for row in rows:
        if row.group is not None:
            found.setdefault(row.group_index, (row.group, []))[1].append(row.sample)
    return [msgspec.structs.replace(group, samples=samples) for group, samples in found.values()]
