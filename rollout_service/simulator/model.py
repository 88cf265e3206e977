"""The batch: which sequences decode, which wait, and how far each has got. Pure: `now` comes in, nothing is slept on.

Always holds:
- At most `limit` sequences run; the others wait in the order of their arrival; nobody waits beside a free place
  unless the batch is closed (paused).
- All running sequences progress at the same rate, `rate(number running)` units of work per second. So progress is
  one shared clock (`_clock`), a sequence is done when that clock reaches its target, and a change costs one heap
  operation, however many run.
- `now` never goes back. A sequence that has ended keeps the number of tokens it had decoded.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum
from typing import Generic, TypeVar

GRANULARITY_S = 0.001
"""Event loops sleep in whole milliseconds; what is due within one counts as due, or the timer would spin on it."""

_MIN_DEAD_ENTRIES = 64
"""Below this many left-over heap entries a rebuild costs more than it frees."""


class Stage(StrEnum):
    """Where a sequence is."""

    NEW = "new"
    """Not yet added."""
    WAITING = "waiting"
    """Added; no place in the batch yet, nothing decoded."""
    RUNNING = "running"
    """Decoding."""
    ENDED = "ended"
    """Finished or removed."""


_NEW, _WAITING, _RUNNING, _ENDED = Stage.NEW, Stage.WAITING, Stage.RUNNING, Stage.ENDED
# Bound once: looking a member up on its class is the dearest step of the paths below.


class Sequence:
    """One completion to decode. `tokens` are decoded evenly over `work` units; `work` may be infinite (never done)."""

    __slots__ = ("decoded", "prompt_tokens", "stage", "started", "target", "tokens", "work")

    def __init__(self, tokens: int, work: float, prompt_tokens: int = 0) -> None:
        self.tokens = tokens
        self.work = work
        self.prompt_tokens = prompt_tokens
        self.stage = _NEW
        self.started = 0.0
        self.target = math.inf
        self.decoded = 0


SequenceT = TypeVar("SequenceT", bound=Sequence)


def batch_rate(tokens_per_s: float, batch_half: float) -> Callable[[int], float]:
    """Tokens per second of each of b requests: `tokens_per_s / (1 + (b - 1) / batch_half)`.

    The sum over the batch rises with b towards `tokens_per_s * batch_half`.
    """
    return lambda running: tokens_per_s / (1 + (running - 1) / batch_half)


def fixed_rate(running: int) -> float:
    """One unit of work a second for everybody: work is then a latency in seconds."""
    return 1.0


class BatchModel(Generic[SequenceT]):
    """The batch and its queue."""

    def __init__(self, *, rate: Callable[[int], float], limit: int | None) -> None:
        self._rate = rate
        self._limit = math.inf if limit is None else limit
        self._running: set[SequenceT] = set()
        self._waiting: OrderedDict[SequenceT, None] = OrderedDict()
        self._heap: list[tuple[float, int, SequenceT]] = []
        self._pushes = 0
        self._clock = 0.0
        self._at = 0.0
        self._frozen = False
        self._closed = False

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def sequences(self) -> list[SequenceT]:
        """All that run or wait."""
        return [*self._running, *self._waiting]

    def add(self, now: float, sequence: SequenceT) -> bool:
        """A new sequence: into the batch, or behind those that wait. True: it is now the next to be done."""
        if sequence.stage is not _NEW:
            raise ValueError(f"a sequence is added once, this one is {sequence.stage}")
        self._advance(now)
        if self._closed or len(self._running) >= self._limit:
            # By the invariant somebody waits only then, so nobody is overtaken below.
            sequence.stage = _WAITING
            self._waiting[sequence] = None
            return False
        self._enter(sequence)
        return self._heap[0][2] is sequence

    def remove(self, now: float, sequence: SequenceT) -> bool:
        """Takes a sequence out before it is done; `decoded` says how far it got. False: it had ended."""
        if sequence.stage in (_ENDED, _NEW):
            return False
        self._advance(now)
        sequence.decoded = self._progress(sequence)
        if sequence.stage is _WAITING:
            del self._waiting[sequence]
        else:
            self._running.remove(sequence)
        sequence.stage = _ENDED
        self._fill()
        self._compact()
        return True

    def due(self, now: float) -> list[SequenceT]:
        """Ends and returns what is done, in the order in which it became so, and fills the places."""
        self._advance(now)
        done: list[SequenceT] = []
        while (rate := self._rate_now()) and self._heap:
            target, _, sequence = self._heap[0]
            if sequence.stage is _RUNNING and target > self._clock + GRANULARITY_S * rate:
                break
            heapq.heappop(self._heap)
            if sequence.stage is _RUNNING:
                self._running.remove(sequence)
                sequence.stage = _ENDED
                sequence.decoded = sequence.tokens
                done.append(sequence)
                if self._waiting:
                    self._fill()
        return done

    def next_due(self) -> float | None:
        """When the next sequence will be done if nothing changes; None: never."""
        while self._heap and self._heap[0][2].stage is not _RUNNING:
            heapq.heappop(self._heap)
        rate = self._rate_now()
        if not self._heap or not rate or math.isinf(self._heap[0][0]):
            return None
        return self._at + max(0.0, self._heap[0][0] - self._clock) / rate

    def decoded(self, now: float, sequence: SequenceT) -> int:
        """Tokens of `sequence` so far."""
        if sequence.stage is not _RUNNING:
            return sequence.decoded
        self._advance(now)
        return self._progress(sequence)

    def close(self, now: float, *, freeze: bool) -> None:
        """Nobody enters the batch until `open`; with `freeze` nobody in it moves either."""
        self._advance(now)
        self._closed = True
        self._frozen = freeze

    def open(self, now: float) -> None:
        self._advance(now)
        self._closed = self._frozen = False
        self._fill()

    def _rate_now(self) -> float:
        return self._rate(len(self._running)) if self._running and not self._frozen else 0.0

    def _advance(self, now: float) -> None:
        if now > self._at:
            self._clock += self._rate_now() * (now - self._at)
            self._at = now

    def _progress(self, sequence: SequenceT) -> int:
        if sequence.stage is not _RUNNING:
            return sequence.decoded
        if sequence.work <= 0:
            return sequence.tokens
        return min(sequence.tokens, int(sequence.tokens * (self._clock - sequence.started) / sequence.work))

    def _fill(self) -> None:
        while self._waiting and not self._closed and len(self._running) < self._limit:
            self._enter(self._waiting.popitem(last=False)[0])

    def _enter(self, sequence: SequenceT) -> None:
        sequence.stage = _RUNNING
        sequence.started = self._clock
        sequence.target = target = self._clock + sequence.work
        self._running.add(sequence)
        self._pushes += 1
        heapq.heappush(self._heap, (target, self._pushes, sequence))

    def _compact(self) -> None:
        """Removed sequences stay in the heap until their time; a mass abort must not keep their memory till then."""
        if len(self._heap) > _MIN_DEAD_ENTRIES + 2 * len(self._running):
            self._heap = [entry for entry in self._heap if entry[2].stage is _RUNNING]
            heapq.heapify(self._heap)
