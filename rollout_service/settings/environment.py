"""The environment as a settings source: `ROLLOUT_GROUPS__MAX_STALENESS=2` is `groups.max_staleness`.

Each `ROLLOUT_…` variable sets something or is reported; none is ignored, but for three kinds that are no settings:
the variable an engine's `api_key_env` names, those Kubernetes sets for a Service whose name begins with "rollout", and
ROLLOUT_SERVICE, ROLLOUT_SERVICE_URL and ROLLOUT_SERVICE_KEY, which tell scripts and clients where the command lies, and
the service with its key.
A value that is not of its field's type stays text, so that validation refuses it like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, NoReturn, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from rollout_service.settings.problems import near, table_of

_INTEGER = re.compile(r"[+-]?[0-9]{1,40}", re.ASCII)
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?", re.ASCII)
NO_SETTINGS = frozenset({"ROLLOUT_SERVICE", "ROLLOUT_SERVICE_URL", "ROLLOUT_SERVICE_KEY"})
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


class Environment(PydanticBaseSettingsSource):
    """Reads `environ` once. `origins` tells which variable set which path."""

    def __init__(self, settings: type[BaseSettings], environ: Mapping[str, str]) -> None:
        super().__init__(settings)
        self.prefix: str = settings.model_config.get("env_prefix", "")
        self.delimiter: str = settings.model_config.get("env_nested_delimiter") or "__"
        self.origins: dict[tuple[str, ...], str] = {}
        """Path of a field or a whole table → the variable that set it."""
        self.unknown: dict[str, str] = {}
        """Variables with the prefix that map to nothing → why."""
        self._environ = environ

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """The value of a top-level field alone; pydantic-settings asks for it. `__call__` reads tables too."""
        return self().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        """The settings the environment holds, nested like the file. Fills `origins` and `unknown`."""
        values: dict[str, Any] = {}
        kubernetes = _kubernetes_prefixes(self._environ)
        # Shorter paths first, so that ROLLOUT_GROUPS__MAX_STALENESS refines a ROLLOUT_GROUPS that is set as well.
        names = sorted(
            (name for name in self._environ if name.startswith(self.prefix)), key=lambda n: (n.count("__"), n)
        )
        for name in names:
            path = tuple(name.removeprefix(self.prefix).lower().split(self.delimiter))
            annotation = _annotation_at(self.settings_cls, path)
            if annotation is not None:
                self.origins[path] = name
                _put(values, path, parse(self._environ[name], annotation))
            elif name not in NO_SETTINGS and not name.startswith(kubernetes):
                self.unknown[name] = self._why_unknown(name, path)
        return values

    def _why_unknown(self, name: str, path: tuple[str, ...]) -> str:
        top = self.settings_cls.model_fields.get(path[0])
        if top is not None and len(path) > 1 and get_origin(top.annotation) is list:
            whole = self.prefix + path[0].upper()
            return f"a list is given whole, as JSON: {whole}='[{{…}}]'"
        return "sets nothing: no such setting" + near(name, self._all_names())

    def _all_names(self) -> list[str]:
        names = []
        for field, info in self.settings_cls.model_fields.items():
            names.append(self.prefix + field.upper())
            table = table_of(info.annotation)
            if table is not None and get_origin(info.annotation) is not list:
                names += [f"{names[-1]}{self.delimiter}{inner.upper()}" for inner in table.model_fields]
        return names


def parse(text: str, annotation: Any) -> Any:
    """`text` as a value of a field's type; the text itself where it is none."""
    kind = annotation
    if NoneType in get_args(annotation):  # X | None: nobody can write None in a variable
        kind = next(kind for kind in get_args(annotation) if kind is not NoneType)
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if kind is bool:
        return _TRUTH.get(text.lower(), text)
    if kind is int:
        return int(text) if _INTEGER.fullmatch(text) else text
    if kind is float:
        return float(text) if _NUMBER.fullmatch(text) else text
    if get_origin(kind) in (list, dict) or table_of(kind) is not None:
        try:
            return json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return text
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _annotation_at(model: type[BaseModel], path: tuple[str, ...]) -> Any:
    """The type at `path`, or None where there is no such field. A list is whole: nothing lies below it."""
    annotation: Any = None
    table: type[BaseModel] | None = model
    for part in path:
        if table is None or part not in table.model_fields:
            return None
        annotation = table.model_fields[part].annotation
        table = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    return annotation


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        inner = values.get(part)
        if not isinstance(inner, dict):
            inner = values[part] = {}
        values = inner
    values[path[-1]] = value


def _kubernetes_prefixes(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What the variables of each Kubernetes Service begin with; each Service has both X_SERVICE_HOST and _PORT."""
    services = (name.removesuffix("_SERVICE_HOST") for name in environ if name.endswith("_SERVICE_HOST"))
    found = [service for service in services if f"{service}_SERVICE_PORT" in environ]
    return tuple(prefix for service in found for prefix in (f"{service}_SERVICE_", f"{service}_PORT"))
