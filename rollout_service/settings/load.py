"""From a TOML file, the environment and the command line to `Settings`, or to one line that says what is wrong.

The command line wins over the environment, the environment over the file. Each problem names where its value came from.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollout_service.errors import ConfigError
from rollout_service.settings.environment import Environment
from rollout_service.settings.model import Settings
from rollout_service.settings.problems import Problem, printable, problems_of

MAX_PROBLEMS = 5
"""Problems that are spelled out; the line says how many more there are."""


def load_settings(
    config: Path | None,
    *,
    host: str | None = None,
    port: int | None = None,
    insecure: bool | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Reads and checks the configuration.

    `config` is the TOML file (None: environment and defaults only); `host`, `port` and `insecure` are the command
    line's and win over everything. Raises ConfigError with one line that names the file or the variable, the field and
    what was expected. Starts nothing and imports no reward.
    """
    environment = Environment(Settings, environ)
    overrides = environment()
    merged = _merged(_read_toml(config) if config else {}, overrides)
    origins = _Origins(file=str(config) if config else "configuration", variables=environment.origins)
    for name, value in (("host", host), ("port", port), ("insecure", insecure)):
        if value is not None:
            origins.options[("server", name)] = f"--{name}"
            merged = _merged(merged, {"server": {name: value}})
    allowed = _key_variables(merged)
    lines = [f"{name}: {why}" for name, why in environment.unknown.items() if name not in allowed]
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        found = problems_of(error, Settings)
        raise ConfigError(_one_line([*lines, *map(origins.line, found)])) from None
    lines += [origins.line(problem) for problem in _missing_keys(settings, environ)]
    if lines:
        raise ConfigError(_one_line(lines))
    return settings


@dataclass(kw_only=True)
class _Origins:
    """Where each value came from."""

    file: str
    variables: Mapping[tuple[str, ...], str]
    options: dict[tuple[str, ...], str] = field(default_factory=dict)

    def line(self, problem: Problem) -> str:
        path = tuple(str(part) for part in problem.path)
        for length in range(len(path), 0, -1):
            for known in (self.options, self.variables):
                if path[:length] in known:
                    return f"{known[path[:length]]}: {problem.field}: {problem.what}"
        return f"{self.file}: {problem.field}: {problem.what}"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
        values = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    # pydantic-settings takes arguments of its own, all with an underscore in front; no setting has one.
    if private := [name for name in values if name.startswith("_")]:
        raise ConfigError(f"{path}: {printable(private[0])}: unknown key")
    return values


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` laid on it, table by table; a list or a value is replaced whole."""
    merged = dict(base)
    for name, value in over.items():
        if isinstance(value, dict) and name in base and name != "chat_template_kwargs":
            # What is no table below stays, so that validation refuses it where it stands.
            merged[name] = _merged(base[name], value) if isinstance(base[name], dict) else base[name]
        else:
            merged[name] = value
    return merged


def _key_variables(values: Mapping[str, Any]) -> set[str]:
    """The variables that hold engines' keys; they may have any name, our prefix included."""
    engines = values.get("engines")
    tables = [engine for engine in engines if isinstance(engine, dict)] if isinstance(engines, list) else []
    if isinstance(registration := values.get("registration"), dict):
        tables.append(registration)
    return {name for table in tables if isinstance(name := table.get("api_key_env"), str)}


def _missing_keys(settings: Settings, environ: Mapping[str, str]) -> list[Problem]:
    # The name is not shown: a key that was pasted in the name's place must not reach the log.
    named: list[tuple[tuple[str | int, ...], str]] = [
        (("engines", position), engine.api_key_env) for position, engine in enumerate(settings.engines)
    ]
    named.append((("registration",), settings.registration.api_key_env))
    return [
        Problem(path=(*table, "api_key_env"), what="the environment variable it names is not set")
        for table, name in named
        if name and not environ.get(name)
    ]


def _one_line(lines: list[str]) -> str:
    more = len(lines) - MAX_PROBLEMS
    return printable("; ".join(lines[:MAX_PROBLEMS])) + (f" (and {more} more)" if more > 0 else "")
