"""Steps of leased groups as a torch dataset, for one trainer or for many ranks.

What always holds: a step is acked when the next one is asked for and not before; leaving the loop early (an exception,
`break`) gives the step in hand back; with many ranks every rank gets an element for every step, so all take as many
steps and end together.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Generator, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from trainer_client.client import RolloutClient
from trainer_client.tensors.balance import shard
from trainer_client.tensors.ranks import Ranks, find_ranks
from trainer_client.tensors.shared import SharedLeases
from trainer_client.types import Group, Lease

__all__ = ["RolloutDataset"]


class RolloutDataset(IterableDataset[Any]):
    """Each element is this rank's part of one step: a list of groups, or what `collate` makes of it.

        for batch in RolloutDataset(url, groups_per_step=32, collate=partial(to_tensors, pad_token_id=0)):
            train(batch)

    Arguments:

    - `url`: of the service, or a `RolloutClient` (the trainer's own knows the versions it posted without asking).
      `api_key`: as in `RolloutClient`; a client has its own.
    - `groups_per_step`: most groups of a step, over all ranks. `min_groups`: fewest (default: as many); at the end of
      the run, after a halt, and where the service's `max_lease_bytes` bounds a lease, a step may have fewer.
    - `collate`: called with a list of groups, the empty list included (see below).
    - `whole_step`: every rank gets all groups of the step, to be divided by `micro_batches(groups, budget,
      world=world)[rank]`, which balances ranks and gives each as many micro-batches. Else `shard` divides them:
      `groups[rank::world]`.
    - `even`: only multiples of `world` groups are trained; the rest of a lease is given back and comes again. When
      fewer than `world` are left and nothing more comes, the loop ends on all ranks with a warning that names them, and
      they stay ready at the service. After a halt `Halted` is raised instead. No effect with one rank or `whole_step`.
    - `wait_s`, `lease_s`, `consumer`: as in `RolloutClient.lease`. `depth`: leases fetched ahead, with one rank.
    - `rank`, `world`: this process's share and the number of shares; from torch.distributed where it is initialised.
      Processes of one tensor-parallel replica pass the same `rank`. `process_group`: of all processes that iterate;
      with NCCL better one of gloo (`dist.new_group(backend="gloo")`), which needs no device.
    - `barrier`: a callable that returns once all `world` ranks have called it, instead of torch.distributed. Ranks
      then cannot tell each other what went wrong, and `run_id` is needed.
    - `run_id`: steps are leased as `{run_id}-{n}`. The service remembers request ids for ever, so it has to be new at
      every start of the trainer. Default: random, rank 0's.

    **One rank** uses `RolloutClient.prefetch`: the next lease is fetched while this one is trained. What has become too
    old by then is released, so a step may have fewer groups than `min_groups`.

    **Many ranks** lease under one request id, so each receives the whole lease; its policy version and staleness are
    those it was made at. Asking for the next element waits for all ranks; then rank 0, which renewed the lease so long,
    acks it. Where a step has fewer groups than ranks (the last one, mostly) some shares are empty. Those ranks get an
    element too, made of no groups, and **must take part** in forward, backward and gradient reduction with a loss of 0
    (a dummy row): a rank that skips a step leaves the others waiting in theirs. `even=True` spares you that, and
    `whole_step=True` as long as there are as many samples as ranks.

    An error of the service on one rank is raised on all. A rank that is left by an exception of the trainer does not
    tell the others; whatever started them ends them (torchrun does). The step in hand is given back by rank 0 as it
    leaves; if rank 0 was killed, when the lease runs out.

    With a `DataLoader`: `DataLoader(dataset, batch_size=None)`, without workers. A worker asks for steps ahead of the
    trainer, and asking acks, so this dataset refuses to run in one. Anything else that looks an element ahead is as
    wrong and cannot be seen from here (`accelerate.prepare` of the loader does).

    It may be iterated again when the iterator before has ended: that goes on with what the service has then. Raises
    ValueError for arguments that contradict each other, RuntimeError in a worker and while another iterator is open,
    and the errors of `trainer_client.errors`, `Halted` among them. Ends when the service is exhausted.
    """

    def __init__(
        self,
        url: str | RolloutClient,
        groups_per_step: int,
        *,
        api_key: str | None = None,
        collate: Callable[[list[Group]], Any] | None = None,
        min_groups: int | None = None,
        whole_step: bool = False,
        even: bool = False,
        rank: int | None = None,
        world: int | None = None,
        barrier: Callable[[], object] | None = None,
        process_group: Any = None,
        run_id: str | None = None,
        wait_s: int = 30,
        lease_s: int = 600,
        consumer: str | None = None,
        depth: int = 1,
    ) -> None:
        if (rank is None) != (world is None) or (rank is not None and world is not None and not 0 <= rank < world):
            raise ValueError(f"rank and world are given together, rank from 0 to world - 1, not {rank} and {world}")
        if barrier is not None and run_id is None:
            raise ValueError("with a barrier all ranks have to be given the same run_id, new at every start")
        if isinstance(url, RolloutClient) and api_key is not None:
            raise ValueError("a RolloutClient has its own api_key")
        self._url, self._collate, self._whole, self._even = url, collate, whole_step, even
        self._api_key = api_key
        self._ask: dict[str, Any] = {
            "max_groups": groups_per_step,
            "min_groups": groups_per_step if min_groups is None else min_groups,
            "wait_s": wait_s,
            "lease_s": lease_s,
            "consumer": consumer,
        }
        self._rank, self._world, self._barrier, self._process_group = rank, world, barrier, process_group
        self._run_id, self._depth = run_id, depth
        self._steps = 0
        """Request ids used; goes on over iterations, for a run id that was given must not make the same again."""
        self._open = False
        self._ack: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise RuntimeError(
                "RolloutDataset in a DataLoader worker would ack steps before they are trained: "
                "use DataLoader(dataset, batch_size=None, num_workers=0); one rank prefetches anyway"
            )
        self._check_free()
        return self._elements(find_ranks(self._rank, self._world, self._barrier, self._process_group))

    def ack(self) -> None:
        """Ack the step in hand now, rather than when the next is asked for: before a `break` after it was trained, and
        before `create_checkpoint`. Every rank has to call it. No step in hand: no effect."""
        if self._ack is not None:
            self._ack()

    def _elements(self, ranks: Ranks) -> Iterator[Any]:
        self._check_free()  # again: two iterators may have been made before either ran
        self._open = True
        try:
            with self._connected() as client:
                steps = self._alone(client) if ranks.processes == 1 else self._together(client, ranks)
                with contextlib.closing(steps):
                    for lease in steps:
                        groups = list(lease.groups) if self._whole else shard(lease, ranks.rank, ranks.world)
                        yield groups if self._collate is None else self._collate(groups)
        finally:
            self._open, self._ack = False, None

    def _check_free(self) -> None:
        if self._open:
            raise RuntimeError("this RolloutDataset is being iterated already: end that loop first")

    def _connected(self) -> contextlib.AbstractContextManager[RolloutClient]:
        """A client that ends with the iteration, or the trainer's own, which does not."""
        if isinstance(self._url, RolloutClient):
            return contextlib.nullcontext(self._url)
        return RolloutClient(self._url, api_key=self._api_key)

    def _alone(self, client: RolloutClient) -> Generator[Lease, None, None]:
        with client.prefetch(**self._ask, depth=self._depth) as leases:
            for lease in leases:
                self._ack = lambda lease=lease: client._run(client._core.finish(lease))
                yield lease

    def _together(self, client: RolloutClient, ranks: Ranks) -> Generator[Lease, None, None]:
        even = self._even and not self._whole
        if not self._whole and self._ask["max_groups"] < ranks.world:
            raise ValueError(f"{self._ask['max_groups']} groups a step are fewer than the {ranks.world} ranks")
        ask = self._ask | ({"min_groups": max(self._ask["min_groups"], ranks.world)} if even else {})
        run_id = ranks.first(self._run_id or uuid.uuid4().hex)
        shared = SharedLeases(client, ranks, ask, even=even)
        self._ack = shared.ack
        try:
            while True:
                self._steps += 1
                lease = shared.take(f"{run_id}-{self._steps}")
                if lease is None:
                    return
                yield lease
        finally:
            shared.close()
