"""What the orchestrator asks of a store.

Every implementation holds: a batch is all or nothing and durable when `commit` returns; batches and reads take effect
in the order they were called, so that a read sees every commit asked for before it; nothing runs on the event loop but
waiting. A commit that failed changed nothing; the caller reloads with `load`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from rollout_service.core.group import Group, Lease
from rollout_service.core.model import GroupState, Prompt
from rollout_service.core.records import Batch, GroupPayload, Snapshot, StoredPrompt


class Store(Protocol):
    """Raises StoreUnavailable where the medium fails, ConfigError from `open` where this store may not be used."""

    async def open(self) -> None:
        """Make or migrate the schema; refuse a store that is in use, corrupt, or written by a newer version."""

    async def close(self) -> None:
        """Finish what was asked for and let go; safe to call twice."""

    async def load(self) -> Snapshot:
        """What a start needs."""

    async def commit(self, batch: Batch) -> None:
        """Make `batch` durable, all of it or nothing.

        A lease in it may only take groups whose staleness is within `max_staleness` of the policy version this very
        transaction leaves behind (design 3.1.5), and only groups no other live lease holds; else StoreUnavailable.
        """

    async def find_prompts(self, keys: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], StoredPrompt]:
        """Known identities among (prompt_id, epoch) `keys`."""

    async def groups(self, seqs: Collection[int]) -> Mapping[int, Group]:
        """Standing of the groups that exist among `seqs`, ended ones included."""

    async def payloads(self, seqs: Sequence[int]) -> Sequence[GroupPayload]:
        """Everything of the groups that exist among `seqs`, in that order."""

    async def prompts(self, seqs: Sequence[int]) -> Mapping[int, Prompt]:
        """Prompts of the groups among `seqs` that still have theirs."""

    async def list_groups(self, states: Collection[GroupState], *, after: int, limit: int) -> Sequence[Group]:
        """Groups in `states` (empty: any) with seq > `after`, ascending."""

    async def lease(self, lease_id: str) -> Lease | None:
        """A lease, ended ones included."""

    async def lease_by_request(self, request_id: str) -> Lease | None:
        """The newest lease made for `request_id`."""

    async def ended_since(self, ends: int) -> Sequence[int]:
        """Seqs of the groups whose end number is above `ends`, in the order they ended."""
