"""What replicas ask of a store they share: transactions over a part of the run, claims, heartbeats, signals.

What always holds: what a transaction returned from is durable, and nothing of one that raised happened, unless it
raised StoreUnavailable while its commit was on the way, when it may have; times are the store's own; a group is owned
by at most one replica; counters are changed by the same transaction as the groups they count.

Locks are taken in this order, so that transactions wait for each other and hardly ever in a circle: the run (shared
with other transactions, or `alone`; before it a name that excludes), a lease, groups by rising number (those taken by
passing over what is locked come in their own order, and nobody waits for them), the run's row (`hold_run`), then what
is written. A circle all the same is found by the database, and one of the transactions begins again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Protocol, TypeVar

from rollout_service.core.group import Checkpoint, Group, Lease
from rollout_service.core.model import Prompt
from rollout_service.core.records import Batch, GroupPayload, StoredPrompt
from rollout_service.core.shared import Claimed, EngineWish, Overview, Replica, SharedRun, Whole
from rollout_service.store.protocol import Store

P = TypeVar("P")
T = TypeVar("T")


class Signal(StrEnum):
    """What replicas tell each other through the store. A hint to look, never the only way to learn of it."""

    RUN = "run"
    """The run's revision rose."""
    PENDING = "pending"
    """There may be groups to claim."""
    READY = "ready"
    """There may be something to lease, or the run may be at its end."""
    ENFORCED = "enforced"
    """A replica has carried out a revision."""
    ENGINES = "engines"
    """An operator asked for something at an engine."""


class Transaction(Protocol):
    """One transaction; to be used inside the function given to `SharedStore.transact` only.

    Groups that are read are locked until it ends, unless said otherwise, and have their rows as `Snapshot` has them.
    """

    @property
    def now(self) -> float:
        """Unix seconds by the store's clock, read after the run was locked."""

    @property
    def run(self) -> SharedRun:
        """Read after the run was locked; brought up to date by `hold_run` and `set_run`."""

    @property
    def whole(self) -> Whole:
        """As `run`. Other transactions that hold no lock of ours may change it meanwhile."""

    async def hold_run(self) -> None:
        """Lock the run's row, and read `run` and `whole` anew. Needed before `set_run`, but where alone."""

    async def set_run(self, run: SharedRun) -> None:
        """Write the run's row, but `ended` and `ends`."""

    async def groups(self, seqs: Collection[int]) -> Mapping[int, Claimed]:
        """Those that exist, ended ones included. Waits for whoever has them locked."""

    async def claims(self, seqs: Collection[int]) -> Mapping[int, tuple[str | None, int]]:
        """(owner, claim) of those that exist, locked; reads nothing else."""

    async def claims_of(self, replica_id: str) -> Mapping[int, int]:
        """Seq -> claim of every group the replica owns. Locks nothing."""

    async def claimable(self, limit: int, *, pending: bool) -> Sequence[Claimed]:
        """Groups nobody works on, at most `limit`, passing over those that are locked (SKIP LOCKED): first opened ones
        whose owner is gone (generating, scoring), then, if `pending`, pending ones: those of a later attempt before
        the others, each by number."""

    async def claimable_to_score(self, limit: int) -> Sequence[Claimed]:
        """As `claimable`, those in scoring alone."""

    async def ready(self, limit: int, *, oldest: int) -> Sequence[Group]:
        """Ready groups of version `oldest` or newer, passing over those that are locked; by version, then number."""

    async def outdated(self, oldest: int) -> Sequence[Group]:
        """Every ready group of a version below `oldest`, and every such opened one without an owner, by number."""

    async def opened(self) -> Sequence[Group]:
        """Every group in generating, scoring, ready, leased, by number."""

    async def lease(self, lease_id: str) -> Lease | None:
        """Locked; ended ones included."""

    async def lease_by_request(self, request_id: str) -> Lease | None:
        """Locked; ended ones included."""

    async def leases_due(self, limit: int) -> Sequence[Lease]:
        """Live leases whose time is over, passing over those that are locked."""

    async def live_leases(self) -> Sequence[Lease]:
        """All of them, locked; by creation."""

    async def checkpoints(self) -> Sequence[Checkpoint]:
        """By number. Locks nothing."""

    async def ended_since(self, ends: int) -> Sequence[int]:
        """As `Store.ended_since`. Locks nothing."""

    async def payloads(self, seqs: Sequence[int]) -> Sequence[GroupPayload]:
        """As `Store.payloads`. Locks nothing."""

    async def paced(self, *, acked: bool) -> Collection[int]:
        """Groups in leases made at the current version that these still hold, and if `acked`, that were acked."""

    async def find_prompts(self, keys: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], StoredPrompt]:
        """As `Store.find_prompts`."""

    async def prompts(self, seqs: Sequence[int]) -> Mapping[int, Prompt]:
        """As `Store.prompts`."""

    async def tokens(self, seqs: Collection[int]) -> Mapping[int, int]:
        """Output tokens of the finished rollouts of each group's current attempt; groups without one are left out."""

    async def once(self, replica_id: str, number: int) -> bool:
        """Whether the replica's batch `number` is new; False where it was committed before. Numbers only rise."""

    async def write(self, batch: Batch, *, owner: str | None = None) -> Mapping[int, int]:
        """Write everything of `batch` but `run`, with every check of `Store.commit`.

        Groups in it that are generating or scoring belong to `owner` from now on (their claim rises if they belonged to
        nobody or somebody else), others to nobody; returns the claim of each that belongs to `owner`. Ends are numbered
        by the store, in the order of `batch.groups`, whatever `end_number` says. Counters follow. A new group's
        prompt is counted by `prompt_size`. Raises StoreUnavailable where the batch breaks a rule.
        """

    def signal(self, signal: Signal) -> None:
        """Told to every replica, this one included, once the transaction is durable."""


