"""What an engine says of itself, read from its `/v1/models` and `/server_info`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class AbortMode(StrEnum):
    """How a request is aborted at the engine. The connection is closed in every mode."""

    REQUESTS = "requests"
    """`POST /abort_requests` (a server in dev mode)."""
    SCALE_OUT = "scale_out"
    """`POST /inference/v1/abort_requests` (a server with scale-out)."""
    CLOSE = "close"
    """Only by closing the connection."""


ABORT_PATHS = {AbortMode.REQUESTS: "/abort_requests", AbortMode.SCALE_OUT: "/inference/v1/abort_requests"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What an engine says of itself."""

    model: str
    """The served model that requests name."""
    max_model_len: int | None
    """Tokens of prompt and completion together; None where it does not say."""
    logprobs_mode: str | None
    """"raw_logprobs", "processed_logprobs", ...; None where it cannot be read."""
    vocab_size: int | None
    abort: AbortMode
    priorities: bool = False
    """Whether it schedules by priority."""


def logprobs_mode(config: Any) -> str | None:
    if isinstance(config, dict):
        model = config.get("model_config")
        config = model.get("logprobs_mode") if isinstance(model, dict) else model
        if isinstance(config, str) and re.fullmatch(r"\w+", config):
            return config
    if isinstance(config, str) and (found := re.search(r"logprobs_mode\W{1,4}(\w+)", config)):
        return found[1]
    return None


def vocab_size(config: Any) -> int | None:
    model = config.get("model_config") if isinstance(config, dict) else None
    for name in ("hf_text_config", "hf_config"):
        part = model.get(name) if isinstance(model, dict) else None
        size = part.get("vocab_size") if isinstance(part, dict) else None
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    return None


def priorities(config: Any) -> bool:
    """Whether it schedules by priority; requests to one that does not must not name any."""
    if isinstance(config, dict):
        scheduler = config.get("scheduler_config")
        return isinstance(scheduler, dict) and str(scheduler.get("policy")).rpartition(".")[2].lower() == "priority"
    return isinstance(config, str) and re.search(r"\bpolicy\W{1,4}priority\b", config) is not None
