"""What one reward said of one group: its values, or why there are none. One judgement for every kind of reward.

Values that leave this module are finite floats or None, exactly one a survivor; nothing is padded or broadcast.
"""

from __future__ import annotations

import concurrent.futures
import math
import traceback
from collections.abc import Iterable, Sized
from itertools import islice
from typing import Any

from msgspec import Struct

from rollout_service.loading import clean

MAX_TRACEBACK = 16_000
"""Characters kept of a traceback's end: for people, and bounded."""


class Outcome(Struct, frozen=True, array_like=True, tag="outcome"):
    """At most one of `values`, `error`, `cancelled` is set."""

    values: list[float | None] | None = None
    """One a survivor; None in it: not scored by this reward."""
    error: str | None = None
    """Why this reward scored nobody."""
    traceback: str | None = None
    """Of `error` or `cancelled`, where user code raised."""
    cancelled: str | None = None
    """User code raised a cancellation: the group is to be dropped."""


class BadValues(Exception):
    """A reward returned something that is not one value a survivor."""


def timed_out(timeout_s: float) -> Outcome:
    return Outcome(error=f"timed out after {timeout_s:g} s")


def outcome_of_values(values: object, n: int) -> Outcome:
    """What a function returned for n survivors, judged. Raises whatever the objects in it raise."""
    try:
        return Outcome(values=_rewards(values, n))
    except BadValues as error:
        return Outcome(error=clean(str(error)))


def outcome_of_error(error: BaseException) -> Outcome:
    """What user code raised, judged. Its first frame, which is ours, is left out of the traceback."""
    frames = error.__traceback__
    lines = traceback.format_exception(type(error), error, frames.tb_next if frames else None)
    text = clean("".join(lines)[-MAX_TRACEBACK:], MAX_TRACEBACK)
    message = clean(traceback.format_exception_only(error)[-1].strip())
    # asyncio.CancelledError and KeyboardInterrupt are no Exceptions; the futures' own cancellation is one. A SystemExit
    # is no cancellation but a program that gave up: it costs this function, as any exception does.
    if not isinstance(error, Exception | SystemExit) or isinstance(error, concurrent.futures.CancelledError):
        return Outcome(cancelled=message, traceback=text)
    return Outcome(error=message, traceback=text)


def _rewards(values: Any, n: int) -> list[float | None]:
    if hasattr(values, "tolist"):  # numpy and torch: one call instead of one conversion a row
        values = values.tolist()
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | dict | set | frozenset):
        raise BadValues(f"returned {_kind(values)} instead of a list of {n} rewards")
    rows = list(islice(values, n + 1))  # an endless generator must not fill the memory
    if len(rows) != n:
        count = len(values) if isinstance(values, Sized) else f"{len(rows)}{' or more' if len(rows) > n else ''}"
        raise BadValues(f"returned {count} rewards for {n} completions")
    return [_reward(row, value) for row, value in enumerate(rows)]


def _reward(row: int, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise BadValues(f"returned {_kind(value)} for row {row} instead of a number or None")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadValues(f"returned {_kind(value)} for row {row} that is no number: {error}") from error
    return number if math.isfinite(number) else None


def _kind(value: object) -> str:
    if value is None:
        return "None"
    return f"a value of type {type(value).__name__}"
