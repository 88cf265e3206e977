"""What the calls of every resource have: the store, the rules, what is known of the run, who is told."""

from __future__ import annotations

import asyncio

from rollout_service.core.group import group_seq
from rollout_service.errors import NotFound, ShuttingDown
from rollout_service.orchestrator.parts import Observer
from rollout_service.orchestrator.workshop import Rules
from rollout_service.replicas.resident import Resident
from rollout_service.replicas.serving import Serving
from rollout_service.replicas.watch import Watch
from rollout_service.store.shared import SharedStore


class Calls:
    """Base of the calls of one resource. All methods belong to the event loop that runs the replica."""

    _serving: Serving
    watch: Watch

    def __init__(self, store: SharedStore, rules: Rules, observer: Observer, resident: Resident) -> None:
        self._store, self._rules, self._policy, self._observer = store, rules, rules.policy, observer
        self._resident = resident
        self._closing = False
        self._unwanted: dict[str, float] = {}
        """Leases to be given back when the store answers -> time of the event loop from which one that is not there was
        never made."""
        self._giving: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """The policy version this replica knows of; a call that decides by it asks the store."""
        return self._resident.known.run.policy_version

    @property
    def version_returns(self) -> int:
        """How often the version was lowered: the same number then stands for other weights."""
        return self._resident.known.returns

    def _require_open(self) -> None:
        if self._closing:
            raise ShuttingDown("the service is ending; ask again after its restart")

    def _seq(self, public_id: str) -> int:
        seq = group_seq(public_id)
        if seq is None:
            raise NotFound(f"there is no group {public_id!r}")
        return seq
