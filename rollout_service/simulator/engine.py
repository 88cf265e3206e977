"""The engine on the event loop: calls in, completions out, aborts and pauses between.

Always holds:
- One timer for the whole engine, armed for the next completion that will be done; with nothing in flight, none.
- A completion ends once: done, aborted or dropped. A call ends when its last completion has, and only then is it
  forgotten by its abort ids. An abort that finds nothing leaves nothing behind.
- Callbacks run after the batch is consistent again; they may submit, abort or pause.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import StrEnum

from .calls import ABORT, Call, Completion
from .decoder import Decoder, Plan
from .model import BatchModel, Stage, batch_rate, fixed_rate
from .settings import SimulatorSettings

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


class Engine:
    """Decodes calls; `on_end` is told of each that ends without having been dropped."""

    def __init__(
        self, settings: SimulatorSettings, loop: asyncio.AbstractEventLoop, *, on_end: Callable[[Call], None]
    ) -> None:
        self._loop = loop
        self._on_end = on_end
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
        self.cache_hits = 0
        self.prompt_tokens = 0
        self.peak_in_flight = 0
        self.paused = False
        self.dead = False
        """The engine core is gone: the server still answers, with errors."""
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
        running = [c for c in self._batch.sequences() if c.stage is Stage.RUNNING]
        return sum(c.prompt_tokens + self.decoded(c) for c in running)

    def decoded(self, completion: Completion) -> int:
        """Tokens of `completion` so far."""
        return self._batch.decoded(self._loop.time(), completion)

    # -- what can be done

    def submit(self, call: Call, plans: Iterable[Plan]) -> None:
        """Starts `call`: one plan for each of its completions, prompt after prompt."""
        ask = call.ask
        now = self._loop.time()
        versions = ((self.weight_version, 0),)
        coming = iter(plans)
        sooner = False
        for abort_id, ids in zip(call.abort_ids, ask.prompts, strict=True):
            completions = [Completion(call, next(coming), len(ids), versions) for _ in range(ask.n)]
            for completion in completions:
                sooner |= self._batch.add(now, completion)
            call.completions += completions
            if (others := self._by_id.setdefault(abort_id, completions)) is not completions:
                # Another call goes under the same id, which vLLM allows: an abort ends both.
                others += completions
            self._look_up(ids, ask.n)
        call.left = len(call.completions)
        in_flight = self._batch.running + self._batch.waiting
        if in_flight > self.peak_in_flight:
            self.peak_in_flight = in_flight
        if sooner or self._timer is None:
            self._arm()

    def abort(self, ids: Iterable[str]) -> None:
        """Ends what runs under exactly these ids; others are ignored and leave no mark."""
        self._abort([completion for name in set(ids) for completion in self._by_id.get(name, ())])

    def abort_all(self) -> None:
        self._abort(self._batch.sequences())

    def drop(self, call: Call) -> None:
        """The caller has gone: ends the call without a word. No effect on a call that has ended."""
        if not call.left:
            return
        call.left = 0
        call.stream = None
        now = self._loop.time()
        for completion in call.completions:
            if self._batch.remove(now, completion):
                completion.finish_reason = ABORT
        self._forget(call)
        self._settled()

    def abandon(self, call: Call) -> None:
        """The caller wants no more of it, and a scripted fault keeps it going: what is decoded from here is counted."""
        if call.record.abandoned is None:
            call.record.abandoned = self._loop.time()
            call.abandoned_tokens = sum(map(self.decoded, call.completions))

    def pause(self, mode: PauseMode, *, clear_cache: bool, done: Callable[[], None]) -> None:
        """Stops; `done` is called when the pause is complete."""
        self._batch.close(self._loop.time(), freeze=mode is not PauseMode.WAIT)
        self.paused = True
        if mode is PauseMode.ABORT:
            self.abort_all()
        if clear_cache:
            self._cache.clear()
        self._stale_load = None if mode is PauseMode.WAIT else (self.running, self.waiting)
        if mode is PauseMode.WAIT:
            self._drained.append(done)
        else:
            done()
        self._settled()

    def resume(self) -> None:
        self._batch.open(self._loop.time())
        self.paused = False
        self._stale_load = None
        # A pause that still waited for the batch to empty is over too.
        drained, self._drained = self._drained, []
        for done in drained:
            done()
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
            # Weights that made no token of it leave no span.
            made = completion.versions[:-1] if completion.versions[-1][1] == start else completion.versions
            completion.versions = (*made, (version, start))

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

    def _on_timer(self) -> None:
        self._timer = None
        for completion in self._batch.due(self._loop.time()):
            self._end(completion, completion.planned_reason)
        self._settled()

    def _end(self, completion: Completion, reason: str) -> None:
        call = completion.call
        completion.finish_reason = reason
        if call.stream is not None:
            call.stream.completion_ended(completion)
        if not call.left:
            # Dropped, perhaps just now: by a stream that a scripted fault broke off.
            return
        call.left -= 1
        if not call.left:
            self._forget(call)
            self._on_end(call)

    def _forget(self, call: Call) -> None:
        """Takes a call off the books: its abort ids, and its tokens into the total."""
        for name in call.abort_ids:
            completions = self._by_id.pop(name, None)
            if completions is None or len(completions) <= call.ask.n:
                continue
            if others := [c for c in completions if c.call is not call]:
                self._by_id[name] = others
        record = call.record
        record.tokens = sum([completion.decoded for completion in call.completions])
        record.finish_reasons = [completion.finish_reason or ABORT for completion in call.completions]
        if call.abandoned_tokens is not None:
            record.tokens_after_abort = record.tokens - call.abandoned_tokens
        self._ended_tokens += record.tokens

    def _settled(self) -> None:
        """After any change: arms the timer, and tells who waits for an empty batch."""
        if self._drained and not self.running:
            drained, self._drained = self._drained, []
            for done in drained:
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
        tokens = len(ids)
        self.prompt_tokens += n * tokens
        if key in self._cache:
            self._cache.move_to_end(key)
            self.cache_hits += n * (tokens - tokens % CACHE_BLOCK)
            return
        self.cache_hits += (n - 1) * (tokens - tokens % CACHE_BLOCK)
        self._cache[key] = None
        if len(self._cache) > CACHED_PROMPTS:
            self._cache.popitem(last=False)
