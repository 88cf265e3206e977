"""The simulated engine behaves as vLLM does in asking, aborting, pausing, load and failure."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.simulator import Lengths, LogprobsMode, Simulator, SimulatorSettings
from rollout_service.simulator import __all__ as exported
from rollout_service.simulator.content import EOS, Content, decode_ids, scripted_ring
from rollout_service.simulator.decoder import Decoder
from rollout_service.simulator.model import BatchModel, Sequence, batch_rate, fixed_rate

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
Answer = tuple[int, Any]


class Caller:
    """A simulator and a client of it."""

    def __init__(self, sim: Simulator, session: aiohttp.ClientSession) -> None:
        self.sim = sim
        self.session = session

    async def post(self, path: str, body: object = None, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(self.sim.url + path, json=body, headers=named) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def get(self, path: str, **headers: str) -> Answer:
        async with self.session.get(self.sim.url + path, headers=headers) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else text

    async def complete(self, request_id: str | None = None, **body: Any) -> dict[str, Any]:
        """A completion with ids and logprobs; its only choice."""
        asked = {"prompt": [72, 105], "return_token_ids": True, "logprobs": 0, "max_tokens": 32, **body}
        headers = {"X_Request_Id": request_id} if request_id else {}
        status, answer = await self.post(COMPLETIONS, asked, **headers)
        assert status == 200, answer
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    async def running(self, requests: int) -> None:
        await self.sim.until(lambda sim: sim.engine.running == requests)

    async def metric(self, name: str) -> float:
        _, page = await self.get("/metrics")
        lines = [line for line in page.splitlines() if line.startswith(f"vllm:{name}{{")]
        return float(lines[0].split()[-1])


Start = Callable[..., Awaitable[Caller]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts simulators; the default one answers in no time and keeps each completion until it is told not to."""
    async with AsyncExitStack() as stack:

        async def started(**fields: Any) -> Caller:
            sim = await stack.enter_async_context(Simulator(SimulatorSettings(**fields)))
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
            return Caller(sim, session)

        yield started


def soon(work: Awaitable[Any]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(work)


# -- the batch, on its own


def started_batch(count: int, *, tokens: int = 100, limit: int | None = None) -> tuple[BatchModel[Sequence], list]:
    batch: BatchModel[Sequence] = BatchModel(rate=batch_rate(600.0, 16.0), limit=limit)
    sequences = [Sequence(tokens, float(tokens)) for _ in range(count)]
    for sequence in sequences:
        batch.add(0.0, sequence)
    return batch, sequences


@pytest.mark.parametrize(("count", "tokens_per_s"), [(1, 600.0), (17, 300.0), (33, 200.0)])
def test_each_request_decodes_at_the_documented_rate_of_the_batch(count: int, tokens_per_s: float) -> None:
    batch, sequences = started_batch(count, tokens=600)
    assert batch.next_due() == pytest.approx(600 / tokens_per_s)
    assert batch.decoded(0.5, sequences[0]) == tokens_per_s // 2


def test_a_bigger_batch_makes_more_tokens_in_all() -> None:
    rate = batch_rate(600.0, 16.0)
    totals = [n * rate(n) for n in range(1, 500)]
    assert totals == sorted(totals)
    assert totals[-1] < 600.0 * 16.0


def test_a_request_that_leaves_keeps_its_tokens_and_speeds_the_others_up() -> None:
    batch, (first, second) = started_batch(2, tokens=600)
    alone, together = 600.0, batch_rate(600.0, 16.0)(2)
    batch.remove(0.5, first)
    assert first.decoded == int(0.5 * together)
    assert batch.next_due() == pytest.approx(0.5 + (600 - 0.5 * together) / alone)
    assert batch.decoded(0.6, first) == first.decoded
    assert not batch.remove(0.7, first)
    assert batch.due(5.0) == [second]


def test_the_batch_takes_no_more_than_its_limit_and_the_rest_in_order() -> None:
    batch, sequences = started_batch(5, tokens=60, limit=2)
    assert (batch.running, batch.waiting) == (2, 3)
    batch.remove(0.0, sequences[2])
    batch.remove(0.0, sequences[0])
    assert [s.stage for s in sequences] == ["ended", "running", "ended", "running", "waiting"]


def test_a_frozen_batch_stands_still_and_goes_on_where_it_was() -> None:
    batch, (sequence,) = started_batch(1, tokens=600)
    batch.close(0.5, freeze=True)
    late = Sequence(10, 10.0)
    batch.add(1.0, late)
    assert batch.next_due() is None
    assert batch.due(100.0) == []
    assert (batch.decoded(100.0, sequence), late.stage) == (300, "waiting")
    batch.open(100.0)
    assert batch.decoded(100.1, sequence) > 300
    assert late.stage == "running"


def test_a_closed_batch_that_is_not_frozen_runs_empty() -> None:
    batch, (sequence,) = started_batch(1, tokens=600)
    batch.close(0.5, freeze=False)
    batch.add(0.5, Sequence(10, 10.0))
    assert batch.due(1.0) == [sequence]
    assert (batch.running, batch.waiting) == (0, 1)


def test_a_fixed_latency_does_not_depend_on_the_batch() -> None:
    batch: BatchModel[Sequence] = BatchModel(rate=fixed_rate, limit=None)
    sequences = [Sequence(64, 2.0) for _ in range(1000)]
    for at, sequence in enumerate(sequences):
        batch.add(at / 1000, sequence)
    assert batch.next_due() == pytest.approx(2.0)
    assert len(batch.due(2.4)) == 402  # those that came in the first 0.401 s: timers are a millisecond coarse
    assert batch.decoded(2.5, sequences[999]) == int(64 * 1.501 / 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["add", "remove", "tick", "freeze", "close", "open"]), max_size=60), st.randoms())
