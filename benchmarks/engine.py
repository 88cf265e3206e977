"""A lean engine: it answers like a vLLM server, after a set time, and costs so little that it is not what is measured.

What always holds: every request to `/v1/completions` is one entry of the journal and ends in exactly one way: answered
after its duration, aborted by id (answered at once with what was decoded), or closed with its connection, when nothing
more is decoded for it. A request decodes at `tokens / latency` tokens a second from its arrival, so what it had at any
moment follows from the elapsed time. Times are CLOCK_MONOTONIC, the same for every process of the machine. Completion
tokens and logprobs are canned: the same bytes for the same length, in the shape and the size of vLLM's.

It is no simulator: nothing queues, nothing waits for a batch, and there is no chat, no streaming, no pausing.

    python -m benchmarks.engine [--port 0] [--latency 2] [--spread 0.5] [--tokens 64] [--stagger N] [--jitter 0.25]

`GET /journal` is the journal as JSON lines, oldest first (see `Entry`); `DELETE /journal` forgets what has ended and
begins a new run. With `--stagger N` each of the first N requests of a run takes a random part of its duration: N
requests that come at once would else end in one wave every `latency` seconds for the whole run, and a count of waves in
a window is no rate. With `--jitter 0.25` durations vary by a quarter and lengths do not: whatever a client once held up
would else come back as a wave for ever.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import re
import signal
import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop

MODEL = "simulated"
MAX_MODEL_LEN = 131_072
LOGPROBS_MODE = "processed_logprobs"
BACKLOG = 8192
"""Thousands of connections come in one instant."""
KEPT_ENTRIES = 500_000
"""Of the journal: minutes at full throttle. The oldest are forgotten first."""
KEPT_ANSWERS = 4096
"""Prepared answers, one a prompt and length; a run has few prompts."""
MAX_REQUEST = 64 * 2**20
ALPHABET = "abcdefghijklmnopqrstuvwxyz"

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_REQUEST_ID = re.compile(rb"(?i)\r\nx-request-id: *([^\r]+)")
_CHUNKED = re.compile(rb"(?i)\r\ntransfer-encoding:")
_CLOSE = re.compile(rb"(?i)\r\nconnection: *close")
_PROMPT = re.compile(rb'"prompt": ?(\[[\d, ]+\])')
_MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')


class How(StrEnum):
    """How a request ended."""

    RUNNING = "running"
    """Not yet."""
    ANSWERED = "answered"
    """Its duration was over."""
    ABORTED = "aborted"
    """By id."""
    CLOSED = "closed"
    """The caller closed the connection."""


class Entry(msgspec.Struct, gc=False):
    """One request of the journal. Times are seconds of CLOCK_MONOTONIC."""

    id: str
    """The X-Request-Id header, or a number of the engine's own."""
    prompt: str
    """The prompt's ids as they came, JSON text."""
    started: float
    """When it had arrived whole."""
    duration: float
    """Seconds it takes when nobody stops it."""
    length: int
    """Tokens it makes when nobody stops it."""
    how: How = How.RUNNING
    ended: float | None = None
    tokens: int = 0
    """Decoded when it ended; of one that runs, until the journal was read."""

    def decoded(self, now: float) -> int:
        """Tokens it has at `now`, a time before its end."""
        if self.duration <= 0:
            return self.length
        return min(self.length, int(self.length * max(0.0, now - self.started) / self.duration))


