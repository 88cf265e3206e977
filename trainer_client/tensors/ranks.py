"""The processes that train together, as far as sharing leases needs them.

What always holds: `gather` returns only after every process has called it; exactly one process leads (it alone acks,
renews and gives back); processes with the same `rank` get the same share.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

__all__ = ["Ranks", "find_ranks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process among all of them."""

    rank: int
    """Which share is this process's."""
    world: int
    """Number of shares."""
    processes: int
    """Number of processes; more than shares where several hold one replica of the model (tensor parallelism)."""
    leads: bool
    gather: Callable[[Any], list[Any]]
    """Waits for every process; what each of them gave, or only one's own value where they can merely wait."""

    def first(self, value: str) -> str:
        """The value of the first process. Raises ValueError, on all, where a share is nobody's: it would be acked."""
        told = self.gather((value, self.rank, self.world))
        if len(told) == self.processes:
            shares, worlds = {rank for _, rank, _ in told}, {world for _, _, world in told}
            if worlds != {self.world} or shares != set(range(self.world)):
                raise ValueError(f"ranks {sorted(shares)} of {sorted(worlds)} do not divide a step among them")
        return str(told[0][0])


def find_ranks(rank: int | None, world: int | None, barrier: Callable[[], object] | None, process_group: Any) -> Ranks:
    """From the arguments of `RolloutDataset` and torch.distributed. Raises ValueError, RuntimeError."""
    if barrier is not None:
        if rank is None or world is None:
            raise ValueError("a barrier needs rank and world beside it")
        return Ranks(rank=rank, world=world, processes=world, leads=rank == 0, gather=_waiting_with(barrier))
    if dist.is_available() and dist.is_initialized():
        me, size = dist.get_rank(process_group), dist.get_world_size(process_group)
        if me < 0:
            raise ValueError("this process is not in the process group given")
        share = (me, size) if rank is None or world is None else (rank, world)
        if share[1] > size:
            raise ValueError(f"{share[1]} shares need as many processes, and there are {size}")
        gather = _alone if size == 1 else _over(process_group, size)
        return Ranks(rank=share[0], world=share[1], processes=size, leads=me == 0, gather=gather)
    if world is not None and world > 1:
        raise ValueError(
            f"{world} ranks that share leases have to wait for each other: "
            "initialise torch.distributed, or pass a barrier"
        )
    if world is None and int(os.environ.get("WORLD_SIZE") or 1) > 1:
        # Taken for single trainers they would lease on their own, and the last steps would not come out even.
        raise RuntimeError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not initialised: call "
            "init_process_group before iterating, or pass world=1 for a trainer that leases on its own"
        )
    return Ranks(rank=0, world=1, processes=1, leads=True, gather=_alone)


def _alone(value: Any) -> list[Any]:
    return [value]


def _waiting_with(barrier: Callable[[], object]) -> Callable[[Any], list[Any]]:
    def gather(value: Any) -> list[Any]:
        barrier()
        return [value]

    return gather


def _over(process_group: Any, size: int) -> Callable[[Any], list[Any]]:
    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * size
        dist.all_gather_object(values, value, group=process_group)
        return values

    return gather