def test_whatever_happens_nobody_waits_beside_a_free_place(steps: list[str], random: Any) -> None:
    batch: BatchModel[Sequence] = BatchModel(rate=batch_rate(100.0, 4.0), limit=3)
    alive: list[Sequence] = []
    now, closed = 0.0, False
    for step in steps:
        now += random.random() / 10
        if step == "add":
            alive.append(Sequence(tokens := random.randint(1, 20), float(tokens)))
            batch.add(now, alive[-1])
        elif step == "remove" and alive:
            gone = alive.pop(random.randrange(len(alive)))
            assert batch.remove(now, gone)
            assert 0 <= gone.decoded <= gone.tokens
        elif step == "tick":
            for done in batch.due(now):
                alive.remove(done)
                assert done.decoded == done.tokens
        elif step in ("freeze", "close"):
            batch.close(now, freeze=step == "freeze")
            closed = True
        elif step == "open":
            batch.open(now)
            closed = False
        assert batch.running + batch.waiting == len(alive)
        assert batch.running <= 3
        assert closed or not batch.waiting or batch.running == 3
        assert set(batch.sequences()) == set(alive)


# -- what a completion will be


def test_a_completion_cut_anywhere_is_the_same_tokens() -> None:
    content = Decoder(SimulatorSettings(lengths=Lengths.FIXED, mean_tokens=97)).plan("key", 200).content
    ring = content.ring
    whole = json.loads(b"[%b]" % content.fragments((ring.ids,), 0, 97)[0])
    assert len(whole) == 97
    assert whole[-1] == EOS
    assert content.raw(0, 97) == bytes(whole[:-1])
    for cut in (0, 1, 47, 48, 49, 96, 97):
        pieces = [content.fragments((ring.ids,), *span)[0] for span in ((0, cut), (cut, 97))]
        assert [i for piece in pieces for i in json.loads(b"[%b]" % piece)] == whole
        offsets = content.text_offsets(0, cut)
        assert len(offsets) == cut
        assert content.text_offsets(0, 97)[:cut] == offsets


def test_a_completion_longer_than_the_ring_goes_round_it() -> None:
    ring = scripted_ring("abcdefg")
    content = Content(ring, 5, 2, 20, 41, True)
    walk = bytes((b"abcdefg" * 9)[5:25] + (b"abcdefg" * 9)[2:22])
    assert content.raw(0, 41) == walk
    assert json.loads(b"[%b]" % content.fragments((ring.ids,), 0, 41)[0]) == [*walk, EOS]
    assert content.raw(13, 30) == walk[13:30]
    assert content.raw(25, 30) == walk[25:30]


def test_half_a_character_has_an_empty_token_string() -> None:
    ring = scripted_ring("aü")
    assert json.loads(b"[%b]" % Content.whole(ring).fragments((ring.strings,), 0, 4)[0]) == ["a", "", "ü", "<eos>"]


