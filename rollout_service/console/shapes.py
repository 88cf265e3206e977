"""The service's answers as the terminal reads them.

What always holds: members that are not here are ignored and those of later versions may be missing, so that a console
of one version reads a service of another; what cannot be missing is what tells a rollout-service from anything else.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Shape(Struct, frozen=True, kw_only=True):
    """One object of an answer."""


class Slots(Shape, frozen=True, kw_only=True):
    total: int
    used: int


class Halt(Shape, frozen=True, kw_only=True):
    reason: str
    error: str = ""
    group_id: str | None = None
    engine: str | None = None
    since: str = ""


class Oldest(Shape, frozen=True, kw_only=True):
    group_id: str
    state: str = ""
    age_s: float = 0.0


class Store(Shape, frozen=True, kw_only=True):
    ok: bool = True
    error: str | None = None


class Leases(Shape, frozen=True, kw_only=True):
    live: int = 0
    waiting_calls: int = 0


class Threads(Shape, frozen=True, kw_only=True):
    total: int = 0
    busy: int = 0
    waiting: int = 0
    stuck: int = 0


class Engine(Shape, frozen=True, kw_only=True):
    url: str
    id: str = ""
    healthy: bool = False
    doubtful: bool = False
    in_flight: int = 0
    max_inflight: int = 0
    model: str | None = None
    weight_version: Any = None
    behind: bool = False
    leaving: bool = False
    error: str | None = None


class Engines(Shape, frozen=True, kw_only=True):
    """`GET /engines`."""

    engines: tuple[Engine, ...]


class Status(Shape, frozen=True, kw_only=True):
    """`GET /status`."""

    policy_version: int
    groups: dict[str, int]
    slots: Slots
    engines: tuple[Engine, ...]
    max_staleness: int = 0
    submitted: int = 0
    outstanding: int = 0
    paused: bool = False
    halted: Halt | None = None
    blocked: str | None = None
    final: bool = False
    read_position: int = 0
    oldest_outstanding: Oldest | None = None
    leases: Leases = Leases()
    store: Store = Store()
    threads: Threads | None = None

    def count(self, state: str) -> int:
        return self.groups.get(state, 0)

    @property
    def healthy(self) -> int:
        """Engines that may be given work."""
        return sum(engine.healthy for engine in self.engines)

    @property
    def exhausted(self) -> bool:
        """No more prompts will come and nothing is outstanding."""
        return self.final and self.outstanding == 0


class Rates(Shape, frozen=True, kw_only=True):
    """Per second, over the last `window_s` seconds."""

    window_s: float | None = None
    rollouts_per_s: float | None = None
    tokens_per_s: float | None = None
    groups_per_s: float | None = None


class Totals(Shape, frozen=True, kw_only=True):
    """Since the service's process began."""

    rollouts_finished: int = 0
    rollouts_failed: dict[str, int] = {}
    groups_delivered: int = 0
    tokens_generated: int = 0
    tokens_delivered: int = 0
    tokens_wasted: dict[str, int] = {}
    aborts: int = 0
    halts: int = 0


class StalenessCount(Shape, frozen=True, kw_only=True):
    staleness: int
    groups: int


class RewardPoint(Shape, frozen=True, kw_only=True):
    policy_version: int
    mean: float | None = None
    groups: int = 0


class Event(Shape, frozen=True, kw_only=True):
    at: str
    kind: str
    text: str = ""
    group_id: str | None = None
    engine: str | None = None


class Live(Shape, frozen=True, kw_only=True):
    """One line of `GET /events`; `GET /live`."""

    at: str
    status: Status
    version: str = ""
    mode: str = ""
    rates: Rates | None = None
    totals: Totals = Totals()
    staleness: tuple[StalenessCount, ...] = ()
    rewards: tuple[RewardPoint, ...] = ()
    recent: tuple[Event, ...] = ()


class GroupRow(Shape, frozen=True, kw_only=True):
    """One group of `GET /groups`."""

    group_id: str
    state: str
    prompt_id: str = ""
    epoch: int = 0
    reason: str | None = None
    attempt: int = 1
    num_generations: int = 0
    policy_version: int | None = None
    staleness: int | None = None
    error: str | None = None
    engine: str | None = None
    age_s: float = 0.0
    state_age_s: float = 0.0


class GroupPage(Shape, frozen=True, kw_only=True):
    """`GET /groups`."""

    groups: tuple[GroupRow, ...]
    next: str | None = None


class RolloutRow(Shape, frozen=True, kw_only=True):
    """One rollout of `GET /groups/{group_id}`."""

    index: int
    state: str
    in_flight_s: float | None = None
    finish_reason: str | None = None
    tokens: int | None = None
    text: str | None = None
    error: str | None = None
    reason: str | None = None
    engine: str | None = None
    attempts: int | None = None
    reward: float | None = None
    advantage: float | None = None


class GroupDetail(GroupRow, frozen=True, kw_only=True):
    """`GET /groups/{group_id}`."""

    rollouts: tuple[RolloutRow, ...] = ()
    reward_errors: dict[str, str] = {}
    prompt: Any = None
