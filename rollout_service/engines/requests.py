"""One generation request: what is asked, under which ids, with which body.

What always holds: a request id never repeats, not even after a restart (64 random bits are drawn at construction);
every sampling field vLLM would fill in from the model's generation_config is in the body; `n` and `stream` never are.
"""

from __future__ import annotations

import itertools
import secrets
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Any

import msgspec

SEED_PER_ATTEMPT = "seed_per_attempt"
"""Our own sampling key: send a seed that differs for every engine request."""


class Route(Enum):
    """Generation routes, and the abort id of a request on each (`{}`: its X-Request-Id)."""

    TEXT = ("/v1/completions", "cmpl-{}-0")
    """Prompts given as text or ids. vLLM numbers the prompts of a request, so one prompt is `-0`."""
    CHAT = ("/v1/chat/completions", "chatcmpl-{}")
    """Prompts given as messages."""

    def __init__(self, path: str, abort_pattern: str) -> None:
        self.path = path
        self._prefix, _, self._suffix = abort_pattern.partition("{}")

    def abort_id(self, request_id: str) -> str:
        return f"{self._prefix}{request_id}{self._suffix}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One generation. Exactly one of `messages`, `text`, `token_ids` is set."""

    tag: str
    """What request ids begin with, for people: `{group_id}.{attempt}.{index}`."""
    messages: Sequence[Mapping[str, Any]] | None = None
    text: str | None = None
    token_ids: array[int] | None = None
    """int32 (P,), P >= 1."""
    sampling: Mapping[str, Any]
    """Complete: what `effective_sampling` gives."""
    group: str = ""
    """What shares its prompt: requests of one group go to one engine, as long as that is not loaded past a bound."""
    rollout: str = ""
    """The rollout it is made for: `{group_id}.{attempt}.{index}`; what `abort` is told."""
    many_turns: bool = False
    """Whether that rollout may ask again: it stays where its history is cached."""
    priority: int | None = None
    """Lower goes first, where the engine schedules by priority."""
    text_wanted: bool = False
    """For a prompt given as ids: ask the engine for its text at the same time."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further members of the body: `tools`, `tool_choice`."""

    @property
    def route(self) -> Route:
        return Route.TEXT if self.messages is None else Route.CHAT


class RequestIds:
    """A source of request ids, none of which was ever given before."""

    def __init__(self) -> None:
        self._boot = secrets.token_hex(8)
        self._count = itertools.count()

    def next(self, tag: str) -> str:
        return f"{tag}-{self._boot}{next(self._count):x}"


_ENCODER = msgspec.json.Encoder()


def encode_body(
    request: GenerateRequest,
    request_id: str,
    model: str,
    *,
    cache_salt: str | None = None,
    priority: int | None = None,
) -> bytes:
    """The JSON body of `request`."""
    body: dict[str, Any] = {"model": model}
    if request.messages is not None:
        body["messages"] = request.messages
        body["logprobs"] = True
    else:
        body["prompt"] = request.text if request.token_ids is None else request.token_ids.tolist()
        body["logprobs"] = 0
    body["return_token_ids"] = True
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    if priority is not None:
        body["priority"] = priority
    body.update(request.sampling)
    body.update(request.extra)
    if body.pop(SEED_PER_ATTEMPT, False):
        # From the id, which is new for every request: equal seeds would make the rollouts of a group equal.
        body["seed"] = int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest()) >> 1
    if request.messages is None:
        body.pop("chat_template_kwargs", None)
    return _ENCODER.encode(body)
