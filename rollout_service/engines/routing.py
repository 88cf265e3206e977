"""Which engine gets the next request: one function, which decides by what it is shown and changes nothing.

What always holds: a request goes only to an engine that is open to it; back to the engine it failed at only where no
other is; to a doubtful engine (half-open) on trial only, one at a time, while another is sure. It goes home, to the
engine that has its prefix cached, as long as that one is not loaded past a bound; else to the least loaded one. Load is
the share of its limit that an engine has in use: our requests and those of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

HOME_FACTOR, SESSION_FACTOR = 1.25, 2.0
"""How much more loaded than the least loaded engine a home may be: a prompt is read again in one step, the history of a
rollout of many turns is mostly the rollout itself."""
HOME_SLACK = 16
"""Requests more than that, for small numbers: one group, which arrives at once, stays together."""
FULL_KV = 0.95
"""Share of the KV cache in use from where on vLLM soon preempts, which throws work away."""


class Load(Protocol):
    """What is known of one engine."""

    @property
    def open(self) -> bool:
        """It is healthy, stays, and has a slot free."""
        ...

    @property
    def doubtful(self) -> bool:
        """It failed last: until a request succeeds there it gets them on trial."""
        ...

    @property
    def on_trial(self) -> bool:
        """It is doubtful, nothing of ours runs there, and it is time to find out whether it works again."""
        ...

    @property
    def usable(self) -> bool:
        """It is healthy and stays, with or without a free slot."""
        ...

    @property
    def in_flight(self) -> int:
        """Our requests there."""
        ...

    @property
    def given(self) -> int:
        """Requests it was ever given: between equals the turn goes round."""
        ...

    @property
    def limit(self) -> int:
        """How many it may have, >= 1."""
        ...

    @property
    def foreign(self) -> int:
        """Requests of others there, as it last reported."""
        ...

    @property
    def pressed(self) -> bool:
        """It reports requests that wait, or a KV cache that is nearly full."""
        ...


E = TypeVar("E", bound=Load)


def choose(
    engines: Iterable[E], *, session: E | None = None, home: E | None = None, avoid: E | None = None
) -> E | None:
    """The engine of `engines` (those the request fits) for one request; None where it has to wait.

    `session` has the history of this rollout in its cache, `home` the prompt of its group; `avoid` failed it.
    """
    engines = list(engines)
    if len(engines) == 1:
        return engines[0] if engines[0].open else None
    able = takers(engines)
    if not able:
        return None
    best = min(able, key=lambda engine: (engine is avoid, engine.pressed, load(engine), engine.given))
    for one, factor in ((session, SESSION_FACTOR), (home, HOME_FACTOR)):
        if one is not None and one is not avoid and _stays(one, best, able, factor):
            return one
    return best


def takers(engines: Sequence[E]) -> list[E]:
    """Those of `engines` that may be given a request now."""
    if not any(engine.open for engine in engines):
        return []
    sure = len(engines) > 1 and any(engine.usable and not engine.doubtful for engine in engines)
    return [engine for engine in engines if engine.open and (engine.on_trial or not (sure and engine.doubtful))]


def load(engine: Load) -> float:
    """Share of its limit in use."""
    return (engine.in_flight + engine.foreign) / engine.limit


def capacity(engines: Sequence[Load]) -> int:
    """Requests that `engines` take at once: of a doubtful one what it has, and the one on trial."""
    usable = [engine for engine in engines if engine.usable]
    if all(engine.doubtful for engine in usable):
        return sum(engine.limit for engine in usable)
    return sum(engine.in_flight + engine.on_trial if engine.doubtful else engine.limit for engine in usable)


def _stays(one: E, best: E, able: Sequence[E], factor: float) -> bool:
    if not any(one is engine for engine in able) or one.doubtful or (one.pressed and not best.pressed):
        return False
    return load(one) <= factor * load(best) + HOME_SLACK / one.limit
