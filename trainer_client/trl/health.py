"""Why TRL's queue stays empty, in words a person can act on.

What always holds: a service that was restarted within its time is no failure, and neither is a paused one; whatever is
raised says what is wrong and what to do. The feeder publishes its condition as one frozen value, replaced whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainer_client.client import RolloutClient
from trainer_client.errors import ClientError, Halted, ServiceUnreachable
from trainer_client.types import Status

logger = logging.getLogger("trainer_client")

SAY_PAUSED_EVERY_S = 60.0


class NoProgress(ClientError):
    """Nothing was delivered, and nothing changed at the service, for too long."""


class Exhausted(ClientError):
    """No more prompts will come and every row of theirs is used, but the trainer wants more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """How the feeder is."""

    trouble: ClientError | None = None
    """The last lease call failed in a way that passes; it goes on trying."""
    since: float = 0.0
    """Monotonic: when the first of these calls in a row failed."""
    halted: Halted | None = None
    """The last lease call was refused with this."""
    exhausted: bool = False
    fatal: Exception | None = None
    """It gave up over this."""


@dataclass(kw_only=True, slots=True)
class Watch:
    """What `check_health` remembers between its calls; the trainer's thread only."""

    client: RolloutClient
    """With little patience: the trainer's thread must not be held up."""
    url: str
    unreachable_after_s: float
    clock: Callable[[], float]
    _seen: Any = None
    _changed_at: float = 0.0
    _said_paused_at: float | None = field(default=None)

    def check(self, condition: Condition, *, delivered: int, spent: int, stale_after_s: float) -> None:
        """Raise if no rows will come any more.

        `delivered`: rows put so far; `spent`: groups not acked yet of which every row is TRL's.
        """
        if condition.fatal is not None:
            if isinstance(condition.fatal, ClientError):
                raise condition.fatal
            raise RuntimeError(
                f"the rollout worker's thread ended: {type(condition.fatal).__name__}: {condition.fatal}"
            ) from condition.fatal
        if condition.halted is not None:
            raise condition.halted
        now = self.clock()
        if condition.trouble is not None:
            silent_s = now - condition.since
            if silent_s > self.unreachable_after_s:
                raise ServiceUnreachable(
                    f"the rollout-service at {self.url} has been of no use for {silent_s:.0f} s; start it again and "
                    f"resume from a checkpoint. Last: {condition.trouble}"
                ) from condition.trouble
            logger.warning("waiting for the rollout-service (%.0f s so far): %s", silent_s, condition.trouble)
            self._changed_at = now
            return
        if condition.exhausted:
            raise self._exhausted()
        try:
            status = self.client.status()
        except ClientError as error:  # the feeder keeps count of how long this lasts
            logger.warning("the rollout-service's status could not be read: %s", error)
            return
        self._look_at(status, now, delivered=delivered, spent=spent, stale_after_s=stale_after_s)

    def _look_at(self, status: Status, now: float, *, delivered: int, spent: int, stale_after_s: float) -> None:
        leased = status.groups.get("leased", 0)
        if status.final and status.outstanding == leased == spent:
            raise self._exhausted()  # the service cannot say so itself before these are acked
        if status.paused:
            if self._said_paused_at is None or now - self._said_paused_at >= SAY_PAUSED_EVERY_S:
                logger.warning("the rollout-service at %s is paused; POST /resume goes on", self.url)
                self._said_paused_at = now
            self._changed_at = now
            return
        self._said_paused_at = None
        seen = (delivered, status.policy_version, status.submitted, status.slots.used, status.groups)
        if seen != self._seen:
            self._seen, self._changed_at = seen, now
        elif now - self._changed_at > stale_after_s:
            raise NoProgress(
                f"nothing was delivered and nothing changed at the rollout-service at {self.url} for "
                f"{now - self._changed_at:.0f} s: {describe(status)}. Where a rollout may take that long, raise "
                "heartbeat_stale_after_s"
            )

    def _exhausted(self) -> Exhausted:
        return Exhausted(
            f"the rollout-service at {self.url} has no more prompts and every row was used, but the trainer wants "
            "more: set prompts.epochs = 0 in the service's configuration (for ever), or fewer max_steps (TRL fetches "
            "one micro-batch more than it trains)"
        )


def describe(status: Status) -> str:
    """What stands in the way, as far as the service knows."""
    groups = ", ".join(f"{state} {count}" for state, count in status.groups.items() if count) or "none"
    parts = [f"groups: {groups}", f"slots: {status.slots.used} of {status.slots.total} used"]
    if status.halted is not None:
        parts.insert(0, f"halted: {status.halted.reason} {status.halted.error or ''}".rstrip())
    if status.blocked:
        parts.insert(0, f"blocked by {status.blocked}")
    if status.blocked == "pace":
        parts.append(
            "TRL fetches one micro-batch beyond its step, so (max_staleness + 1) * groups_per_step must cover two"
        )
    parts += [_engine(engine) for engine in status.engines]
    return "; ".join(parts)


def _engine(engine: dict[str, Any]) -> str:
    told = {name: value for name, value in engine.items() if value is not None and name not in ("id", "url")}
    facts = ", ".join(f"{name} {value}" for name, value in told.items() if isinstance(value, str | bool | int | float))
    return f"engine {engine.get('url') or engine.get('id')}: {facts}"
