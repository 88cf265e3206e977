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

TABLE = "a table"
"""What a mapping is called in TOML; in JSON it is an object."""
MAX_SHOWN = 80
"""Characters of a refused value that are shown, and of a key."""
MAX_READ = 4096
"""Of a refused value that are looked at."""
MAX_NAME = 64
"""Of an unknown key for which a resembling one is looked for, at a cost that grows with its square."""

_EXPECTED: Mapping[str, str] = {
    "bool_type": "expected true or false",
    "dict_type": "expected {table}",
    "finite_number": "expected a finite number",
    "float_type": "expected a number",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected at least {ge}",
    "int_type": "expected an integer",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
    "list_type": "expected a list",
    "literal_error": "expected {expected}",
    "model_type": "expected {table}",
    "string_pattern_mismatch": "expected {pattern}",
    "string_too_long": "expected at most {max_length} characters",
    "string_too_short": "expected text, not empty",
    "string_type": "expected text",
    "string_unicode": "expected valid Unicode",
    "too_long": "expected at most {max_length} items",
    "too_short": "expected at least {min_length} items",
}
NO_CONTROLS = r"^[^\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]*$"
"""A pattern: text without control characters, and without those that turn the direction of what is shown after them."""
_PATTERNS: Mapping[str, str] = {NO_CONTROLS: "text without control characters"}
_CREDENTIALS = re.compile(r"//.*@", re.DOTALL)
_REST = re.compile(r"//(?!\*\*\*@).*", re.DOTALL)


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
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{_cut(part)}"
    return text


def shown(value: Any, *, table: str = TABLE) -> str:
    """A refused value on one line, shortened, without the credentials of a URL; tables and lists by their kind only."""
    if isinstance(value, dict | list):
        return table if isinstance(value, dict) else "a list"
    try:
        text = json.dumps(value[:MAX_READ] if isinstance(value, str) else value, ensure_ascii=False)
    except (TypeError, ValueError):  # a date of TOML, an integer too long to print: no JSON form
        text = f"a {type(value).__name__}"
    text = _CREDENTIALS.sub("//***@", text)
    if isinstance(value, str) and len(value) > MAX_READ:
        text = _REST.sub("//", text)  # what was not read may have the end of the credentials
    return _cut(printable(text))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def printable(text: str) -> str:
    """`text` on one line that any terminal, log or UTF-8 writer takes: what is not printable is escaped."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def problems_of(error: ValidationError, model: type[BaseModel], *, table: str = TABLE) -> list[Problem]:
    """Everything `error` says about `model`, one problem a field, in the order it was found; `table`: what a mapping is
    called."""
    problems: list[Problem] = []
    for details in error.errors(include_url=False):
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, FieldProblems):
            problems += [Problem(path=(*details["loc"], *path), what=what) for path, what in cause.found]
        else:
            names = _names_at(details["loc"][:-1], model) if details["type"] == "extra_forbidden" else ()
            problems.append(Problem(path=details["loc"], what=wrong_with(details, names, table=table)))
    return problems


def wrong_with(details: ErrorDetails, names: Iterable[str] = (), *, table: str = TABLE) -> str:
    """What is wrong with one value; `names`: the keys that are known at its place."""
    kind, context = details["type"], details.get("ctx", {})
    if kind == "missing":
        return "is required"
    if kind == "extra_forbidden":
        return "unknown key" + near(str(details["loc"][-1]), names)
    if kind == "value_error":
        return str(context["error"])
    expected = _EXPECTED.get(kind)
    if kind == "string_pattern_mismatch":
        context = {"pattern": _PATTERNS.get(context["pattern"], f"text that matches {context['pattern']}")}
    words = expected.format(**context, table=table) if expected else details["msg"].replace("Input should", "should", 1)
    return f"{words}, got {shown(details['input'], table=table)}"


def near(name: str, names: Iterable[str]) -> str:
    """`; did you mean x?` where one of `names` resembles `name`, else nothing."""
    matches = get_close_matches(name, list(names), n=1) if len(name) <= MAX_NAME else []
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