class SharedStore(Store, Protocol):
    """A store several replicas use at the same time."""

    @property
    def pushes(self) -> bool:
        """Whether signals of other replicas arrive by themselves; else whoever wants to know must ask."""

    def watch(self, on_signal: Callable[[Signal], None]) -> None:
        """Have `on_signal` called on the event loop for every signal from now on. One watcher."""

    async def transact(
        self, work: Callable[[Transaction], Awaitable[T]], *, alone: bool = False, exclusive: str | None = None
    ) -> T:
        """Run `work` in one transaction and commit it; what it raises undoes it and is raised.

        `alone`: no other transaction runs meanwhile. `exclusive`: nor any other of that name. `work` is run again from
        the start where the database asks for it (deadlock, a unique key taken meanwhile), so it may change nothing but
        through the transaction. Raises StoreUnavailable.
        """

    async def try_exclusively(
        self,
        name: str,
        prepare: Callable[[SharedRun, Whole], Awaitable[P]],
        work: Callable[[P, Transaction], Awaitable[T]],
    ) -> T | None:
        """As `transact` with `exclusive`, but None at once where somebody else is in it. `work` returns no None.

        `prepare` runs first, alone under the name but before the run is locked, so that it may take a while (a minute
        at most, or StoreUnavailable): what it is given may have changed when `work` gets what it made.
        """

    async def overview(self) -> Overview:
        """One consistent look, locking nothing."""

    async def join(self, replica: Replica, *, lease_s: float) -> None:
        """Enter a replica. Raises ConfigError where a living one has other rules or another prompts file."""

    async def beat(self, replica: Replica, *, lease_s: float, signal: Signal | None = None) -> bool:
        """Extend the replica's claims to `lease_s` from now and keep what it says of itself; False: it was expelled."""

    async def wish(self, wish: EngineWish, *, beside: Collection[str] = (), most: int | None = None) -> EngineWish:
        """Keep it in place of an earlier one of that engine, and signal ENGINES; what is kept, with its number.

        One that says no `max_inflight` keeps that of the earlier one, where both want the engine. Raises Conflict where
        the wanted engines and those `beside` them (ids) would be more than `most`.
        """

    async def wishes(self) -> Sequence[EngineWish]:
        """One an engine, by number. Locks nothing."""

    async def remember_removal(self, number: int) -> None:
        """The engine of wish `number`, which does not want it, is named somewhere: it is as if it was asked for now."""

    async def forget_removal(self, number: int, *, after_s: float) -> None:
        """Forget wish `number`, which does not want its engine, where it was not remembered for `after_s`."""

    async def expel(self) -> Sequence[str]:
        """Take the claims of every replica whose time is over, and forget it; their names.

        Claims of one that is known no more go too: it may have claimed while it was being expelled.
        """

    async def leave(self, replica_id: str) -> None:
        """Give the replica's claims back and forget it."""
