"""One request in flight: a `Call` and its `Completion`s.

Always holds: `left` counts the completions of a call that have not ended, and is 0 from its end on, however it ended.
"""

from __future__ import annotations

import math
from typing import Protocol

from .bodies import Ask
from .decoder import Plan
from .faults import Action
from .journal import Record
from .model import Sequence
from .wire import Exchange

ABORT = "abort"
"""The finish_reason of what did not run to its end."""


class Completion(Sequence):
    """One completion of a call."""

    __slots__ = ("call", "content", "finish_reason", "planned_reason", "versions")

    def __init__(self, call: Call, plan: Plan, prompt_tokens: int, versions: tuple[tuple[str, int], ...]) -> None:
        content, reason, work = plan
        super().__init__(content.length, work, prompt_tokens)
        self.call = call
        self.content = content
        self.planned_reason = reason
        self.finish_reason: str | None = None
        self.versions = versions
        """(weights, first token made with them), in order."""


class Follower(Protocol):
    """Who sends a call's tokens while they come."""

    def completion_ended(self, completion: Completion) -> None: ...

    def finish(self) -> None: ...

    def fail(self, error: object) -> None: ...

    def stop(self) -> None: ...


class Call:
    """One request to a generation route: `n` completions for each of its prompts, prompt after prompt."""

    __slots__ = (
        "abandoned_tokens",
        "abort_ids",
        "action",
        "ask",
        "completions",
        "exchange",
        "left",
        "record",
        "request_id",
        "stream",
    )

    def __init__(self, ask: Ask, exchange: Exchange, record: Record, action: Action | None) -> None:
        self.ask = ask
        self.exchange = exchange
        self.record = record
        self.action = action
        self.request_id = record.request_id
        self.abort_ids = record.abort_ids
        """One for each prompt."""
        self.completions: list[Completion] = []
        self.left = 0
        self.stream: Follower | None = None
        self.abandoned_tokens: int | None = None
        """Tokens decoded when the caller gave it up, where a scripted fault kept it going."""

    @property
    def aborted(self) -> bool:
        return any([completion.finish_reason == ABORT for completion in self.completions])


def hung(plan: Plan) -> Plan:
    """The same completion, never done."""
    return plan._replace(work=math.inf)
