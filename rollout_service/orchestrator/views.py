"""What the orchestrator takes from and gives to its callers (the API, the prompts file): plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rollout_service.core.changes import Counts, Halt
from rollout_service.core.group import Group, Lease
from rollout_service.core.model import Prompt
from rollout_service.core.records import GroupPayload
from rollout_service.core.shared import SeenReplica


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A prompt and the digest of its content (identity check of design 4.10)."""

    prompt: Prompt
    digest: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRequest:
    """Body of `POST /leases`."""

    max_groups: int
    min_groups: int = 1
    wait_s: float = 30
    lease_s: int = 600
    consumer: str | None = None
    request_id: str | None = None

    @property
    def parameters(self) -> tuple[int, int, int]:
        """What must be equal for a `request_id` to be the same request; ranks may differ in consumer and patience."""
        return self.max_groups, self.min_groups, self.lease_s


class LeaseStatus(StrEnum):
    """How a lease call ended."""

    OK = "ok"
    """There are groups."""
    EMPTY = "empty"
    """Nothing in time; ask again."""
    EXHAUSTED = "exhausted"
    """No more prompts will come and nothing is outstanding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseAnswer:
    """`lease` and `payloads` are there if and only if `status` is `ok`; payloads in the lease's order."""

    status: LeaseStatus
    policy_version: int
    """With a lease: the version it was made at."""
    outstanding: int
    lease: Lease | None = None
    payloads: Sequence[GroupPayload] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupView:
    """One group for people: its payload and, of rows in flight, since when."""

    payload: GroupPayload
    in_flight: Mapping[int, float]
    """Row -> seconds since its dispatch."""
    policy_version: int
    """The current one, for the staleness."""
    now: float
    """Unix seconds, for the ages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusView:
    """One consistent look at the run."""

    policy_version: int
    max_staleness: int
    counts: Counts
    slots_total: int
    slots_used: int
    paused: bool
    halt: Halt | None
    final: bool
    blocked: str | None
    """Why no new group is opened now."""
    oldest: Group | None
    store_ok: bool
    store_error: str | None
    leases: int
    waiting_lease_calls: int
    read_position: int
    now: float
    closing: bool = False
    """The service is ending."""
    other_slots_total: int = 0
    other_slots_used: int = 0
    """Of the other replicas that live; those above are this one's own."""
    replicas: tuple[SeenReplica, ...] = ()
    """Those that share the run; empty where one service has it alone."""
    store_now: float = 0.0
    """Unix seconds by the store's clock, which that of this host may differ from."""
    replica_id: str | None = None
    """Which of them answers."""
