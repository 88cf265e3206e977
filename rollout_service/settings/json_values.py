"""What passes here can be stored, sent and delivered as strict JSON in UTF-8, and read back equal.

So: finite numbers, integers of at most 64 bits, valid Unicode, text keys, a bounded depth. Nothing is converted.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

MAX_DEPTH = 64
"""Levels of nesting; real rows have fewer than ten, and recursive readers elsewhere stop near a thousand."""

_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1


def valid_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8 (it holds no lone surrogate)."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_json(value: Any, depth: int = 0) -> bool:
    """Whether `json_problem` has nothing to say, in a third of its time: datasets have millions of values."""
    kind = type(value)
    if kind is str:
        return value.isascii() or valid_unicode(value)
    if kind is dict:
        if depth >= MAX_DEPTH:
            return False
        for key, item in value.items():
            if type(key) is not str or not (key.isascii() or valid_unicode(key)):
                return False
            # Most values are short texts; a call for each would be most of the cost.
            if not (item.isascii() or valid_unicode(item)) if type(item) is str else not is_json(item, depth + 1):
                return False
        return True
    if kind is list:
        if depth >= MAX_DEPTH:
            return False
        for item in value:  # noqa: SIM110 - all() with a generator takes twice as long here
            if not is_json(item, depth + 1):
                return False
        return True
    if kind is int:
        return bool(_INT_MIN <= value <= _INT_MAX)
    return value is None or kind is bool or (kind is float and isfinite(value))


def json_problem(value: Any, path: str, depth: int = 0) -> tuple[str, str] | None:
    """The first thing in `value` that is no strict JSON, as (path, what is wrong), or None."""
    kind = type(value)
    if kind is str:
        return None if valid_unicode(value) else (path, "not valid Unicode (a lone surrogate)")
    if value is None or kind is bool:
        return None
    if kind is int:
        return None if _INT_MIN <= value <= _INT_MAX else (path, "an integer of more than 64 bits")
    if kind is float:
        return None if isfinite(value) else (path, f"{value} is not a finite number")
    if kind is list or kind is dict:
        if depth >= MAX_DEPTH:
            return path, f"nested deeper than {MAX_DEPTH} levels"
        return _inside(value, path, depth + 1)
    return path, f"a {kind.__name__} has no JSON form; store it as text or as a number"


def _inside(value: list[Any] | dict[Any, Any], path: str, depth: int) -> tuple[str, str] | None:
    if isinstance(value, list):
        for position, item in enumerate(value):
            if problem := json_problem(item, f"{path}[{position}]", depth):
                return problem
        return None
    for key, item in value.items():
        if type(key) is not str:
            return path, f"the key {key!r} is not text"
        if not valid_unicode(key):
            return path, f"the key {key!r} is not valid Unicode (a lone surrogate)"
        if problem := json_problem(item, f"{path}.{key}" if path else key, depth):
            return problem
    return None
