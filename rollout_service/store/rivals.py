"""What may be in a run that replicas share: those that judge its groups alike and read the same prompts, and as many
engines as each of them may have."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from rollout_service.core.shared import Replica
from rollout_service.errors import ConfigError, Conflict

MAX_TOLD = 5
"""Differences in one message."""
MAX_SHOWN = 60
"""Characters of one value."""
_NOTHING = object()


def check_rival(replica: Replica, *, name: str, rules: str, prompts: str, run: str) -> None:
    """Raises ConfigError where `replica` may not work beside the living replica `name`; `run` names what they share."""
    if rules != replica.rules:
        told = "; ".join(differences(replica.rules, rules)) or "by another version of the service"
        raise ConfigError(f"{run}: replica {name} has other rules: {told}; all replicas of a run need the same")
    if replica.prompts and prompts and prompts != replica.prompts:
        raise ConfigError(f"{run}: replica {name} reads another prompts file")


def check_room(engine_id: str, there: Collection[str], most: int) -> None:
    """Raises Conflict where one more than `there` (ids) would be more than a replica may have."""
    if engine_id not in there and len(there) >= most:
        raise Conflict(
            f"with those asked for at other replicas there would be {len(there) + 1} engines, and"
            f" registration.max_engines is {most}"
        )


def differences(here: str, there: str) -> list[str]:
    """What differs in two `Replica.rules`, as far as it is told: `groups.max_staleness is 4 there and 2 here`."""
    mine, its = _values(here), _values(there)
    paths = [path for path in mine | its if mine.get(path, _NOTHING) != its.get(path, _NOTHING)]
    told = [f"{path} is {_shown(its, path)} there and {_shown(mine, path)} here" for path in paths[:MAX_TOLD]]
    return told + ([f"{len(paths) - MAX_TOLD} more"] if len(paths) > MAX_TOLD else [])


def _values(rules: str) -> dict[str, Any]:
    try:
        return dict(_leaves("", json.loads(rules)))
    except ValueError:
        return {}  # of a version that writes them in another way


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else key, inner)
    elif isinstance(value, list) and value:
        for position, inner in enumerate(value):
            yield from _leaves(f"{path}[{position}]", inner)
    else:
        yield path, value


def _shown(values: dict[str, Any], path: str) -> str:
    if path not in values:
        return "not set"
    text = json.dumps(values[path])
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
