"""The engine on the event loop: calls in, completions out, aborts and pauses between.

Always holds:
- One timer for the whole engine, armed for the next completion that will be done; with nothing in flight, none.
- A completion ends once: done, aborted or dropped. A call ends when its last completion has, and only then is it
  forgotten by its abort ids. An abort that finds nothing leaves nothing behind.
- Callbacks run after the batch is consistent again; they may submit, abort or pause.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import StrEnum

from .bodies import Ask
from .decoder import Decoder, Plan
from .faults import Action
from .journal import Record
from .model import BatchModel, Sequence, Stage, batch_rate, fixed_rate
from .settings import SimulatorSettings

ABORT = "abort"
FIRST_WEIGHTS = "default"
"""What vLLM calls the weights it started with."""
CACHE_BLOCK = 16
"""Prompts are cached in whole blocks of this many tokens."""
CACHED_PROMPTS = 4096
"""Prompts the prefix cache remembers."""
_TIMER_SLACK_S = 1e-4
"""An armed timer this little late is left alone: moving it costs more than the delay."""


class PauseMode(StrEnum):
    """What a pause does to the requests in flight. New ones wait for the resume in every mode."""

    ABORT = "abort"
    """They end at once, with finish_reason abort."""
    WAIT = "wait"
    """They run to their end; the pause is answered when the last has."""
    KEEP = "keep"
    """They stand still and go on after the resume."""


class Completion(Sequence):
    """One completion of a call."""

    __slots__ = ("call", "content", "finish_reason", "planned_reason", "versions")

    def __init__(self, call: Call, plan: Plan, *, prompt_tokens: int) -> None:
        super().__init__(tokens=plan.content.length, work=plan.work, prompt_tokens=prompt_tokens)
        self.call = call
        self.content = plan.content
        self.planned_reason = plan.finish_reason
        self.finish_reason: str | None = None
        self.versions: list[tuple[str, int]] = []
        """(weights, first token made with them), in order."""


class Call:
    """One request to a generation route: `n` completions for each of its prompts, prompt after prompt."""

    __slots__ = (
        "abandoned_tokens",
        "abort_ids",
        "action",
        "ask",
        "completions",
        "left",
        "on_completion",
        "on_end",
        "record",
        "request_id",
    )

    def __init__(
        self, *, ask: Ask, request_id: str, abort_ids: list[str], record: Record, action: Action | None
    ) -> None:
        self.ask = ask
        self.request_id = request_id
        self.abort_ids = abort_ids
        """One for each prompt."""
        self.record = record
        self.action = action
        self.completions: list[Completion] = []
        self.left = 0
        self.abandoned_tokens: int | None = None
        """Tokens decoded when the caller gave it up, where a scripted fault kept it going."""
        self.on_completion: Callable[[Completion], None] | None = None
        self.on_end: Callable[[Call], None] | None = None

    @property
    def aborted(self) -> bool:
        return any(completion.finish_reason == ABORT for completion in self.completions)


class Engine:
    """Decodes calls."""

    def __init__(self, settings: SimulatorSettings, loop: asyncio.AbstractEventLoop) -> None:
        self._settings = settings
        self._loop = loop
        self.decoder = Decoder(settings)
        rate = fixed_rate if settings.latency is not None else batch_rate(settings.tokens_per_s, settings.batch_half)
        self._batch: BatchModel[Completion] = BatchModel(rate=rate, limit=settings.batch_limit)
        self._by_id: dict[str, list[Completion]] = {}
        self._timer: asyncio.Handle | None = None
        self._timer_due = 0.0
        self._drained: list[Callable[[], None]] = []
        self._stale_load: tuple[int, int] | None = None
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._ended_tokens = 0
        self.cache_queries = 0
        self.cache_hits = 0
        self.prompt_tokens = 0
        self.peak_in_flight = 0
        self.paused = False
        self.dead = False
        self.weight_version = FIRST_WEIGHTS

    # -- what can be asked

    @property
    def running(self) -> int:
        return self._batch.running

    @property
    def waiting(self) -> int:
        return self._batch.waiting

    @property
    def load(self) -> tuple[int, int]:
        """(running, waiting) as the gauges show them: an engine that stands still does not report."""
        return self._stale_load or (self.running, self.waiting)

    def generated_tokens(self) -> int:
        return self._ended_tokens + sum(map(self.decoded, self._batch.sequences()))

    def cache_tokens(self) -> int:
        """Tokens held for the running requests, prompts included."""
        held = (c.prompt_tokens + self.decoded(c) for c in self._batch.sequences() if c.stage is Stage.RUNNING)
        return sum(held)

    def decoded(self, completion: Completion) -> int:
        return self._batch.decoded(self._loop.time(), completion)

    # -- what can be done

    def submit(self, call: Call, plans: Iterable[Plan]) -> None:
        """Starts `call`: one plan for each of its completions, prompt after prompt."""
        ask = call.ask
        now = self._loop.time()
        rows = [row for row in range(len(ask.prompts)) for _ in range(ask.n)]
        for row, plan in zip(rows, plans, strict=True):
            completion = Completion(call, plan, prompt_tokens=len(ask.prompts[row]))
            completion.versions.append((self.weight_version, 0))
            call.completions.append(completion)
            self._by_id.setdefault(call.abort_ids[row], []).append(completion)
            self._batch.add(now, completion)
        call.left = len(call.completions)
        for ids in ask.prompts:
            self._look_up(ids, ask.n)
        self.peak_in_flight = max(self.peak_in_flight, self.running + self.waiting)
        self._arm()

    def abort(self, ids: Iterable[str]) -> None:
        """Ends what runs under exactly these ids; others are ignored and leave no mark."""
        found = [completion for name in set(ids) for completion in self._by_id.get(name, ())]
        self._abort(found)

    def abort_all(self) -> None:
        self._abort(self._batch.sequences())

    def drop(self, call: Call) -> None:
        """The caller has gone: ends the call without a word. No effect on a call that has ended."""
        if not call.left:
            return
        call.left = 0
        call.on_completion = call.on_end = None
        now = self._loop.time()
        for completion in call.completions:
            if self._batch.remove(now, completion):
                completion.finish_reason = ABORT
        self._forget(call)
        self._settled()

    def pause(self, mode: PauseMode, *, clear_cache: bool, done: Callable[[], None]) -> None:
        """Stops; `done` is called when the pause is complete."""
        self._batch.close(self._loop.time(), freeze=mode is not PauseMode.WAIT)
        self.paused = True
        if mode is PauseMode.ABORT:
            self.abort_all()
        if clear_cache:
            self._cache.clear()
        self._stale_load = None if mode is PauseMode.WAIT else (self.running, self.waiting)
        if mode is PauseMode.WAIT and self.running:
            self._drained.append(done)
        else:
            done()
        self._arm()

    def resume(self) -> None:
        self._batch.open(self._loop.time())
        self.paused = False
        self._stale_load = None
        self._arm()
        self._settled()

    def reset_prefix_cache(self) -> bool:
        """False, and no effect, while requests run."""
        if self.running:
            return False
        self._cache.clear()
        return True

    def set_weight_version(self, version: str) -> None:
        """Tokens from now on carry `version`."""
        self.weight_version = version
        for completion in self._batch.sequences():
            start = self.decoded(completion)
            if completion.versions[-1][1] == start:
                completion.versions.pop()
            completion.versions.append((version, start))

    def die(self) -> list[Call]:
        """The engine core is gone: returns the calls that were in flight, none of which will end by itself."""
        self.dead = True
        calls = list({id(c.call): c.call for c in self._batch.sequences()}.values())
        for call in calls:
            self.drop(call)
        return calls

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- within

    def _abort(self, completions: list[Completion]) -> None:
        now = self._loop.time()
        ended: list[Completion] = []
        for completion in completions:
            call = completion.call
            if call.action is not None and call.action.ignore_abort:
                self.abandon(call)
            elif self._batch.remove(now, completion):
                call.record.abandoned = call.record.abandoned or now
                ended.append(completion)
        for completion in ended:
            self._end(completion, ABORT)
        self._settled()

    def abandon(self, call: Call) -> None:
        """The caller wants no more of it, and a scripted fault keeps it going: what is decoded from here is counted."""
        if call.record.abandoned is None:
            call.record.abandoned = self._loop.time()
            call.abandoned_tokens = sum(map(self.decoded, call.completions))

    def _on_timer(self) -> None:
        self._timer = None
        for completion in self._batch.due(self._loop.time()):
            self._end(completion, completion.planned_reason)
        self._settled()

    def _end(self, completion: Completion, reason: str) -> None:
        call = completion.call
        completion.finish_reason = reason
        if call.on_completion is not None:
            call.on_completion(completion)
        if not call.left:
            # That callback dropped the call (a stream that a fault broke off).
            return
        call.left -= 1
        if not call.left:
            self._forget(call)
            if call.on_end is not None:
                call.on_end(call)

    def _forget(self, call: Call) -> None:
        """Takes a call off the books: its abort ids, and its tokens into the total."""
        for name in call.abort_ids:
            others = [c for c in self._by_id.pop(name, ()) if c.call is not call]
            if others:
                self._by_id[name] = others
        record = call.record
        record.tokens = sum(completion.decoded for completion in call.completions)
        record.finish_reasons = [completion.finish_reason or ABORT for completion in call.completions]
        if call.abandoned_tokens is not None:
            record.tokens_after_abort = record.tokens - call.abandoned_tokens
        self._ended_tokens += record.tokens

    def _settled(self) -> None:
        """After any change: arms the timer, and tells who waits for an empty batch."""
        if self._drained and not self.running:
            waiting, self._drained = self._drained, []
            for done in waiting:
                done()
        self._arm()

    def _arm(self) -> None:
        due = self._batch.next_due()
        timer = self._timer
        if timer is not None:
            if due is not None and self._timer_due <= due + _TIMER_SLACK_S:
                # Fires early at worst (the batch has grown since), finds nothing and arms again.
                return
            timer.cancel()
            self._timer = None
        if due is not None:
            self._timer_due = due
            self._timer = self._loop.call_at(due, self._on_timer)

    def _look_up(self, ids: list[int], n: int) -> None:
        """Counts what the prefix cache would have saved: whole blocks of a prompt seen before."""
        key = hash(tuple(ids))
        hits = n - 1
        if key in self._cache:
            self._cache.move_to_end(key)
            hits = n
        else:
            self._cache[key] = None
            if len(self._cache) > CACHED_PROMPTS:
                self._cache.popitem(last=False)
        self.prompt_tokens += n * len(ids)
        self.cache_queries += n * len(ids)
        self.cache_hits += hits * (len(ids) // CACHE_BLOCK * CACHE_BLOCK)


def hung(plan: Plan) -> Plan:
    """The same completion, never done."""
    return Plan(content=plan.content, finish_reason=plan.finish_reason, work=math.inf)
