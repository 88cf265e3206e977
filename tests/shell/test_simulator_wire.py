"""Streams, connections, and the life of a simulated engine."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.simulator_caller import CHAT, COMPLETIONS, GENERATE, Caller, Start, simulators, soon


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with simulators() as started:
        yield started


# -- streams


async def events(caller: Caller, path: str, body: dict[str, Any], request_id: str) -> list[dict[str, Any]]:
    async with caller.session.post(
        caller.sim.url + path, json={**body, "stream": True}, headers={"X-Request-Id": request_id}
    ) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = (await response.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_a_stream_carries_the_tokens_of_the_whole_answer_once_and_in_order(start: Start) -> None:
    whole, caller = await start(latency=0.0), await start(latency=0.2, stream_interval_s=0.01)
    body = {"prompt": [1, 2], "max_tokens": 400, "min_tokens": 200, "return_token_ids": True, "logprobs": 0}
    chunks = await events(caller, COMPLETIONS, {**body, "stream_options": {"include_usage": True}}, "X")
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    expected = await whole.complete("X", **body)
    assert len(choices) > 2
    assert [i for choice in choices for i in choice["token_ids"]] == expected["token_ids"]
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    for name, values in expected["logprobs"].items():
        assert [value for choice in choices for value in choice["logprobs"][name]] == values
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [expected["finish_reason"]]
    assert [choice["prompt_token_ids"] for choice in choices] == [[1, 2]] + [None] * (len(choices) - 1)
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["prompt_tokens"]) == ([], 2)


async def test_a_chat_stream_begins_with_the_role_and_ends_with_the_reason(start: Start) -> None:
    caller = await start(latency=0.05, lengths="fixed", mean_tokens=50)
    body = {"messages": [{"role": "user", "content": "x"}], "return_token_ids": True, "logprobs": True, "n": 2}
    chunks = await events(caller, CHAT, body, "X")
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["prompt_token_ids"] == [257, 259, 120, 260]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index in (0, 1):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert sum(len(choice.get("token_ids") or ()) for choice in choices) == 50
        assert choices[-1]["finish_reason"] == "stop"


async def test_a_generate_stream_tells_the_weights_at_its_end(start: Start) -> None:
    caller = await start(latency=0.05, lengths="fixed", mean_tokens=50)
    chunks = await events(caller, GENERATE, {"token_ids": [1], "sampling_params": {"logprobs": 0}}, "X")
    assert chunks[-1]["choices"][0]["weight_versions"] == [{"version": "default", "start": 0, "end": 50}]
    assert chunks[-1]["request_id"] == "generate-tokens-X"


async def test_an_aborted_stream_ends_with_the_reason(start: Start) -> None:
    caller = await start(tokens_per_s=500.0)
    stream = soon(events(caller, COMPLETIONS, {"prompt": [1], "max_tokens": 4000, "ignore_eos": True}, "X"))
    await caller.running(1)
    while not await caller.metric("generation_tokens_total"):
        pass
    await caller.post("/abort_requests", {"request_ids": ["cmpl-X-0"]})
    assert (await stream)[-1]["choices"][0]["finish_reason"] == "abort"


# -- connections and life


JSON = b"Content-Type: application/json\r\n"


async def raw(caller: Caller, data: bytes) -> bytes:
    """Sends bytes and reads until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(caller.sim.url.rpartition(":")[2]))
    writer.write(data)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_pipelined_requests_are_answered_in_order_on_one_connection(start: Start) -> None:
    caller = await start(latency=0.02)
    body = b'{"prompt":"a"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + JSON + b"X-Request-Id: %b\r\nContent-Length: 14\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = await raw(caller, head % b"one" + body + head % b"two" + body + last)
    places = [answer.index(part) for part in (b"cmpl-one", b"cmpl-two", b'{"version"')]
    assert places == sorted(places)
    assert answer.count(b"HTTP/1.1 200 OK") == 3


async def test_a_chunked_body_in_pieces_is_read(start: Start) -> None:
    caller = await start(latency=0.0)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + JSON + b"Connection: close\r\nTransfer-Encoding: chunked\r\n"
    )
    answer = await raw(caller, head + b'Expect: 100-continue\r\n\r\n7\r\n{"promp\r\n7\r\nt":"a"}\r\n0\r\n\r\n')
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


async def test_bytes_that_are_no_http_are_refused_and_an_open_request_ends(start: Start) -> None:
    caller = await start(latency=3600.0)
    assert (await raw(caller, b"garbage\r\n\r\n")).startswith(b"HTTP/1.1 400 Bad Request\r\n")
    body = b'{"prompt":"a"}'
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + JSON + b"Content-Length: 14\r\n\r\n" + body
    assert b" 400 " in await raw(caller, request + b"garbage\r\n\r\n")
    await caller.running(0)
    assert caller.sim.stats()["outcomes"]["disconnected"] == 1


async def test_unknown_paths_and_methods_answer_as_fastapi_does(start: Start) -> None:
    caller = await start()
    assert await caller.get("/nope") == (404, {"detail": "Not Found"})
    assert await caller.get(COMPLETIONS) == (405, {"detail": "Method Not Allowed"})


async def test_an_idle_connection_is_closed_after_a_while(start: Start) -> None:
    caller = await start(keepalive_s=0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(caller.sim.url.rpartition(":")[2]))
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
    writer.close()


async def test_a_killed_engine_cuts_everybody_and_comes_back_on_its_port_as_new(start: Start) -> None:
    caller = await start(latency=3600.0)
    await caller.post("/update_weight_version", {"new_version": "7"})
    call = soon(caller.complete())
    await caller.running(1)
    await caller.sim.kill()
    with pytest.raises(aiohttp.ClientError):
        await call
    with pytest.raises(aiohttp.ClientError):
        await caller.get("/health")
    await caller.sim.start()
    assert await caller.get("/weight_info") == (200, {"weight_version": "default"})
    assert caller.sim.stats()["outcomes"]["cut"] == 1
    assert caller.sim.engine.running == 0


async def test_a_stopped_engine_answers_who_is_in_flight(start: Start) -> None:
    caller = await start(latency=3600.0)
    calls = [soon(caller.complete()), soon(caller.complete(stream=False, n=2))]
    await caller.running(3)
    await caller.sim.stop()
    assert [choice["finish_reason"] for choice in await asyncio.gather(*calls)] == ["abort", "abort"]


SERVE = "import sys; from rollout_service.simulator import *; sys.exit(serve(SimulatorSettings(port=int(sys.argv[1]))))"


async def test_a_process_tells_its_address_and_ends_on_sigterm() -> None:
    process = subprocess.Popen([sys.executable, "-c", SERVE, "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        url = line.split()[2]
        async with aiohttp.ClientSession() as session:
            body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
            call = soon(session.post(url + COMPLETIONS, json=body))
            while True:
                async with session.get(url + "/sim/stats") as response:
                    if (await response.json())["running"]:
                        break
            process.send_signal(signal.SIGTERM)
            async with await call as response:
                assert (await response.json())["choices"][0]["finish_reason"] == "abort"
        assert await asyncio.to_thread(process.wait, 30) == 0
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)


async def test_an_address_that_is_taken_is_one_line_and_exit_2(start: Start) -> None:
    port = (await start()).sim.url.rpartition(":")[2]
    command = [sys.executable, "-c", SERVE, port]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"simulate-engine: cannot listen on 127.0.0.1:{port}:")
    assert len(done.stderr.splitlines()) == 1
