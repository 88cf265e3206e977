"""The engine of the benchmarks: what its journal says is what figures are made of."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.engine import Connection, Engine, Entry, How

LONG_S = 60.0


class Caller:
    """One connection to the engine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, name: str, **body: Any) -> None:
        self.call("POST", "/v1/completions", {"prompt": [1, 2, 3], **body}, f"X-Request-Id: {name}\r\n")

    def call(self, method: str, path: str, body: Any = None, headers: str = "") -> None:
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}content-length: {len(content)}\r\n\r\n"
        self._writer.write(head.encode() + content)

    async def answer(self) -> bytes:
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.decode().splitlines() if line.startswith("content-length"))
        return await self._reader.readexactly(int(length.partition(":")[2]))

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[Callable[[], Awaitable[Caller]]]:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine, loop), "127.0.0.1", 0)
    callers: list[Caller] = []

    async def connect() -> Caller:
        callers.append(Caller(*await asyncio.open_connection(*server.sockets[0].getsockname())))
        return callers[-1]

    try:
        yield connect
    finally:
        for caller in callers:
            await caller.close()
        server.close()
        await server.wait_closed()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_an_answer_has_ids_and_logprobs_of_the_length_asked_for_and_echoes_the_prompt() -> None:
    async with serving(Engine(latency_s=0.0, tokens=64)) as connect:
        caller = await connect()
        caller.send("a", max_tokens=5)
        answer = json.loads(await caller.answer())
    choice = answer["choices"][0]
    assert answer["id"] == "cmpl-a"
    assert choice["finish_reason"] == "length"
    assert choice["prompt_token_ids"] == [1, 2, 3]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 5
    assert answer["usage"]["completion_tokens"] == 5


async def test_an_abort_by_id_answers_at_once_with_what_was_decoded_and_leaves_the_others_alone() -> None:
    engine = Engine(latency_s=LONG_S)
    async with serving(engine) as connect:
        first, second, third = await connect(), await connect(), await connect()
        first.send("one")
        second.send("two")
        await until(lambda: len(engine.running) == 2)
        third.call("POST", "/abort_requests", {"request_ids": ["cmpl-one-0", "cmpl-unknown-0"]})
        answer = json.loads(await first.answer())
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert list(engine.running) == [b"cmpl-two-0"]
    ended = {entry.id: entry.how for entry in engine.journal}
    assert ended["one"] is How.ABORTED


async def test_a_closed_connection_ends_its_request() -> None:
    engine = Engine(latency_s=LONG_S)
    async with serving(engine) as connect:
        caller = await connect()
        caller.send("gone")
        await until(lambda: bool(engine.running))
        await caller.close()
        await until(lambda: not engine.running)
    (entry,) = engine.journal
    assert entry.how is How.CLOSED
    assert entry.tokens < entry.length


async def test_requests_that_arrive_in_one_piece_or_in_two_are_answered_in_order() -> None:
    async with serving(Engine(latency_s=0.01)) as connect:
        caller = await connect()
        caller.send("a")
        caller.send("b")
        assert [json.loads(await caller.answer())["id"] for _ in range(2)] == ["cmpl-a", "cmpl-b"]


async def test_forgetting_keeps_what_runs_and_begins_the_stagger_anew() -> None:
    engine = Engine(latency_s=LONG_S, stagger=1, seed=1)
    first = engine.begin(b"a", b"[1]", None)
    engine.end(first, How.ANSWERED)
    running = engine.begin(b"b", b"[1]", None)
    assert first.duration < LONG_S
    assert running.duration == LONG_S
    engine.forget()
    assert list(engine.journal) == [running]
    assert engine.begin(b"c", b"[1]", None).duration < LONG_S


def test_lengths_spread_as_asked_take_their_time_and_are_cut_by_max_tokens() -> None:
    engine = Engine(latency_s=4.0, spread=0.5, tokens=100)
    entries = [engine.begin(b"", b"[1]", None) for _ in range(500)]
    assert {50 <= entry.length <= 150 for entry in entries} == {True}
    assert min(entry.length for entry in entries) < 60
    assert max(entry.length for entry in entries) > 140
    assert all(abs(entry.duration - 4.0 * entry.length / 100) < 1e-9 for entry in entries)
    assert max(engine.begin(b"", b"[1]", 64).length for _ in range(100)) == 64


def test_tokens_follow_the_elapsed_time_and_never_pass_the_length() -> None:
    started = time.monotonic()
    entry = Entry(id="a", prompt="[1]", started=started, duration=2.0, length=64)
    assert [entry.decoded(started + seconds) for seconds in (-1.0, 0.0, 0.5, 1.0, 2.0, 9.0)] == [0, 0, 16, 32, 64, 64]


def test_jitter_changes_durations_and_no_length() -> None:
    engine = Engine(latency_s=2.0, jitter=0.25)
    entries = [engine.begin(b"", b"[1]", None) for _ in range(500)]
    assert {entry.length for entry in entries} == {64}
    assert 1.5 <= min(entry.duration for entry in entries) < 1.6
    assert 2.4 < max(entry.duration for entry in entries) <= 2.5
