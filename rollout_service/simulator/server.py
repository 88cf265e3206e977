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

from .answers import abort_ids, whole_answer
from .bodies import Ask, Kind, Refusal, read
from .content import Content, scripted_ring
from .decoder import Plan, completion_key, seeded_key
from .engine import Call, Engine, hung
from .faults import Action, FaultPlan, spoil
from .journal import Journal, Outcome
from .settings import SimulatorSettings
from .streams import Stream
from .wire import Exchange

MALFORMED = b'{"id": "cmpl-malformed", "choices": [{"text": not json'
_REQUEST_ID = b"x-request-id"


def dead() -> Refusal:
    """What every caller gets once the engine core is gone."""
    message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    return Refusal(500, message, kind="InternalServerError")


def no_scale_out() -> Refusal:
    """What the `/inference` routes answer without --enable-scale-out."""
    message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
    return Refusal(403, message, kind="PermissionDeniedError")


class Generation:
    """Serves the three generation routes from one engine."""

    def __init__(
        self,
        settings: SimulatorSettings,
        engine: Engine,
        faults: FaultPlan,
        journal: Journal,
        *,
        changed: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._faults = faults
        self._journal = journal
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._named = 0
        self._open: dict[Call, tuple[Exchange, Stream | None]] = {}

    def serve(self, kind: Kind, exchange: Exchange) -> None:
        """Takes one request; its answer is sent when it is due."""
        record = self._journal.open(kind, exchange.body, self._loop.time())
        try:
            if kind is Kind.GENERATE and not self._settings.scale_out:
                raise no_scale_out()
            if self._engine.dead:
                raise dead()
            ask = read(kind, exchange.body, self._settings)
        except Refusal as refusal:
            exchange.answer_json(refusal.body, status=refusal.status, close=refusal.status >= 500)
            self._journal.close(record, Outcome.ANSWERED, self._loop.time(), status=refusal.status)
            return
        header = exchange.headers.get(_REQUEST_ID)
        record.request_id = header.decode("latin-1") if header else ask.request_id or self._new_id()
        record.abort_ids = abort_ids(kind, record.request_id, len(ask.prompts))
        record.prompt = ask.prompts
        action = self._faults.pick(ask.prompt_text()) if self._faults else None
        call = Call(ask=ask, request_id=record.request_id, abort_ids=record.abort_ids, record=record, action=action)
        if action is None:
            self._start(call, exchange)
            return
        record.fault = True
        self._journal.faults += 1
        if action.delay:
            self._start_later(call, exchange, action)
        else:
            self._start(call, exchange)

    def die(self) -> None:
        """The engine core is gone: everybody in flight gets a 500, a stream an error event."""
        error = dead().body
        for call in self._engine.die():
            exchange, stream = self._open.pop(call)
            if stream is not None:
                stream.fail(error)
            else:
                exchange.answer_json(error, status=500, close=True)
            self._journal.close(call.record, Outcome.ANSWERED, self._loop.time(), status=500)
        self._changed()

    def cut_all(self) -> None:
        """The process is gone: nothing that is in flight will ever be answered."""
        for call, (exchange, stream) in list(self._open.items()):
            if stream is not None:
                stream.stop()
            exchange.cut()
            self._engine.drop(call)
            self._close(call, Outcome.CUT)
        self._engine.stop()

    # -- one call

    def _start_later(self, call: Call, exchange: Exchange, action: Action) -> None:
        timer = self._loop.call_later(action.delay, self._start, call, exchange)
        self._open[call] = (exchange, None)

        def hung_up() -> None:
            call.record.abandoned = self._loop.time()
            if not action.ignore_disconnect:
                timer.cancel()
                self._close(call, Outcome.DISCONNECTED)

        exchange.on_close = hung_up

    def _start(self, call: Call, exchange: Exchange) -> None:
        if call.record.outcome is not Outcome.RUNNING:
            return
        action = call.action
        if action is not None and action.status is not None:
            error = Refusal(action.status, action.message, kind="InternalServerError")
            exchange.answer_json(error.body, status=action.status, close=action.status >= 500)
            self._close(call, Outcome.ANSWERED, status=action.status)
            return
        if action is not None and action.cut and not call.ask.stream:
            exchange.cut()
            self._close(call, Outcome.CUT)
            return
        if call.record.abandoned is not None:
            # The caller hung up during the delay and a fault lets the engine begin all the same.
            call.abandoned_tokens = 0
        exchange.on_close = lambda: self._hung_up(call)
        call.on_end = self._ended
        self._open[call] = (exchange, None)
        self._engine.submit(call, self._plans(call))
        if call.ask.stream:
            self._stream(call, exchange)
        self._changed()

    def _stream(self, call: Call, exchange: Exchange) -> None:
        stream = Stream(
            call,
            exchange,
            self._engine,
            model=self._settings.model,
            created=int(time.time()),
            interval_s=self._settings.stream_interval_s,
            on_broken=self._broken,
        )
        call.on_completion = stream.completion_ended
        self._open[call] = (exchange, stream)
        stream.begin()

    def _plans(self, call: Call) -> Iterator[Plan]:
        ask, decoder, action = call.ask, self._engine.decoder, call.action
        for row, limit in enumerate(ask.limits):
            for index in range(ask.n):
                plan = decoder.plan(
                    self._key(call, row, index), limit=limit, min_tokens=ask.min_tokens, ignore_eos=ask.ignore_eos
                )
                if action is not None and action.text is not None:
                    content = Content.whole(scripted_ring(action.text))
                    plan = Plan(content=content, finish_reason="stop", work=decoder.work(content.length))
                yield hung(plan) if action is not None and action.hang else plan

    def _key(self, call: Call, row: int, index: int) -> str:
        ask: Ask = call.ask
        if ask.seed is not None:
            return seeded_key(self._settings.seed, request_seed=ask.seed, prompt_ids=ask.prompts[row], index=index)
        return completion_key(self._settings.seed, request_id=call.request_id, row=row, index=index)

    def _ended(self, call: Call) -> None:
        """The last completion of a call has ended, by itself or by an abort."""
        exchange, stream = self._open[call]
        action = call.action
        outcome = Outcome.ABORTED if call.aborted else Outcome.ANSWERED
        if exchange.gone:
            self._close(call, Outcome.DISCONNECTED)
            return
        if stream is not None:
            stream.finish()
        else:
            answer = whole_answer(call, model=self._settings.model, created=int(time.time()))
            if action is not None and action.spoils:
                answer = spoil(answer, action)
            if action is not None and action.malformed:
                answer = MALFORMED
            if action is not None and action.truncate:
                answer = answer[: len(answer) // 2]
            if action is not None and action.cut_body:
                exchange.answer_part(answer)
                outcome = Outcome.CUT
            else:
                exchange.answer(answer)
        self._close(call, outcome, status=200)

    def _hung_up(self, call: Call) -> None:
        _, stream = self._open[call]
        if stream is not None:
            stream.stop()
        if call.action is not None and call.action.ignore_disconnect:
            self._engine.abandon(call)
            return
        call.record.abandoned = call.record.abandoned or self._loop.time()
        self._engine.drop(call)
        self._close(call, Outcome.DISCONNECTED)

    def _broken(self, call: Call) -> None:
        """A stream that a fault broke off."""
        self._engine.drop(call)
        self._close(call, Outcome.CUT)

    def _close(self, call: Call, outcome: Outcome, *, status: int | None = None) -> None:
        self._open.pop(call, None)
        self._journal.close(call.record, outcome, self._loop.time(), status=status)
        self._changed()

    def _new_id(self) -> str:
        """vLLM draws one; here it follows from the seed, so that a run can be repeated."""
        self._named += 1
        return hashlib.blake2b(f"{self._settings.seed}:id:{self._named}".encode(), digest_size=8).hexdigest()
