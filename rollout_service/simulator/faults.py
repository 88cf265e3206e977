"""Faults that a test scripts: rules that pick requests, and what happens to those.

Always holds:
- Rules are tried in order, the newest `add` first; the first that matches, has uses left and draws its probability
  decides, and uses one up. A request that no rule picks is served as by a healthy engine.
- The same seed, rules and order of requests pick the same requests.
- A rule with an unknown or impossible field is refused whole (`msgspec.ValidationError`), and nothing of it is added.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

Positive = Annotated[int, Meta(ge=1)]
HUGE_ID = 2**31
"""The first id that is none: ids are signed 32-bit integers."""


class Action(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What happens to a picked request. Fields combine; `delay` comes before everything else."""

    delay: Annotated[float, Meta(ge=0, le=86400)] = 0.0
    """Seconds before the engine looks at the request; an abort does not find it meanwhile."""
    status: Annotated[int, Meta(ge=300, le=599)] | None = None
    """Answers an error object with this status instead of generating."""
    message: str = "scripted fault"
    """The error object's message."""
    cut: bool = False
    """Resets the connection instead of answering; a stream is cut after its first chunk."""
    hang: bool = False
    """Takes a place in the batch and never finishes; an abort or a hang-up ends it."""
    malformed: bool = False
    """Answers 200 with a body that is not JSON."""
    truncate: bool = False
    """Answers 200 with the first half of the body, as a complete HTTP answer; a stream breaks off in a chunk."""
    cut_body: bool = False
    """Announces the whole body, sends half and closes."""
    ignore_abort: bool = False
    """Aborts by id do nothing to it."""
    ignore_disconnect: bool = False
    """The engine goes on when the caller has hung up."""
    finish_reason: str | UnsetType | None = UNSET
    """Replaces the finish_reason of every choice."""
    drop: tuple[str, ...] = ()
    """Fields left out of every choice; "choices" empties the answer."""
    token_ids: Literal["short", "long", "negative", "huge", "float", "text"] | None = None
    """Spoils the token ids: one too few or too many; the first one -1, 2**31, a float, a string."""
    logprobs: Literal["short", "long", "null", "nan", "inf", "text"] | None = None
    """Spoils the logprobs in the same way."""
    text: str | None = None
    """The completion is exactly this text, then <eos>; `max_tokens` does not cut it."""

    @property
    def spoils(self) -> bool:
        """Whether the finished answer has to be changed."""
        return bool(self.finish_reason is not UNSET or self.drop or self.token_ids or self.logprobs)


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which requests, how often, and what to do with them."""

    do: Action
    match: str | None = None
    """Text that occurs in the prompt (special tokens as `<user>`, …); null: every request."""
    times: Positive | None = None
    """How many requests at most; null: no end."""
    probability: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the matching requests, drawn from the simulator's seed."""


@dataclass(slots=True)
class _Armed:
    number: int
    rule: Rule
    left: float
    matched: int = 0
    used: int = 0


class FaultPlan:
    """The rules in force."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._armed: list[_Armed] = []
        self._added = 0

    def __bool__(self) -> bool:
        return bool(self._armed)

    def add(self, rules: Iterable[Rule | Mapping[str, Any]]) -> None:
        """Puts `rules` in front of those in force, in their own order."""
        checked = [rule if isinstance(rule, Rule) else msgspec.convert(dict(rule), Rule) for rule in rules]
        fresh = []
        for rule in checked:
            self._added += 1
            fresh.append(_Armed(self._added, rule, math.inf if rule.times is None else rule.times))
        self._armed[:0] = fresh

    def on(self, match: str | None = None, *, times: int | None = None, probability: float = 1.0, **do: Any) -> None:
        """One rule: `faults.on("prompt text", times=2, status=503)`."""
        self.add([{"match": match, "times": times, "probability": probability, "do": do}])

    def clear(self) -> None:
        self._armed.clear()

    def pick(self, prompt: str) -> Action | None:
        """What happens to a request with this prompt; uses the rule up."""
        for armed in self._armed:
            if not armed.left or (armed.rule.match is not None and armed.rule.match not in prompt):
                continue
            armed.matched += 1
            if self._draw(armed) < armed.rule.probability:
                armed.left -= 1
                armed.used += 1
                return armed.rule.do
        return None

    def view(self) -> list[dict[str, Any]]:
        """The rules in force, each with how many requests it matched and picked."""
        return [
            {**msgspec.to_builtins(armed.rule), "matched": armed.matched, "used": armed.used} for armed in self._armed
        ]

    def _draw(self, armed: _Armed) -> float:
        key = f"{self._seed}:fault:{armed.number}:{armed.matched}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64


def spoil(answer: bytes, action: Action) -> bytes:
    """A finished JSON answer (or one chunk of a stream) with the action's faults in every choice."""
    whole = json.loads(answer)
    if "choices" in action.drop:
        whole["choices"] = []
    for choice in whole.get("choices", ()):
        _spoil_choice(choice, action)
    # Python's own JSON: a bad engine does write NaN and Infinity.
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode()


def _spoil_choice(choice: dict[str, Any], action: Action) -> None:
    if action.finish_reason is not UNSET and choice.get("finish_reason") is not None:
        choice["finish_reason"] = action.finish_reason
    if action.token_ids and choice.get("token_ids"):
        choice["token_ids"] = _spoil_ids(choice["token_ids"], action.token_ids)
    if action.logprobs and choice.get("logprobs"):
        _spoil_logprobs(choice["logprobs"], action.logprobs)
    for name in action.drop:
        choice.pop(name, None)


def _spoil_ids(ids: list[Any], how: str) -> list[Any]:
    if how == "short":
        return ids[:-1]
    if how == "long":
        return [*ids, ids[-1]]
    return [{"negative": -1, "huge": HUGE_ID, "float": ids[0] + 0.5, "text": str(ids[0])}[how], *ids[1:]]


def _spoil_logprobs(logprobs: dict[str, Any], how: str) -> None:
    values = {"null": None, "nan": math.nan, "inf": -math.inf, "text": "-0.5"}
    for name, entries in logprobs.items():
        if not isinstance(entries, list) or not entries:
            continue
        if how == "short":
            logprobs[name] = entries[:-1]
        elif how == "long":
            logprobs[name] = [*entries, entries[-1]]
        elif name == "token_logprobs":
            entries[0] = values[how]
        elif name == "content":
            entries[0]["logprob"] = values[how]
