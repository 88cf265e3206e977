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


class Record(msgspec.Struct):
    """One request. Times are the event loop's seconds."""

    seq: int
    path: str
    body: bytes | None
    """None: longer than `KEPT_BODY_BYTES`."""
    arrived: float
    request_id: str = ""
    """Empty: refused before it had one."""
    abort_ids: list[str] = []
    prompts: list[list[int]] = []
    """Token ids of each."""
    fault: bool = False
    """A scripted fault picked it."""
    outcome: Outcome = Outcome.RUNNING
    status: int | None = None
    ended: float | None = None
    abandoned: float | None = None
    """When the caller aborted it or hung up, obeyed or not."""
    finish_reasons: list[str] = []
    tokens: int = 0
    """Decoded for it, in the end."""
    tokens_after_abort: int = 0
    """Of these, decoded after `abandoned`."""


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
        record = Record(self._seq, path, body if len(body) <= KEPT_BODY_BYTES else None, now)
        self._records.append(record)
        return record

    def close(self, record: Record, outcome: Outcome, now: float, *, status: int | None = None) -> None:
        """Ends a record; a second end of the same changes nothing."""
        if record.ended is not None:
            return
        record.outcome = outcome
        record.status = status
        record.ended = now
        self.outcomes[outcome] += 1
        self.tokens += record.tokens
        self.tokens_after_abort += record.tokens_after_abort
        if status == 200 and outcome is Outcome.ANSWERED:
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
