"""What the routes need of the rest, as narrow as they use it. Fakes of these make a whole API in memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, cast

from fastapi import Depends, Request

from rollout_service.api.access import Access
from rollout_service.api.body import Bodies
from rollout_service.api.viewers import Viewers
from rollout_service.core.changes import Bumped
from rollout_service.core.group import Checkpoint, Group, Lease
from rollout_service.core.model import GroupState, WeightUpdate
from rollout_service.metrics import Metrics
from rollout_service.observers import History
from rollout_service.orchestrator import Rewound
from rollout_service.orchestrator.views import GroupView, LeaseAnswer, LeaseRequest, StatusView, Submission
from rollout_service.settings import Settings
from rollout_service.settings.tables import Inflight


class Orchestrator(Protocol):
    """The one writer. Every method raises errors of `rollout_service.errors`."""

    @property
    def version(self) -> int:
        """The current policy version."""

    async def post_version(self, version: int, *, reset: bool = False) -> Bumped: ...

    async def submit(self, submissions: Sequence[Submission], *, final: bool | None = None) -> list[tuple[str, str]]:
        """(group_id, prompt_id) in the order of `submissions`."""

    async def lease(self, request: LeaseRequest, hung_up: Awaitable[None] | None = None) -> LeaseAnswer:
        """Raises HungUp where `hung_up` completes first."""

    async def abandon(self, lease: Lease) -> None:
        """The caller has gone: groups of a lease without `request_id` are released at once."""

    async def ack(self, lease_id: str, group_ids: Sequence[str] | None) -> list[str]: ...

    async def release(self, lease_id: str, group_ids: Sequence[str] | None) -> list[str]: ...

    async def renew(self, lease_id: str, lease_s: int | None) -> Lease: ...

    async def cancel(self, group_id: str) -> Group: ...

    async def group(self, group_id: str) -> GroupView: ...

    async def groups(self, states: Collection[GroupState], *, after: int, limit: int) -> Sequence[Group]: ...

    async def mark(self, name: str) -> Checkpoint: ...

    async def checkpoints(self) -> Sequence[Checkpoint]:
        """Oldest first."""

    async def forget(self, name: str) -> None: ...

    async def rewind(self, name: str) -> Rewound: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def refresh(self) -> None:
        """Bring `status` up to date with what other replicas did, as far as the store answers."""

    def status(self) -> StatusView:
        """One consistent look."""


class Updates(Protocol):
    """Posts versions whose weights the engines have yet to load."""

    async def post(self, update: WeightUpdate, *, reset: bool = False) -> tuple[Bumped, list[str]]: ...


class Fleet(Protocol):
    """The engines."""

    async def token_texts(self, ids: Collection[int]) -> Mapping[int, str]:
        """Id → text, as far as an engine can tell."""

    def describe(self) -> list[dict[str, Any]]: ...

    def healthy_capacity(self) -> int: ...


class EngineCalls(Protocol):
    """How engines come and go."""

    async def add_engine(self, url: str, max_inflight: Inflight | None = None) -> tuple[dict[str, Any], bool]:
        """Its description, and whether it is new."""

    async def remove_engine(self, id: str, *, drain_s: float) -> dict[str, Any]:
        """Its last description, when it is gone."""


class ThreadCounts(Protocol):
    """Threads of programs and tools."""

    @property
    def total(self) -> int: ...

    @property
    def busy(self) -> int: ...

    @property
    def stuck(self) -> int: ...

    @property
    def waiting(self) -> int: ...


def no_threads() -> ThreadCounts | None:
    """Where nothing runs in threads."""
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Everything a route may use."""

    settings: Settings
    orchestrator: Orchestrator
    updates: Updates
    fleet: Fleet
    engine_calls: EngineCalls
    metrics: Metrics
    access: Access
    history: History
    viewers: Viewers = field(default_factory=Viewers)
    bodies: Bodies = field(default_factory=Bodies)
    threads: Callable[[], ThreadCounts | None] = no_threads


def _context(request: Request) -> Context:
    return cast(Context, request.app.state.context)


Ctx = Annotated[Context, Depends(_context)]
"""A route's parameter of this type gets the application's Context."""
