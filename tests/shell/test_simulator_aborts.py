"""The simulated engine aborts, pauses, changes weights and shows its load as vLLM does."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.simulator_caller import CHAT, COMPLETIONS, GENERATE, Start, simulators, soon


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with simulators() as started:
        yield started


# -- aborting


@pytest.mark.parametrize(
    ("path", "body", "abort_id"),
    [
        (COMPLETIONS, {"prompt": [1], "return_token_ids": True, "max_tokens": 4000}, "cmpl-X-0"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "return_token_ids": True}, "chatcmpl-X"),
        (GENERATE, {"token_ids": [1], "sampling_params": {}}, "generate-tokens-X"),
    ],
)
@pytest.mark.parametrize("route", ["/abort_requests", "/inference/v1/abort_requests"])
async def test_exactly_its_id_aborts_a_request(start: Start, route: str, path: str, body: Any, abort_id: str) -> None:
    caller = await start(latency=3600.0)
    call = soon(caller.post(path, body, X_Request_Id="X"))
    await caller.running(1)
    for wrong in ("X", "cmpl-X", "cmpl-X-1", "chatcmpl-Y"):
        assert (await caller.post(route, {"request_ids": [wrong]}))[0] == 200
        assert caller.sim.engine.running == 1
    status, answer = await caller.post(route, {"request_ids": [abort_id, "unknown"]})
    assert (status, answer) == (200, {"status": "aborted", "aborted": 2} if route == "/abort_requests" else "")
    status, answer = await call
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")
    assert caller.sim.engine.running == 0


async def test_an_aborted_caller_gets_the_tokens_so_far(start: Start) -> None:
    whole, caller = await start(latency=0.0), await start(tokens_per_s=2000.0)
    call = soon(caller.complete("X", max_tokens=4000, ignore_eos=True))
    await caller.running(1)
    while await caller.metric("generation_tokens_total") < 20:
        pass
    await caller.post("/abort_requests", {"request_ids": ["cmpl-X-0"]})
    partial = await call
    tokens = len(partial["token_ids"])
    assert partial["finish_reason"] == "abort"
    assert 20 <= tokens < 4000
    assert len(partial["logprobs"]["token_logprobs"]) == tokens
    complete = await whole.complete("X", max_tokens=4000, ignore_eos=True)
    assert complete["token_ids"][:tokens] == partial["token_ids"]
    assert await caller.metric("generation_tokens_total") == tokens


async def test_a_request_aborted_before_its_first_token_has_none(start: Start) -> None:
    caller = await start(latency=3600.0)
    call = soon(caller.complete("X"))
    await caller.running(1)
    await caller.post("/abort_requests", {"request_ids": ["cmpl-X-0"]})
    choice = await call
    assert (choice["token_ids"], choice["text"], choice["finish_reason"]) == ([], "", "abort")
    assert choice["logprobs"] == {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


@pytest.mark.parametrize("body", [{"request_ids": []}, {}])
async def test_an_abort_without_ids_aborts_everything_in_dev_mode_only(start: Start, body: dict[str, Any]) -> None:
    caller = await start(latency=3600.0)
    calls = [soon(caller.complete()) for _ in range(5)]
    await caller.running(5)
    await caller.post("/inference/v1/abort_requests", {"request_ids": []})
    assert caller.sim.engine.running == 5
    assert (await caller.post("/abort_requests", body))[1]["aborted"] == 5
    assert {choice["finish_reason"] for choice in await asyncio.gather(*calls)} == {"abort"}
    assert caller.sim.stats()["empty_abort_calls"] == 1


async def test_an_abort_that_comes_first_leaves_no_mark(start: Start) -> None:
    caller = await start(latency=0.0)
    await caller.post("/abort_requests", {"request_ids": ["cmpl-X-0"]})
    assert (await caller.complete("X"))["finish_reason"] != "abort"


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"request_ids": 5}', b'{"request_ids": {"a": 1}}'])
async def test_an_abort_of_the_wrong_shape_is_refused_and_aborts_nobody(start: Start, body: bytes) -> None:
    caller = await start(latency=3600.0)
    call = soon(caller.complete())
    await caller.running(1)
    async with caller.session.post(caller.sim.url + "/abort_requests", data=body) as response:
        assert response.status == 400
    assert caller.sim.engine.running == 1
    call.cancel()


async def test_one_id_aborts_all_of_a_prompt_and_nothing_of_the_next(start: Start) -> None:
    caller = await start(latency=3600.0)
    call = soon(caller.post(COMPLETIONS, {"prompt": [[1], [2]], "n": 2}, X_Request_Id="X"))
    await caller.running(4)
    await caller.post("/abort_requests", {"request_ids": ["cmpl-X-0"]})
    assert caller.sim.engine.running == 2
    assert not call.done()
    await caller.post("/abort_requests", {"request_ids": ["cmpl-X-1"]})
    assert len((await call)[1]["choices"]) == 4


async def test_two_requests_under_one_id_are_served_and_aborted_together(start: Start) -> None:
    caller = await start(latency=3600.0)
    calls = [soon(caller.complete("X")) for _ in range(2)]
    await caller.running(2)
    await caller.post("/abort_requests", {"request_ids": ["cmpl-X-0"]})
    assert [choice["finish_reason"] for choice in await asyncio.gather(*calls)] == ["abort", "abort"]


async def test_the_header_wins_over_the_id_in_the_body(start: Start) -> None:
    caller = await start(latency=0.0)
    body = {"prompt": [1], "request_id": "body"}
    assert (await caller.post(COMPLETIONS, body))[1]["id"] == "cmpl-body"
    assert (await caller.post(COMPLETIONS, body, X_Request_Id="header"))[1]["id"] == "cmpl-header"


@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_aborts(start: Start, stream: bool) -> None:
    caller = await start(latency=3600.0)
    calls = [soon(caller.complete(stream=stream)) for _ in range(20)]
    await caller.running(20)
    for call in calls:
        call.cancel()
    await caller.running(0)
    await asyncio.gather(*calls, return_exceptions=True)
    assert caller.sim.stats()["outcomes"]["disconnected"] == 20
    assert [record["tokens_after_abort"] for record in caller.sim.requests()] == [0] * 20


async def test_the_gauges_fall_back_to_zero_when_all_is_aborted(start: Start) -> None:
    caller = await start(latency=3600.0, max_num_seqs=100)
    calls = [soon(caller.complete(f"r{i}")) for i in range(150)]
    await caller.sim.until(lambda sim: sim.engine.waiting == 50)
    assert (await caller.metric("num_requests_running"), await caller.metric("num_requests_waiting")) == (100, 50)
    assert 0 < await caller.metric("kv_cache_usage_perc") < 1
    await caller.post("/abort_requests", {"request_ids": [f"cmpl-r{i}-0" for i in range(150)]})
    assert len(await asyncio.gather(*calls)) == 150
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
        assert await caller.metric(name) == 0
    assert caller.sim.stats()["outcomes"]["aborted"] == 150


# -- pausing, weights, load


async def test_keep_freezes_what_runs_and_holds_what_comes(start: Start) -> None:
    caller = await start(tokens_per_s=4000.0)
    calls = [soon(caller.complete(max_tokens=4000, ignore_eos=True))]
    await caller.running(1)
    assert await caller.post("/pause?mode=keep") == (200, {"status": "paused"})
    frozen = await caller.metric("generation_tokens_total")
    calls.append(soon(caller.complete()))
    await caller.sim.until(lambda sim: sim.engine.waiting == 1)
    assert (await caller.get("/is_paused"))[1] == {"is_paused": True}
    assert (await caller.get("/health"))[0] == 200
    assert await caller.metric("generation_tokens_total") == frozen
    assert not any(call.done() for call in calls)
    assert await caller.post("/resume") == (200, {"status": "resumed"})
    assert {choice["finish_reason"] for choice in await asyncio.gather(*calls)} <= {"stop", "length"}
    assert (await caller.get("/is_paused"))[1] == {"is_paused": False}


async def test_wait_is_answered_when_the_last_request_has_ended(start: Start) -> None:
    caller = await start(latency=0.2)
    running = soon(caller.complete())
    await caller.running(1)
    pause = soon(caller.post("/pause?mode=wait"))
    await caller.sim.until(lambda sim: sim.engine.paused)
    late = soon(caller.complete())
    await caller.sim.until(lambda sim: sim.engine.waiting == 1)
    assert not pause.done()
    assert await pause == (200, {"status": "paused"})
    assert (await running)["finish_reason"] != "abort"
    assert not late.done()
    await caller.post("/resume")
    assert (await late)["finish_reason"] != "abort"


@pytest.mark.parametrize("path", ["/pause", "/pause?mode=abort"])
async def test_a_pause_aborts_everything_unless_told_otherwise(start: Start, path: str) -> None:
    caller = await start(latency=3600.0)
    call = soon(caller.complete())
    await caller.running(1)
    await caller.post(path)
    assert (await call)["finish_reason"] == "abort"
    assert (await caller.get("/is_paused"))[1] == {"is_paused": True}
    assert (await caller.post("/pause?mode=later"))[0] == 400


async def test_what_waits_in_a_pause_can_be_aborted(start: Start) -> None:
    caller = await start(latency=0.0)
    await caller.post("/pause?mode=keep")
    call = soon(caller.complete("X"))
    await caller.sim.until(lambda sim: sim.engine.waiting == 1)
    await caller.post("/abort_requests", {"request_ids": ["cmpl-X-0"]})
    assert (await call)["finish_reason"] == "abort"


async def test_the_gauges_stand_still_while_the_engine_does(start: Start) -> None:
    caller = await start(latency=3600.0)
    call = soon(caller.complete("X"))
    await caller.running(1)
    await caller.post("/pause?mode=keep")
    await caller.post("/abort_requests", {"request_ids": ["cmpl-X-0"]})
    await call
    assert await caller.metric("num_requests_running") == 1
    await caller.post("/resume")
    assert await caller.metric("num_requests_running") == 0


async def test_a_completion_over_a_weight_update_names_both_weights(start: Start) -> None:
    caller = await start(tokens_per_s=4000.0)
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 4000, "ignore_eos": True}}
    call = soon(caller.post(GENERATE, body))
    await caller.running(1)
    while not await caller.metric("generation_tokens_total"):
        pass
    await caller.post("/pause?mode=keep")
    assert await caller.post("/collective_rpc", {"method": "reload_weights"}) == (200, {"results": [None]})
    assert (await caller.post("/update_weight_version", {"new_version": "7"}))[0] == 200
    assert await caller.get("/weight_info") == (200, {"weight_version": "7"})
    await caller.post("/resume")
    spans = (await call)[1]["choices"][0]["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "7"]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 4000)


async def test_a_weight_version_is_a_text(start: Start) -> None:
    caller = await start()
    for body in ({"new_version": 7}, {}, []):
        assert (await caller.post("/update_weight_version", body))[0] == 400
    assert await caller.get("/weight_info") == (200, {"weight_version": "default"})
    assert (await caller.post("/collective_rpc", {}))[0] == 400


async def test_the_prefix_cache_hits_and_is_cleared_when_nothing_runs(start: Start) -> None:
    caller = await start(latency=3600.0)
    prompt = list(range(40))
    call = soon(caller.complete("X", prompt=prompt, n=3))
    await caller.running(3)
    assert await caller.metric("prefix_cache_hits_total") == 2 * 32
    assert (await caller.post("/reset_prefix_cache"))[1] == {"success": False}
    await caller.post("/abort_requests", {"request_ids": ["cmpl-X-0"]})
    await call
    assert (await caller.post("/reset_prefix_cache"))[1] == {"success": True}
    call = soon(caller.complete("Y", prompt=prompt))
    await caller.running(1)
    assert await caller.metric("prefix_cache_hits_total") == 2 * 32
    call.cancel()


async def test_adapters_load_at_run_time(start: Start) -> None:
    caller = await start()
    status, text = await caller.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/adapters/a"})
    assert (status, text) == (200, "Success: LoRA adapter 'a' added successfully.")
    assert (await caller.post("/v1/load_lora_adapter", {"lora_name": "a"}))[0] == 400


async def test_a_full_batch_slows_everybody_down(start: Start) -> None:
    caller = await start(tokens_per_s=1000.0, batch_half=8.0)
    began = time.monotonic()
    await asyncio.gather(*(caller.complete(max_tokens=50, ignore_eos=True) for _ in range(9)))
    # Alone 0.05 s; in a batch of 9 half as fast. A loaded machine is only later, and the tail of the batch is not
    # all nine: hence not the whole 0.1 s.
    assert time.monotonic() - began > 0.075


async def test_a_latency_is_kept_whatever_the_batch(start: Start) -> None:
    caller = await start(latency=0.1)
    began = time.monotonic()
    await asyncio.gather(*(caller.complete() for _ in range(64)))
    assert time.monotonic() - began >= 0.098