def test_lengths_follow_their_distribution_and_end_at_the_limit() -> None:
    for lengths in Lengths:
        decoder = Decoder(SimulatorSettings(lengths=lengths, mean_tokens=100, sigma=0.8))
        plans = [decoder.plan(f"key{i}", 4000) for i in range(3000)]
        mean = sum(plan.content.length for plan in plans) / len(plans)
        assert mean == pytest.approx(100, rel=0.08), lengths
        cut = [decoder.plan(f"key{i}", 50) for i in range(300)]
        assert max(plan.content.length for plan in cut) == 50
        assert {plan.finish_reason for plan in cut} <= {"stop", "length"}
        for plan in cut:
            last = json.loads(b"[%b]" % plan.content.fragments((plan.content.ring.ids,), 0, plan.content.length)[0])[-1]
            assert plan.finish_reason == ("stop" if last == EOS else "length")


def test_a_long_tail_is_longer_than_its_mean_promises() -> None:
    decoder = Decoder(SimulatorSettings(mean_tokens=100, sigma=0.8))
    lengths = sorted(decoder.plan(f"key{i}", 4000).content.length for i in range(3000))
    assert lengths[len(lengths) // 2] < 85
    assert lengths[-30] > 400


def test_min_tokens_and_ignore_eos_are_kept() -> None:
    decoder = Decoder(SimulatorSettings(lengths=Lengths.FIXED, mean_tokens=5))
    assert decoder.plan("key", 100, 20).content.length == 20
    ignoring = decoder.plan("key", 100, 0, True)
    assert (ignoring.content.length, ignoring.finish_reason) == (100, "length")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tokens_per_s": 0}, "tokens_per_s"),
        ({"latency": -1.0}, "latency"),
        ({"jitter": 0.5}, "jitter"),
        ({"port": 70000}, "port"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"mean_tokens": float("nan")}, "mean_tokens"),
        ({"seed": True}, "seed"),
        ({"model": ""}, "model"),
        ({"lengths": "gaussian"}, "gaussian"),
    ],
)
def test_settings_out_of_bounds_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SimulatorSettings(**fields)


def test_the_door_is_what_it_says() -> None:
    import rollout_service.simulator as door

    assert sorted(exported) == exported
    assert all(hasattr(door, name) for name in exported)


# -- asking


async def test_a_completion_has_ids_logprobs_and_text_that_fit_each_other(start: Start) -> None:
    caller = await start(latency=0.0, lengths="fixed", mean_tokens=20)
    status, answer = await caller.post(
        COMPLETIONS,
        {"model": "simulated", "prompt": [72, 105], "return_token_ids": True, "logprobs": 0, "max_tokens": 50},
        X_Request_Id="abc",
    )
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert (status, answer["id"], answer["object"]) == (200, "cmpl-abc", "text_completion")
    assert (choice["finish_reason"], len(choice["token_ids"]), choice["token_ids"][-1]) == ("stop", 20, EOS)
    assert choice["prompt_token_ids"] == [72, 105]
    assert choice["text"] == decode_ids(choice["token_ids"])
    assert {len(logprobs[name]) for name in ("token_logprobs", "tokens", "top_logprobs", "text_offset")} == {20}
    assert all(-10 < value <= 0 for value in logprobs["token_logprobs"])
    assert "".join(logprobs["tokens"][:-1])[:5] == choice["text"][:5] or "\ufffd" in choice["text"]
    assert answer["usage"]["completion_tokens"] == 20
    assert answer["usage"]["total_tokens"] == 22


async def test_max_tokens_cuts_with_finish_reason_length_and_defaults_to_16(start: Start) -> None:
    caller = await start(latency=0.0, lengths="fixed", mean_tokens=100)
    status, answer = await caller.post(COMPLETIONS, {"prompt": "Hi", "return_token_ids": True})
    choice = answer["choices"][0]
    assert (status, choice["finish_reason"], len(choice["token_ids"])) == (200, "length", 16)
    assert choice["logprobs"] is None
    assert choice["prompt_token_ids"] == [72, 105]


async def test_ids_and_logprobs_come_only_where_they_are_asked_for(start: Start) -> None:
    caller = await start(latency=0.0)
    _, answer = await caller.post(COMPLETIONS, {"prompt": "Hi", "unknown_field": 1})
    choice = answer["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"], choice["logprobs"]) == (None, None, None)


async def test_batches_and_n_give_one_choice_each_in_order(start: Start) -> None:
    caller = await start(latency=0.0, lengths="fixed", mean_tokens=30)
    body = {"prompt": ["a", [98, 99]], "n": 3, "max_tokens": 64, "return_token_ids": True}
    _, answer = await caller.post(COMPLETIONS, body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[97]] * 3 + [[98, 99]] * 3
    assert len({choice["text"] for choice in answer["choices"]}) == 6
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "total_tokens": 183,
        "completion_tokens": 180,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


