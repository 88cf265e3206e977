"""What the engine was asked and how each request ended.

Always holds: every request to a generation route has one `Record` and ends in exactly one `Outcome`; the counts cover
every request since the start (or `clear`), the records only the latest `size`.
"""

from __future__ import annotations

from collections import Counter, deque
from enum import StrEnum
from typing import Any

import msgspec

KEPT_BODY_BYTES = 16 * 1024
"""Longer bodies are not kept: they are prompts of many thousand ids, and thousands of them would be gigabytes."""


class Outcome(StrEnum):
    """How a request ended."""

    RUNNING = "running"
    """Not ended."""
    ANSWERED = "answered"
    """Answered: completed, refused, or with a scripted fault."""
    ABORTED = "aborted"
    """Answered 200 with finish_reason abort, because somebody aborted it by id, by pause or all at once."""
    DISCONNECTED = "disconnected"
    """The caller hung up before the answer."""
    CUT = "cut"
    """The engine cut the connection: a scripted fault, or its own death."""


class Record:
    """One request. Times are the event loop's seconds."""

    __slots__ = (
        "abandoned",
        "abort_ids",
        "arrived",
        "body",
        "ended",
        "fault",
        "finish_reasons",
        "outcome",
        "path",
        "prompt",
        "request_id",
        "seq",
        "status",
        "tokens",
        "tokens_after_abort",
    )

    def __init__(self, *, seq: int, path: str, body: bytes, arrived: float) -> None:
        self.seq = seq
        self.path = path
        self.body = body if len(body) <= KEPT_BODY_BYTES else None
        self.arrived = arrived
        self.request_id = ""
        self.abort_ids: list[str] = []
        self.prompt: list[list[int]] | None = None
        self.fault = False
        self.outcome = Outcome.RUNNING
        self.status: int | None = None
        self.ended: float | None = None
        self.abandoned: float | None = None
        self.finish_reasons: list[str] = []
        self.tokens = 0
        self.tokens_after_abort = 0


class Journal:
    """The latest records, and counts of all."""

    def __init__(self, size: int) -> None:
        self._records: deque[Record] = deque(maxlen=size)
        self._seq = 0
        self.clear()

    def clear(self) -> None:
        """Forgets the records and starts the counts at 0; requests in flight are still counted when they end."""
        self._records.clear()
        self.requests = 0
        self.outcomes: Counter[Outcome] = Counter({outcome: 0 for outcome in Outcome if outcome is not Outcome.RUNNING})
        self.completions = 0
        self.tokens = 0
        self.tokens_after_abort = 0
        self.faults = 0
        self.abort_calls = 0
        self.abort_ids = 0
        self.empty_abort_calls = 0
        self.control_calls: Counter[str] = Counter()

    def open(self, path: str, body: bytes, now: float) -> Record:
        self._seq += 1
        self.requests += 1
        record = Record(seq=self._seq, path=path, body=body, arrived=now)
        self._records.append(record)
        return record

    def close(self, record: Record, outcome: Outcome, now: float, *, status: int | None = None) -> None:
        """Ends a record; a second end of the same changes nothing."""
        if record.outcome is not Outcome.RUNNING:
            return
        record.outcome = outcome
        record.status = status
        record.ended = now
        self.outcomes[outcome] += 1
        self.tokens += record.tokens
        self.tokens_after_abort += record.tokens_after_abort
        if outcome is Outcome.ANSWERED and status == 200:
            self.completions += len(record.finish_reasons)

    def records(self) -> list[Record]:
        """Oldest first."""
        return list(self._records)


def view(record: Record, prompt: str) -> dict[str, Any]:
    """A record as JSON; `prompt` is its text."""
    body = msgspec.Raw(record.body) if record.body and record.request_id else None
    return {
        "seq": record.seq,
        "path": record.path,
        "request_id": record.request_id,
        "abort_ids": record.abort_ids,
        "prompt": prompt,
        "body": body,
        "outcome": record.outcome,
        "status": record.status,
        "finish_reasons": record.finish_reasons,
        "fault": record.fault,
        "arrived": record.arrived,
        "ended": record.ended,
        "abandoned": record.abandoned,
        "tokens": record.tokens,
        "tokens_after_abort": record.tokens_after_abort,
    }
