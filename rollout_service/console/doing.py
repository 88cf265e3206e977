"""What a run is doing, in one sentence. Pure.

What always holds: the worst thing that is true is the one that is said: a halt before a broken store, that before an
end, a pause, missing engines and full queues; only a run that is none of these is said to generate or to wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollout_service.console.shapes import Halt, Rates, Status
from rollout_service.console.text import count, many, plain, rate, since


class Level(StrEnum):
    """How much a sentence concerns who reads it."""

    GOOD = "good"
    """The run goes on, or has ended as it should."""
    WAITING = "waiting"
    """It waits for somebody, as it was told to."""
    TROUBLE = "trouble"
    """It does not go on before somebody does something, or something comes back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Doing:
    """One sentence, and lines of what more there is to know and to do. Texts of others in it are already plain."""

    level: Level
    text: str
    more: tuple[str, ...] = ()


_BLOCKED = {
    "wait_for_version": "the trainer's first sync: no group is opened before dispatch.wait_for_version is posted",
    "max_ready_groups": "the trainer: groups.max_ready_groups are scored or being scored, and nobody leases them",
    "max_ready_bytes": "the trainer: groups.max_ready_bytes of scored groups are held, and nobody leases them",
    "pace": "the trainer: as many groups are open as it can take in time (dispatch.admission is pace)",
}


def doing(status: Status, *, at: str = "", rates: Rates | None = None) -> Doing:
    """`at`: the service's own time of `status`."""
    return _trouble(status, at) or _standing_still(status) or _moving(status, rates)


def not_ready(status: Status) -> str | None:
    """Why `/readyz` answers 503 for this status; None where it does not."""
    if status.halted is not None:
        return f"halted ({plain(status.halted.reason)})"
    if not status.store.ok:
        return "the store cannot commit"
    if status.healthy == 0:
        return "no healthy engine"
    return None


def _trouble(status: Status, at: str) -> Doing | None:
    if status.halted is not None:
        return _halted(status, status.halted, at)
    if not status.store.ok:
        why = plain(status.store.error or "no reason given")
        return Doing(
            level=Level.TROUBLE,
            text=f"The store cannot commit, so nothing is dispatched or accepted: {why}",
            more=("It goes on by itself once the store can commit: make room, or bring it back.",),
        )
    return None


def _halted(status: Status, halt: Halt, at: str) -> Doing:
    ago = since(halt.since, at)
    group = plain(halt.group_id or "", 64)
    more = [f"{name}: {plain(value)}" for name, value in (("group", halt.group_id), ("engine", halt.engine)) if value]
    if halt.error:
        more.append(f"error: {plain(halt.error)}")
    look = f" (rollout-service groups {group} shows its rollouts)" if group else ""
    more.append(f"What to do: mend what the error names{look}, then POST /resume; the service need not restart.")
    return Doing(
        level=Level.TROUBLE,
        text=f"HALTED{f' {ago} ago' if ago else ''}: {plain(halt.reason)}; nothing new is dispatched.",
        more=tuple(more),
    )


def _standing_still(status: Status) -> Doing | None:
    used = status.slots.used
    going_on = f"what is in flight goes on ({many(used, 'rollout')})" if used else "nothing is in flight"
    if status.exhausted:
        return Doing(level=Level.GOOD, text="Exhausted: every group has ended and no more prompts will come.")
    if status.paused:
        return Doing(
            level=Level.WAITING,
            text=f"Paused: no new engine requests; {going_on}.",
            more=("POST /resume goes on.",),
        )
    if not status.engines:
        return Doing(level=Level.TROUBLE, text="There is no engine: add one with POST /engines or [[engines]].")
    if status.healthy == 0:
        wrong = [f"{plain(engine.url, 120)}: {plain(engine.error or 'unhealthy')}" for engine in status.engines]
        more = (*wrong[:3], *([f"and {len(wrong) - 3} more"] if len(wrong) > 3 else []))
        return Doing(level=Level.TROUBLE, text="No healthy engine: rollouts wait for one to come back.", more=more)
    return None


def _moving(status: Status, rates: Rates | None) -> Doing:
    used, ready = status.slots.used, status.count("ready")
    blocked = None if status.blocked is None else _BLOCKED.get(status.blocked, plain(status.blocked))
    if used:
        speed = f", {rate(rates.rollouts_per_s)} rollouts/s" if rates and rates.rollouts_per_s is not None else ""
        text = f"Generating: {count(used)} of {count(status.slots.total)} slots busy{speed}"
        text += f"; opens no new group, waiting for {blocked}." if blocked else "."
        return Doing(level=Level.GOOD, text=text)
    if blocked is not None:
        return Doing(level=Level.WAITING, text=f"Waiting for {blocked}.")
    if scoring := status.count("scoring"):
        return Doing(level=Level.GOOD, text=f"Scoring {many(scoring, 'group')}.")
    if pending := status.count("pending"):
        return Doing(level=Level.GOOD, text=f"About to dispatch: {many(pending, 'pending group')}.")
    if ready:
        return Doing(level=Level.WAITING, text=f"Waiting for the trainer to lease {many(ready, 'ready group')}.")
    if leased := status.count("leased"):
        return Doing(level=Level.WAITING, text=f"Waiting for the trainer to ack {many(leased, 'leased group')}.")
    return Doing(level=Level.WAITING, text="Waiting for prompts: nothing is outstanding.")