class Engine:
    """What runs, and what has run."""

    def __init__(
        self,
        *,
        latency_s: float,
        spread: float = 0.0,
        tokens: int = 64,
        stagger: int = 0,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> None:
        """`spread`: lengths, and durations with them, are uniform in 1 - spread to 1 + spread times the mean."""
        self.latency_s, self.spread, self.tokens = latency_s, spread, tokens
        self.weight_version = "default"
        self.generated = 0
        self.running: dict[bytes, Connection] = {}
        """By the id that aborts it."""
        self.journal: deque[Entry] = deque(maxlen=KEPT_ENTRIES)
        self._random = random.Random(seed)
        self._jitter = jitter
        self._stagger = self._to_stagger = stagger
        self._answers: dict[tuple[bytes, int, bool, int], tuple[bytes, bytes]] = {}
        self._numbers = 0

    def begin(self, request_id: bytes, prompt: bytes, limit: int | None) -> Entry:
        """A request has arrived; `limit`: its max_tokens."""
        if not request_id:
            self._numbers += 1
            request_id = b"r%d" % self._numbers
        length = self.tokens
        if self.spread:
            length = max(1, round(length * self._random.uniform(1 - self.spread, 1 + self.spread)))
        length = length if limit is None else min(length, limit)
        duration = self.latency_s * length / self.tokens
        if self._jitter:
            duration *= self._random.uniform(1 - self._jitter, 1 + self._jitter)
        if self._to_stagger:
            self._to_stagger -= 1
            duration *= self._random.random()
        entry = Entry(request_id.decode("latin-1"), prompt.decode("ascii"), time.monotonic(), duration, length)
        self.journal.append(entry)
        return entry

    def end(self, entry: Entry, how: How) -> None:
        entry.ended = now = time.monotonic()
        entry.how = how
        entry.tokens = entry.length if how is How.ANSWERED else entry.decoded(now)
        self.generated += entry.tokens

    def answer(self, entry: Entry) -> bytes:
        """The HTTP answer of a request that has ended."""
        name = entry.id.encode("latin-1")
        key = (entry.prompt.encode(), entry.tokens, entry.how is How.ABORTED, len(name))
        parts = self._answers.get(key)
        if parts is None:
            if len(self._answers) >= KEPT_ANSWERS:
                self._answers.clear()
            reason = "abort" if entry.how is How.ABORTED else "length"
            parts = self._answers[key] = _answer(entry.prompt, entry.tokens, reason, len(name))
        return b"".join((parts[0], name, parts[1]))

    def lines(self) -> bytes:
        """The journal as JSON lines."""
        now = time.monotonic()
        for entry in self.journal:
            if entry.how is How.RUNNING:
                entry.tokens = entry.decoded(now)
        return msgspec.json.Encoder().encode_lines(self.journal)

    def forget(self) -> None:
        running = [entry for entry in self.journal if entry.how is How.RUNNING]
        self.journal.clear()
        self.journal.extend(running)
        self._to_stagger = self._stagger


class Connection(asyncio.Protocol):
    """One connection: one request at a time, the next may already be on its way."""

    __slots__ = ("_abort_id", "_buffer", "_closing", "_engine", "_entry", "_loop", "_timer", "_transport")

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._entry: Entry | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._abort_id = b""
        self._closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._entry is not None:
            self._end(How.CLOSED)

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        while self._entry is None and self._buffer and self._next():
            pass

    def _next(self) -> bool:
        """Serve one request from the buffer; False where there is no whole one."""
        data = self._buffer
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = data[: end + 2]
        length = _LENGTH.search(head)
        stop = end + 4 + (int(length[1]) if length else 0)
        if _CHUNKED.search(head) or stop > MAX_REQUEST:
            self._buffer, self._closing = b"", True
            self._write(_response(501, b"neither chunks nor such lengths here"))
            return False
        if len(data) < stop:
            return False
        self._buffer = data[stop:]
        self._closing = _CLOSE.search(head) is not None
        self._serve(head, data[end + 4 : stop])
        return True

    def _serve(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"POST /v1/completions "):
            self._write(control(self._engine, head, body))
            return
        prompt = _PROMPT.search(body)
        if prompt is None:
            self._write(_response(400, b'{"error":{"message":"prompts are ids here","code":400}}'))
            return
        request_id, limit = _REQUEST_ID.search(head), _MAX_TOKENS.search(body)
        entry = self._entry = self._engine.begin(
            request_id[1].strip() if request_id else b"", prompt[1], int(limit[1]) if limit else None
        )
        self._abort_id = b"cmpl-%b-0" % entry.id.encode("latin-1")
        self._engine.running[self._abort_id] = self
        self._timer = self._loop.call_later(entry.duration, self._end, How.ANSWERED)

    def abort(self) -> None:
        if self._entry is not None:
            self._end(How.ABORTED)

    def _end(self, how: How) -> None:
        entry, timer = self._entry, self._timer
        if entry is None or timer is None:
            return
        timer.cancel()
        self._entry = self._timer = None
        if self._engine.running.get(self._abort_id) is self:
            del self._engine.running[self._abort_id]
        self._engine.end(entry, how)
        if self._transport is not None:
            self._write(self._engine.answer(entry))
            if self._buffer:
                self.data_received(b"")

    def _write(self, answer: bytes) -> None:
        if self._transport is not None:
            self._transport.write(answer)
            if self._closing:
                self._transport.close()


def control(engine: Engine, head: bytes, body: bytes) -> bytes:
    """The answer of any other route."""
    method, target = head.decode("latin-1").split(" ", 2)[:2]
    routes: dict[str, Callable[[], bytes]] = {
        "GET /health": lambda: _response(200, b""),
        "GET /v1/models": lambda: _as_json({"data": [{"id": MODEL, "max_model_len": MAX_MODEL_LEN}]}),
        "GET /server_info": lambda: _as_json({"vllm_config": {"model_config": {"logprobs_mode": LOGPROBS_MODE}}}),
        "GET /metrics": lambda: _response(200, _metrics(engine), "text/plain; charset=utf-8"),
        "GET /weight_info": lambda: _as_json({"weight_version": engine.weight_version}),
        "POST /update_weight_version": lambda: _update(engine, body),
        "POST /detokenize": lambda: _as_json({"prompt": _text(len(json.loads(body)["tokens"]))}),
        "POST /abort_requests": lambda: _abort(engine, body),
        "GET /journal": lambda: _response(200, engine.lines(), "application/jsonl"),
        "DELETE /journal": lambda: _forget(engine),
    }
    route = routes.get(f"{method} {urlsplit(target).path}")
    return _response(404, b'{"detail":"Not Found"}') if route is None else route()


def _abort(engine: Engine, body: bytes) -> bytes:
    # As the real one: nothing named is everything running.
    ids = json.loads(body).get("request_ids") or [name.decode("latin-1") for name in engine.running]
    for name in ids:
        connection = engine.running.get(name.encode("latin-1"))
        if connection is not None:
            connection.abort()
    return _as_json({"status": "aborted", "aborted": len(ids)})


def _update(engine: Engine, body: bytes) -> bytes:
    engine.weight_version = json.loads(body)["new_version"]
    return _as_json({"success": True, "new_version": engine.weight_version})


def _forget(engine: Engine) -> bytes:
    engine.forget()
    return _response(200, b"")


def _metrics(engine: Engine) -> bytes:
    values = {
        "num_requests_running": len(engine.running),
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "num_preemptions_total": 0,
        "generation_tokens_total": engine.generated,
    }
    return "".join(f'vllm:{name}{{model_name="{MODEL}"}} {value}.0\n' for name, value in values.items()).encode()


def _text(length: int) -> str:
    return (ALPHABET * (length // len(ALPHABET) + 1))[:length]


def _answer(prompt: str, length: int, reason: str, id_length: int) -> tuple[bytes, bytes]:
    """What stands before and after the request's id in an answer with `length` tokens, one letter each."""
    text = _text(length)
    logprobs = [round(-0.25 - 3.125 * ((7 * at) % 13) / 13, 12) for at in range(length)]
    prompt_length = prompt.count(",") + 1
    choice = {
        "index": 0,
        "text": text,
        "logprobs": {
            "text_offset": list(range(length)),
            "token_logprobs": logprobs,
            "tokens": list(text),
            "top_logprobs": [{letter: value} for letter, value in zip(text, logprobs, strict=True)],
        },
        "finish_reason": reason,
        "stop_reason": None,
        "token_ids": [ord(letter) for letter in text],
        "prompt_logprobs": None,
        "prompt_token_ids": json.loads(prompt),
        "routed_experts": None,
    }
    usage = {
        "prompt_tokens": prompt_length,
        "total_tokens": prompt_length + length,
        "completion_tokens": length,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    rest = {
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": "benchmarks",
        "usage": usage,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }
    start = b'{"id":"cmpl-'
    tail = b'",' + msgspec.json.encode(rest)[1:]
    head = _head(200, len(start) + id_length + len(tail), "application/json")
    return head + start, tail


def _as_json(value: object) -> bytes:
    return _response(200, msgspec.json.encode(value))


def _response(status: int, body: bytes, content_type: str = "application/json") -> bytes:
    return _head(status, len(body), content_type) + body


def _head(status: int, length: int, content_type: str) -> bytes:
    return (
        f"HTTP/1.1 {status} {'OK' if status == 200 else 'Refused'}\r\nserver: benchmarks\r\n"
        f"content-type: {content_type}\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


async def serve(engine: Engine, host: str, port: int) -> None:
    """Serves until SIGTERM or SIGINT; says where on stdout."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine, loop), host, port, backlog=BACKLOG)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # Collections that walk every connection would be pauses of the engine's; what it makes has no cycles.
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    print(f"engine at http://{host}:{server.sockets[0].getsockname()[1]}", flush=True)
    await stop.wait()


def main() -> None:
    arguments = argparse.ArgumentParser(description="a lean engine for benchmarks")
    arguments.add_argument("--host", default="127.0.0.1")
    arguments.add_argument("--port", type=int, default=0)
    arguments.add_argument("--latency", type=float, default=2.0, help="seconds of a completion of --tokens tokens")
    arguments.add_argument("--spread", type=float, default=0.0, help="0.5: lengths and durations vary by half")
    arguments.add_argument("--tokens", type=int, default=64, help="mean length; a request's max_tokens cuts it")
    arguments.add_argument(
        "--stagger", type=int, default=0, help="first requests of a run that take part of their time"
    )
    arguments.add_argument("--jitter", type=float, default=0.0, help="0.25: durations vary by a quarter")
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    if given.latency < 0 or given.tokens < 1 or not 0 <= given.spread < 1 or not 0 <= given.jitter < 1:
        arguments.error("--latency >= 0, --tokens >= 1, 0 <= --spread < 1, 0 <= --jitter < 1")
    engine = Engine(
        latency_s=given.latency,
        spread=given.spread,
        tokens=given.tokens,
        stagger=given.stagger,
        jitter=given.jitter,
        seed=given.seed,
    )
    uvloop.run(serve(engine, given.host, given.port))


if __name__ == "__main__":
    main()