async def test_chat_goes_through_the_template_and_has_its_own_shape(start: Start) -> None:
    caller = await start(latency=0.0, lengths="fixed", mean_tokens=9)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    body = {"messages": messages, "logprobs": True, "return_token_ids": True}
    _, answer = await caller.post(CHAT, body, X_Request_Id="c1")
    choice = answer["choices"][0]
    assert (answer["id"], answer["object"]) == ("chatcmpl-c1", "chat.completion")
    assert answer["prompt_token_ids"] == [257, 261, 83, 259, 72, 105, 260]
    assert choice["message"]["content"] == decode_ids(choice["token_ids"])
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == 9
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []
    assert answer["usage"]["prompt_tokens"] == 7


async def test_generate_takes_and_gives_tokens_and_alone_carries_weight_versions(start: Start) -> None:
    caller = await start(latency=0.0, lengths="fixed", mean_tokens=9)
    body = {"request_id": "g1", "token_ids": [72, 105], "sampling_params": {"logprobs": 0, "max_tokens": 20}}
    _, answer = await caller.post(GENERATE, body)
    choice = answer["choices"][0]
    assert answer["request_id"] == "generate-tokens-g1"
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 9}]
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    assert "weight_versions" not in await caller.complete()


async def test_the_same_request_id_gives_the_same_tokens_and_another_one_others(start: Start) -> None:
    first, second, other = [await start(latency=0.0, seed=seed) for seed in (7, 7, 8)]
    one, again = await first.complete("x"), await second.complete("x")
    assert one == again
    assert (await first.complete("y"))["token_ids"] != one["token_ids"]
    assert (await other.complete("x"))["token_ids"] != one["token_ids"]
    unnamed = [(await caller.complete())["token_ids"] for caller in (first, second)]
    assert unnamed[0] == unnamed[1]


async def test_a_request_with_a_seed_repeats_its_tokens_under_any_id(start: Start) -> None:
    caller = await start(latency=0.0)
    one, again = await caller.complete("x", seed=3), await caller.complete("y", seed=3)
    assert one["token_ids"] == again["token_ids"]
    assert (await caller.complete("x", seed=4))["token_ids"] != one["token_ids"]
    assert (await caller.complete("x", seed=3, prompt=[1]))["token_ids"] != one["token_ids"]


async def test_prompt_and_max_tokens_over_the_limit_are_cut_without_a_word(start: Start) -> None:
    caller = await start(latency=0.0, max_model_len=64)
    choice = await caller.complete(prompt=[1] * 60, max_tokens=100, ignore_eos=True)
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 4)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (COMPLETIONS, {"model": "nope", "prompt": "a"}, 404, "model"),
        (COMPLETIONS, {"prompt": [1] * 65}, 400, "input_tokens"),
        (COMPLETIONS, {"prompt": [1] * 64}, 400, "max_tokens"),
        (COMPLETIONS, {"prompt": "a" * 65}, 400, "input_tokens"),
        (COMPLETIONS, {"prompt": "a" * 5000}, 400, "input_text"),
        (COMPLETIONS, {"prompt": [288]}, 400, None),
        (COMPLETIONS, {"prompt": [-1]}, 400, None),
        (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
        (COMPLETIONS, {"prompt": []}, 400, None),
        (COMPLETIONS, {}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [1.5]}, 400, "body.prompt"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "many"}, 400, "body.max_tokens"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, 400, "temperature"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, 400, "top_p"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 30}, 400, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, 400, None),
        (COMPLETIONS, [], 400, "body"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 100}]}, 400, "input_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 5000}]}, 400, "input_text"),
        (GENERATE, {"token_ids": [1] * 65, "sampling_params": {}}, 400, None),
        (GENERATE, {"token_ids": [], "sampling_params": {}}, 400, "body.token_ids"),
        (GENERATE, {"model": "nope", "token_ids": [1], "sampling_params": {}}, 404, "model"),
    ],
)
async def test_what_cannot_be_served_is_refused_as_vllm_refuses_it(
    start: Start, path: str, body: object, status: int, param: str | None
) -> None:
    caller = await start(latency=0.0, max_model_len=64)
    got, answer = await caller.post(path, body)
    assert (got, answer["error"]["code"], answer["error"]["param"]) == (status, status, param)
    assert answer["error"]["message"]
    assert caller.sim.engine.running == 0


