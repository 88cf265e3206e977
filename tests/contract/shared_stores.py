"""What tests of shared stores do with them, and how they look at what is there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from rollout_service.core.model import GroupState, prompt_size
from rollout_service.core.records import Batch
from rollout_service.core.shared import Claimed, Overview, Replica
from rollout_service.store.shared import SharedStore, Transaction
from tests.contract.store_samples import prompt

S = GroupState
T = TypeVar("T")
WAIT_S = 20.0

Handles = Callable[[], Awaitable[SharedStore]]
"""Opens one more replica's store on the same content."""


class Undo(Exception):
    """Raised by work that wants its transaction undone."""


async def write(store: SharedStore, batch: Batch, *, owner: str | None = None) -> Mapping[int, int]:
    """Commits `batch`; its run, where it has one, by `set_run`."""

    async def work(transaction: Transaction) -> Mapping[int, int]:
        if batch.run is not None:
            await transaction.hold_run()
            await transaction.set_run(replace(transaction.run, run=batch.run))
        return await transaction.write(batch, owner=owner)

    return await store.transact(work)


async def ask(store: SharedStore, question: Callable[[Transaction], Awaitable[T]]) -> T:
    return await store.transact(question)


async def claimed(store: SharedStore, *seqs: int) -> Mapping[int, Claimed]:
    return await ask(store, lambda transaction: transaction.groups(seqs))


async def claimable(store: SharedStore, limit: int, *, pending: bool = True) -> list[int]:
    found = await ask(store, lambda transaction: transaction.claimable(limit, pending=pending))
    return [each.group.seq for each in found]


async def a_while(transaction: Transaction) -> None:
    """Some statements of this transaction: others that run at the same time reach the store meanwhile, if they can."""
    for _ in range(3):
        await transaction.claims_of("nobody")


def replica(replica_id: str, **changed: Any) -> Replica:
    return replace(Replica(replica_id=replica_id, name=f"host-{replica_id}", service="1.0", rules="r1"), **changed)


async def assert_counted(store: SharedStore) -> Overview:
    """The counters are those of the groups."""
    seen = await store.overview()
    groups = await store.list_groups(set(), after=0, limit=10_000)
    states = [group.state for group in groups]
    assert dict(seen.whole.counts) == {state: states.count(state) for state in S}
    ended = {state: count for state in S if state.terminal and (count := states.count(state))}
    assert {state: count for state, count in seen.run.run.ended.items() if count} == ended
    held = [group.payload_bytes for group in groups if group.state in (S.SCORING, S.READY)]
    assert seen.whole.held_bytes == sum(held)
    outstanding = [group.seq for group in groups if not group.state.terminal]
    assert seen.whole.prompt_bytes == sum(prompt_size(prompt(seq)) for seq in outstanding)
    return seen
