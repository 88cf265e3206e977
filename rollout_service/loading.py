"""From `package.module:function` to something to call. Every fault is one `ConfigError` line: what, and where."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_service.errors import ConfigError

MAX_MESSAGE = 2_000
"""Characters of what user code says that are kept."""
_LOADER_FILES = (__file__, importlib.__file__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedFunction:
    """A function of the user's, looked at once."""

    call: Callable[..., Any]
    is_async: bool
    accepts: frozenset[str] | None
    """Names it takes; None: it has **kwargs and takes every field."""


def load_first_in(path: Sequence[str], what: str, target: str) -> LoadedFunction:
    """As `load`, with `path` in front of sys.path from here on."""
    if sys.path[: len(path)] != list(path):
        sys.path[:0] = path
    importlib.invalidate_caches()
    return load(what, target, path)


def load(what: str, target: str, path: Sequence[str]) -> LoadedFunction:
    """Imports `target` for `what`; `path` (entries already in front of sys.path) is only for the message."""
    module_name, colon, attribute = target.partition(":")
    if not (colon and module_name and attribute):
        raise ConfigError(f'{what}: function "{target}" is not of the form package.module:function')
    try:
        found: Any = importlib.import_module(module_name)
    except BaseException as error:  # a module may raise anything while it is imported, SystemExit included
        raise ConfigError(f"{what}: {_import_fault(module_name, error, path)}") from error
    origin = getattr(found, "__file__", None) or "built in"
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{what}: module {module_name} ({origin}) has no function {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{what}: {attribute!r} in module {module_name} ({origin}) is not a function")
    is_async = inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__)
    return LoadedFunction(call=found, is_async=is_async, accepts=_accepted(found))


def _import_fault(module: str, error: BaseException, path: Sequence[str]) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        looked = ", ".join([*path, "sys.path"])
        return f"no module named {error.name!r} (looked in {looked})"
    what = clean(traceback.format_exception_only(error)[-1].strip())
    return f"importing module {module} raised {' '.join(what.split())}{_where(error)}"


def _where(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}, line {error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    if not frames or frames[-1].filename in _LOADER_FILES:
        return ""
    return f" ({frames[-1].filename}, line {frames[-1].lineno})"


def clean(text: str, limit: int = MAX_MESSAGE) -> str:
    """The text as valid Unicode of at most `limit` characters: messages of user code may hold lone surrogates."""
    return text[:limit].encode("utf-8", "replace").decode("utf-8")


def _accepted(function: Callable[..., Any]) -> frozenset[str] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature: they get every field
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in by_name)
