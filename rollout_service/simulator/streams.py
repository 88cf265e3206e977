"""Answers sent while they are decoded, as server-sent events.

Always holds: the chunks of a choice carry its tokens in order, each once, the last with the finish_reason; then the
usage where it was asked for, then `[DONE]`. One timer a stream. As in vLLM, a completion aborted before its first
token ends without a chunk of its own.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable

import msgspec

from .answers import FINGERPRINT, answer_id, tokens_json, usage, versions_json
from .bodies import Kind
from .calls import Call, Completion
from .engine import Engine
from .faults import spoil

_encode = msgspec.json.encode


class _Choice:
    """How much of one completion is out."""

    __slots__ = ("completion", "decode", "index", "offset", "sent")

    def __init__(self, index: int, completion: Completion) -> None:
        self.index = index
        self.completion = completion
        self.decode: Callable[[bytes, bool], str] = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.sent = 0
        self.offset = 0


class Stream:
    """One streamed call. `on_broken` is called when a scripted fault has broken it off."""

    def __init__(
        self,
        call: Call,
        engine: Engine,
        *,
        model: str,
        created: int,
        interval_s: float,
        on_broken: Callable[[Call], None],
    ) -> None:
        self._call = call
        self._exchange = call.exchange
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._interval_s = interval_s
        self._on_broken = on_broken
        self._timer: asyncio.TimerHandle | None = None
        self._chunks = 0
        self._choices = {id(c): _Choice(index, c) for index, c in enumerate(call.completions)}
        common = {"id": answer_id(call), "object": "", "created": created, "model": model}
        if call.ask.kind is Kind.COMPLETION:
            common["object"] = "text_completion"
        elif call.ask.kind is Kind.CHAT:
            common["object"] = "chat.completion.chunk"
        else:
            common = {"request_id": answer_id(call), "output_mode": "tokens"}
        self._start = _encode(common)[:-1]

    def begin(self) -> None:
        """Headers, and for chat the chunk that names the role."""
        self._exchange.start_stream()
        if self._call.ask.kind is Kind.CHAT:
            extra = b""
            if self._call.ask.wants_ids:
                extra = b',"prompt_token_ids":%b,"prompt_text":null' % _encode(self._call.ask.prompts[0])
            for index in range(len(self._choices)):
                delta = b'{"role":"assistant","content":""}'
                self._send(b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (index, delta), extra)
                extra = b""
        self._tick()

    def completion_ended(self, completion: Completion) -> None:
        """The last tokens and the finish_reason."""
        choice = self._choices[id(completion)]
        if completion.decoded or completion.call.ask.kind is not Kind.COMPLETION:
            self._advance(choice, completion.decoded)

    def finish(self) -> None:
        """All completions have ended."""
        self.stop()
        if self._call.ask.include_usage:
            self._event(self._start + b',"choices":[],"usage":%b}' % _encode(usage(self._call)))
        self._exchange.send(b"data: [DONE]\n\n")
        self._exchange.end_stream()

    def fail(self, error: object) -> None:
        """The engine died: an error event in a 200, as it cannot be told otherwise any more."""
        self.stop()
        self._event(_encode(error))
        self._exchange.send(b"data: [DONE]\n\n")
        self._exchange.end_stream()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._tick)
        for choice in self._choices.values():
            if choice.completion.finish_reason is None:
                self._advance(choice, self._engine.decoded(choice.completion))

    def _advance(self, choice: _Choice, decoded: int) -> None:
        completion, sent = choice.completion, choice.sent
        ended = completion.finish_reason is not None
        if decoded <= sent and not ended:
            return
        choice.sent = decoded
        text = choice.decode(completion.content.raw(sent, decoded), ended)
        ids, logprobs = tokens_json(completion, sent, decoded, base=choice.offset)
        reason = _encode(completion.finish_reason)
        if completion.call.ask.wants_logprobs and completion.call.ask.kind is Kind.COMPLETION:
            choice.offset += sum(map(len, _strings(completion, sent, decoded)))
        self._send(self._chunk(choice, text, logprobs, ids, reason, first=not sent), self._end(ended))

    def _chunk(self, choice: _Choice, text: str, logprobs: bytes, ids: bytes, reason: bytes, *, first: bool) -> bytes:
        kind, ask = self._call.ask.kind, self._call.ask
        start = b'{"index":%d,"logprobs":%b,"finish_reason":%b,"stop_reason":null,"token_ids":%b,' % (
            choice.index,
            logprobs,
            reason,
            ids,
        )
        if kind is Kind.CHAT:
            return start + b'"delta":{"content":%b}}' % _encode(text)
        if kind is Kind.GENERATE:
            versions = b"null" if choice.completion.finish_reason is None else versions_json(choice.completion)
            return start + b'"routed_experts":null,"sampling_mask":null,"weight_versions":%b}' % versions
        prompt = _encode(ask.prompts[choice.index // ask.n]) if first and ask.wants_ids else b"null"
        return start + b'"text":%b,"prompt_token_ids":%b}' % (_encode(text), prompt)

    def _end(self, ended: bool) -> bytes:
        if not ended or self._call.ask.include_usage or self._call.ask.kind is Kind.GENERATE:
            return b""
        return b',"system_fingerprint":"%b"' % FINGERPRINT.encode()

    def _send(self, choice: bytes, extra: bytes = b"") -> None:
        self._event(self._start + b',"choices":[%b]%b}' % (choice, extra))

    def _event(self, chunk: bytes) -> None:
        if self._exchange.answered:
            return
        action = self._call.action
        if action is not None and action.spoils:
            chunk = spoil(chunk, action)
        if action is not None and action.malformed:
            chunk = b"{malformed"
        event = b"data: %b\n\n" % chunk
        self._chunks += 1
        if action is not None and (action.truncate or action.cut or action.cut_body) and self._chunks > 1:
            if not action.cut:
                self._exchange.send(event[: len(event) // 2])
            self.stop()
            self._exchange.cut()
            self._on_broken(self._call)
            return
        self._exchange.send(event)


def _strings(completion: Completion, start: int, stop: int) -> list[str]:
    """Token strings of start..stop."""
    column = completion.content.fragments((completion.content.ring.strings,), start, stop)[0]
    return msgspec.json.decode(b"[%b]" % column, type=list[str])
