"""The simulated engine answers as vLLM does: shapes, limits, refusals, information."""

from collections.abc import AsyncIterator

import pytest

from rollout_service.simulator import LogprobsMode
from rollout_service.simulator.content import EOS, decode_ids
from tests.simulator_caller import CHAT, COMPLETIONS, GENERATE, Start, simulators


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with simulators() as started:
        yield started


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


async def test_a_body_that_is_not_declared_json_is_refused(start: Start) -> None:
    caller = await start(latency=0.0)
    async with caller.session.post(caller.sim.url + COMPLETIONS, data=b'{"prompt":"a"}') as response:
        assert response.status == 400
        assert "application/json" in (await response.json())["error"]["message"]


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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"messages": 5}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", []),
        ("/inference/v1/abort_requests", {}),
        ("/inference/v1/abort_requests", {"request_ids": 5}),
    ],
)
async def test_bodies_of_the_wrong_shape_are_refused(start: Start, path: str, body: object) -> None:
    caller = await start()
    assert (await caller.post(path, body))[0] == 400


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