async def test_a_key_guards_the_openai_routes_and_no_others(start: Start) -> None:
    caller = await start(latency=0.0, api_key="secret")
    for path in (COMPLETIONS, CHAT, GENERATE, "/inference/v1/abort_requests"):
        assert await caller.post(path, {}) == (401, {"error": "Unauthorized"})
    assert await caller.get("/v1/models") == (401, {"error": "Unauthorized"})
    assert (await caller.get("/v1/models", Authorization="Bearer wrong"))[0] == 401
    assert (await caller.get("/v1/models", Authorization="Bearer secret"))[0] == 200
    for path in ("/health", "/metrics", "/version", "/is_paused", "/sim/stats"):
        assert (await caller.get(path))[0] == 200
    assert (await caller.post("/abort_requests", {"request_ids": ["x"]}))[0] == 200


async def test_it_tells_what_it_serves(start: Start) -> None:
    caller = await start(model="tiny", max_model_len=128, logprobs_mode=LogprobsMode.PROCESSED)
    _, models = await caller.get("/v1/models")
    assert [(one["id"], one["max_model_len"]) for one in models["data"]] == [("tiny", 128)]
    assert (await caller.get("/health")) == (200, "")
    assert (await caller.get("/ping")) == (200, "")
    assert (await caller.get("/load")) == (200, {"server_load": 0})
    assert (await caller.get("/version"))[1]["version"]
    _, info = await caller.get("/server_info?config_format=json")
    assert info["vllm_config"]["model_config"]["logprobs_mode"] == "processed_logprobs"
    _, text = await caller.get("/server_info")
    assert isinstance(text["vllm_config"], str)


async def test_tokens_go_there_and_back(start: Start) -> None:
    caller = await start()
    _, tokens = await caller.post("/tokenize", {"prompt": "Grüße"})
    assert (tokens["count"], tokens["max_model_len"]) == (7, 4096)
    assert (await caller.post("/detokenize", {"tokens": tokens["tokens"]}))[1] == {"prompt": "Grüße"}
    _, chat = await caller.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})
    assert chat["tokens"] == [257, 259, 72, 105, 260]


async def test_without_dev_mode_its_routes_do_not_exist(start: Start) -> None:
    caller = await start(latency=0.0, dev_mode=False)
    for path in (
        "/abort_requests",
        "/pause",
        "/resume",
        "/update_weight_version",
        "/collective_rpc",
        "/reset_prefix_cache",
    ):
        assert await caller.post(path, {}) == (404, {"detail": "Not Found"})
    for path in ("/server_info", "/is_paused", "/weight_info"):
        assert (await caller.get(path))[0] == 404
    _, schema = await caller.get("/openapi.json")
    assert "/abort_requests" not in schema["paths"]
    assert (await caller.post("/inference/v1/abort_requests", {"request_ids": []}))[0] == 200


async def test_without_scale_out_the_inference_routes_are_forbidden(start: Start) -> None:
    caller = await start(latency=0.0, scale_out=False)
    for path in (GENERATE, "/inference/v1/abort_requests"):
        status, answer = await caller.post(path, {"token_ids": [1], "sampling_params": {}, "request_ids": ["x"]})
        assert (status, answer["error"]["type"]) == (403, "PermissionDeniedError")


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


@pytest.mark.parametrize("body", [b"", b"[1]", b"{"])
async def test_an_abort_that_is_no_json_object_is_refused_and_aborts_nobody(start: Start, body: bytes) -> None:
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
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: %b\r\nContent-Length: 14\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = await raw(caller, head % b"one" + body + head % b"two" + body + last)
    places = [answer.index(part) for part in (b"cmpl-one", b"cmpl-two", b'{"version"')]
    assert places == sorted(places)
    assert answer.count(b"HTTP/1.1 200 OK") == 3


async def test_a_chunked_body_in_pieces_is_read(start: Start) -> None:
    caller = await start(latency=0.0)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n"
    answer = await raw(caller, head + b'Expect: 100-continue\r\n\r\n7\r\n{"promp\r\n7\r\nt":"a"}\r\n0\r\n\r\n')
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


async def test_bytes_that_are_no_http_are_refused_and_an_open_request_ends(start: Start) -> None:
    caller = await start(latency=3600.0)
    assert (await raw(caller, b"garbage\r\n\r\n")).startswith(b"HTTP/1.1 400 Bad Request\r\n")
    body = b'{"prompt":"a"}'
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n" + body
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
