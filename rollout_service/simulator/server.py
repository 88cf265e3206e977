"""The generation routes: a request in, its answer out.

Always holds:
- Every request has one record in the journal, closed once, with what really happened to it.
- A caller that hangs up ends its completions in the same moment, unless a scripted fault keeps them going; what they
  then still make is answered to nobody.
- Faults cost nothing where none is scripted.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator
from functools import partial

from .answers import abort_ids, whole_answer
from .bodies import Kind, Refusal, read
from .calls import Call, hung
from .content import Content, scripted_ring
from .decoder import Decoder, Plan, seeded_key
from .engine import Engine
from .faults import Action, FaultPlan, spoil
from .journal import Journal, Outcome
from .settings import SimulatorSettings
from .streams import Stream
from .wire import Exchange

MALFORMED = b'{"id": "cmpl-malformed", "choices": [{"text": not json'
_REQUEST_ID = b"x-request-id"
_GENERATE = Kind.GENERATE
_ABORTED, _ANSWERED = Outcome.ABORTED, Outcome.ANSWERED


def dead() -> Refusal:
    """What every caller gets once the engine core is gone."""
    message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    return Refusal(500, message, kind="InternalServerError")


def no_scale_out() -> Refusal:
    """What the `/inference` routes answer without --enable-scale-out."""
    message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
    return Refusal(403, message, kind="PermissionDeniedError")


def no_json() -> Refusal:
    """What a body without its content type gets, whatever is in it."""
    message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
    return Refusal(400, message, kind="Bad Request")


class Generation:
    """Serves the three generation routes from one engine."""

    def __init__(
        self,
        settings: SimulatorSettings,
        faults: FaultPlan,
        journal: Journal,
        *,
        changed: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._faults = faults
        self._journal = journal
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self.engine = Engine(settings, self._loop, on_end=self._ended)
        self._named = 0
        self._open: set[Call] = set()

    def serve(self, kind: Kind, exchange: Exchange) -> None:
        """Takes one request; its answer is sent when it is due."""
        record = self._journal.open(kind, exchange.body, self._loop.time())
        try:
            if kind is _GENERATE and not self._settings.scale_out:
                raise no_scale_out()
            if self.engine.dead:
                raise dead()
            if not exchange.headers.get(b"content-type", b"").lower().startswith(b"application/json"):
                raise no_json()
            ask = read(kind, exchange.body, self._settings)
        except Refusal as refusal:
            exchange.answer_json(refusal.body, status=refusal.status, close=refusal.status >= 500)
            self._journal.close(record, Outcome.ANSWERED, self._loop.time(), status=refusal.status)
            self._changed()
            return
        header = exchange.headers.get(_REQUEST_ID)
        record.request_id = header.decode("latin-1") if header else ask.request_id or self._new_id()
        record.abort_ids = abort_ids(kind, record.request_id, len(ask.prompts))
        record.prompts = ask.prompts
        action = self._faults.pick(ask.prompt_text()) if self._faults else None
        call = Call(ask, exchange, record, action)
        self._open.add(call)
        if action is None:
            self._start(call)
            return
        record.fault = True
        self._journal.faults += 1
        if action.delay:
            self._start_later(call, action)
        else:
            self._start_faulty(call, action)

    def die(self) -> None:
        """The engine core is gone: everybody in flight gets a 500, a stream an error event."""
        error = dead().body
        self.engine.dead = True
        for call in list(self._open):
            if call.stream is not None:
                call.stream.fail(error)
            else:
                call.exchange.answer_json(error, status=500, close=True)
            self.engine.drop(call)
            self._close(call, Outcome.ANSWERED, status=500)

    def cut_all(self) -> None:
        """The process is gone: nothing that is in flight will ever be answered."""
        for call in list(self._open):
            if call.stream is not None:
                call.stream.stop()
            call.exchange.cut()
            self.engine.drop(call)
            self._close(call, Outcome.CUT)

    # -- one call

    def _start(self, call: Call) -> None:
        call.exchange.on_close = partial(self._hung_up, call)
        self.engine.submit(call, self._plans(call))
        if call.ask.stream:
            self._stream(call)
        self._changed()

    def _start_later(self, call: Call, action: Action) -> None:
        timer = self._loop.call_later(action.delay, self._start_faulty, call, action)

        def hung_up() -> None:
            call.record.abandoned = self._loop.time()
            if action.ignore_disconnect:
                # Nothing is decoded yet; all that will be is for nobody.
                call.abandoned_tokens = 0
            else:
                timer.cancel()
                self._close(call, Outcome.DISCONNECTED)

        call.exchange.on_close = hung_up
        self._changed()

    def _start_faulty(self, call: Call, action: Action) -> None:
        if call not in self._open:
            # The engine died during the delay.
            return
        if action.status is not None:
            error = Refusal(action.status, action.message, kind="InternalServerError")
            call.exchange.answer_json(error.body, status=action.status, close=action.status >= 500)
            self._close(call, Outcome.ANSWERED, status=action.status)
        elif action.cut and not call.ask.stream:
            call.exchange.cut()
            self._close(call, Outcome.CUT)
        else:
            self._start(call)

    def _stream(self, call: Call) -> None:
        stream = Stream(
            call,
            self.engine,
            model=self._settings.model,
            created=int(time.time()),
            interval_s=self._settings.stream_interval_s,
            on_broken=self._broken,
        )
        call.stream = stream
        stream.begin()

    def _plans(self, call: Call) -> Iterator[Plan]:
        ask, decoder, action, seed = call.ask, self.engine.decoder, call.action, self._settings.seed
        for row, limit in enumerate(ask.limits):
            for index in range(ask.n):
                if ask.seed is None:
                    key = f"{seed}:{call.request_id}:{row}:{index}"
                else:
                    key = seeded_key(seed, request_seed=ask.seed, prompt_ids=ask.prompts[row], index=index)
                plan = decoder.plan(key, limit, ask.min_tokens, ask.ignore_eos)
                yield plan if action is None else _planned_fault(plan, action, decoder)

    def _ended(self, call: Call) -> None:
        """The last completion of a call has ended, by itself or by an abort."""
        exchange, action = call.exchange, call.action
        outcome = _ABORTED if call.aborted else _ANSWERED
        if exchange.gone:
            self._close(call, Outcome.DISCONNECTED)
            return
        if call.stream is not None:
            call.stream.finish()
        else:
            answer = whole_answer(call, model=self._settings.model, created=int(time.time()))
            if action is None:
                exchange.answer(answer)
            elif action.cut_body:
                exchange.answer_part(answer)
                outcome = Outcome.CUT
            else:
                exchange.answer(_faulty(answer, action))
        self._close(call, outcome, status=200)

    def _hung_up(self, call: Call) -> None:
        if call.stream is not None:
            call.stream.stop()
        if call.action is not None and call.action.ignore_disconnect:
            self.engine.abandon(call)
            return
        call.record.abandoned = call.record.abandoned or self._loop.time()
        self.engine.drop(call)
        self._close(call, Outcome.DISCONNECTED)

    def _broken(self, call: Call) -> None:
        """A stream that a fault broke off."""
        self.engine.drop(call)
        self._close(call, Outcome.CUT)

    def _close(self, call: Call, outcome: Outcome, *, status: int | None = None) -> None:
        self._open.discard(call)
        self._journal.close(call.record, outcome, self._loop.time(), status=status)
        # Calls and completions name each other: untied, they go at once and not at the collector's next round.
        call.exchange.on_close = None
        call.completions = []
        self._changed()

    def _new_id(self) -> str:
        """vLLM draws one; here it follows from the seed, so that a run can be repeated."""
        self._named += 1
        return hashlib.blake2b(f"{self._settings.seed}:id:{self._named}".encode(), digest_size=8).hexdigest()


def _planned_fault(plan: Plan, action: Action, decoder: Decoder) -> Plan:
    if action.text is not None:
        content = Content.whole(scripted_ring(action.text))
        plan = Plan(content, "stop", decoder.work(content.length))
    return hung(plan) if action.hang else plan


def _faulty(answer: bytes, action: Action) -> bytes:
    if action.malformed:
        return MALFORMED
    if action.spoils:
        answer = spoil(answer, action)
    return answer[: len(answer) // 2] if action.truncate else answer
