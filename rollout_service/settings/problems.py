"""Turns what pydantic found into lines for people: dotted field, what was expected, what was there.

A line never holds a line break, a credential that stood in a URL, or the value of a key nobody knows (it may be a
secret in the wrong place).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

MAX_SHOWN = 80
"""Characters of a refused value that are shown."""

_EXPECTED: Mapping[str, str] = {
    "bool_type": "expected true or false",
    "dict_type": "expected a table",
    "finite_number": "expected a finite number",
    "float_type": "expected a number",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected at least {ge}",
    "int_type": "expected an integer",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
    "list_type": "expected a list",
    "literal_error": "expected {expected}",
    "model_type": "expected a table",
    "string_pattern_mismatch": "expected text that matches {pattern}",
    "string_too_long": "expected at most {max_length} characters",
    "string_too_short": "expected text, not empty",
    "string_type": "expected text",
    "string_unicode": "expected valid Unicode",
    "too_long": "expected at most {max_length} items",
}
_CREDENTIALS = re.compile(r"//.*@", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong."""

    path: tuple[str | int, ...]
    """Where, from the validated model's root: ("engines", 0, "url")."""
    what: str
    """What is wrong there, one line."""

    @property
    def field(self) -> str:
        """The path in dotted form: `engines[0].url`."""
        return dotted(self.path)


class FieldProblems(ValueError):
    """Raised by a validator that found problems in named fields, which lie below its own place."""

    def __init__(self, found: Iterable[tuple[tuple[str | int, ...], str]]) -> None:
        self.found = list(found)
        super().__init__("; ".join(f"{dotted(path)}: {what}" if path else what for path, what in self.found))


def dotted(path: Sequence[str | int]) -> str:
    """("engines", 0, "url") → `engines[0].url`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def shown(value: Any) -> str:
    """A refused value on one line, shortened, without the credentials of a URL; tables and lists by their kind only."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # a date of TOML, an integer too long to print: no JSON form
        text = f"a {type(value).__name__}"
    text = printable(_CREDENTIALS.sub("//***@", text))
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def printable(text: str) -> str:
    """`text` on one line that any terminal, log or UTF-8 writer takes: what is not printable is escaped."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Everything `error` says about `model`, one problem a field, in the order it was found."""
    problems: list[Problem] = []
    for details in error.errors(include_url=False):
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, FieldProblems):
            problems += [Problem(path=(*details["loc"], *path), what=what) for path, what in cause.found]
        else:
            problems.append(Problem(path=details["loc"], what=_what(details, model)))
    return problems


def _what(details: ErrorDetails, model: type[BaseModel]) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "missing":
        return "is required"
    if kind == "extra_forbidden":
        return "unknown key" + near(str(details["loc"][-1]), _names_at(details["loc"][:-1], model))
    if kind == "value_error":
        return str(context["error"])
    expected = _EXPECTED.get(kind)
    text = expected.format(**context) if expected else details["msg"].replace("Input should", "should", 1)
    return f"{text}, got {shown(details['input'])}"


def near(name: str, names: Iterable[str]) -> str:
    """`; did you mean x?` where one of `names` resembles `name`, else nothing."""
    matches = get_close_matches(name, list(names), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def _names_at(path: Sequence[str | int], model: type[BaseModel]) -> list[str]:
    """The field names of the table at `path`."""
    for part in path:
        if isinstance(part, str):
            inner = table_of(model.model_fields[part].annotation)
            if inner is None:
                return []
            model = inner
    return list(model.model_fields)


def table_of(annotation: Any) -> type[BaseModel] | None:
    """The model an annotation names, itself or as the items of a list."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
