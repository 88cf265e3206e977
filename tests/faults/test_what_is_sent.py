"""What reaches the engine, and what reaches rewards and trainers of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine_script import MODEL
from tests.faults.conftest import MakeService
from tests.faults.scripted import Act, Engine
from tests.service import prompt, until

ALWAYS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 64}


async def test_every_field_the_engine_would_fill_in_itself_is_sent(engine: Engine, service: MakeService) -> None:
    live = await service()
    messages = [{"role": "user", "content": "p:M;"}]
    await live.submit(prompt("I"), {"prompt_id": "T", "prompt": "p:T;"}, {"prompt_id": "M", "messages": messages})
    await live.collect(3)
    for key, path in (("I", "/v1/completions"), ("T", "/v1/completions"), ("M", "/v1/chat/completions")):
        found = engine.find(f"p:{key};")
        assert len(found) == 4
        for attempt in found:
            assert attempt.asked.path == path
            body = attempt.body
            assert {name: body[name] for name in ALWAYS} == ALWAYS
            assert (body["model"], body["return_token_ids"]) == (MODEL, True)
            assert body["logprobs"] == (0 if path == "/v1/completions" else True)
            assert body.get("logprobs") is not False
            assert body.keys().isdisjoint({"n", "stream", "seed", "best_of", "echo"})


async def test_a_prompts_own_sampling_goes_over_the_configured_one_and_both_are_delivered(
    engine: Engine, service: MakeService
) -> None:
    live = await service(sampling={"temperature": 0.5, "allow_raw_logprobs": True, "stop": ["\n\n"], "max_tokens": 32})
    own = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 3}
    more = {"stop": ["X"], "stop_token_ids": [7], "presence_penalty": 0.5, "frequency_penalty": -0.5}
    await live.submit(prompt("own") | {"sampling": own | more}, prompt("plain"))
    groups = {group["prompt_id"]: group for group in await live.collect(2)}
    for attempt in engine.find("p:own;"):
        assert {name: attempt.body[name] for name in own | more} == own | more
    for attempt in engine.find("p:plain;"):
        assert (attempt.body["temperature"], attempt.body["max_tokens"]) == (0.5, 32)
        assert attempt.body["stop"] == ["\n\n"]
    assert groups["own"]["sampling"].items() >= own.items()
    assert groups["plain"]["sampling"]["temperature"] == 0.5
    assert groups["plain"]["logprobs_mode"] == "raw_logprobs"


async def test_chat_template_arguments_go_to_chat_and_seeds_differ_for_every_request(
    engine: Engine, service: MakeService
) -> None:
    """Public faults 43 and 44: one prompt, n different completions."""
    live = await service()
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "p:M;"}]
    sampling = {"chat_template_kwargs": {"enable_thinking": False}, "seed_per_attempt": True}
    await live.submit({"prompt_id": "M", "messages": messages, "sampling": sampling, "num_generations": 8})
    await live.collect(1)
    bodies = [attempt.body for attempt in engine.find("p:M;")]
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in bodies)
    assert all(body["messages"] == messages for body in bodies)
    assert len({body["seed"] for body in bodies}) == 8
    assert "seed_per_attempt" not in bodies[0]


@pytest.mark.parametrize("name", ["n", "stream", "logprobs", "model", "seed", "no_such_field"])
async def test_sampling_that_is_not_a_prompts_to_set_is_refused(service: MakeService, name: str) -> None:
    live = await service()
    answer = await live.post_prompts(prompt("A") | {"sampling": {name: 1}})
    assert answer.status_code == 422
    assert f"sampling.{name}" in answer.json()["detail"]
    assert (await live.counts())["submitted"] == 0


async def test_rewards_and_samples_see_the_same_prompts_and_completions_of_each_kind(
    engine: Engine, service: MakeService
) -> None:
    live = await service()
    messages = [{"role": "user", "content": "p:M;"}]
    await live.submit(
        prompt("I", kind="ids"),
        {"prompt_id": "T", "prompt": "p:T;", "columns": {"kind": "text"}},
        {"prompt_id": "M", "messages": messages, "columns": {"kind": "messages"}},
        {"prompt_id": "C", "prompt": messages, "columns": {"kind": "conversational"}},
    )
    groups = {group["columns"]["kind"]: group for group in await live.collect(4)}
    calls = {call["columns"]["kind"][0]: call for call in live.reward_calls()}
    shown: dict[str, Any] = {"ids": "p:I;", "text": "p:T;", "messages": messages, "conversational": messages}
    for kind, wanted in shown.items():
        group, call = groups[kind], calls[kind]
        assert call["prompts"] == [wanted] * 4, "for ids: the engine's own text"
        assert [sample["prompt"] for sample in group["samples"]] == [wanted] * 4
        assert [sample["completion"] for sample in group["samples"]] == call["completions"]
        for sample, ids, completion in zip(group["samples"], call["ids"], call["completions"], strict=True):
            text = bytes(ids).decode()
            is_chat = kind in ("messages", "conversational")
            assert completion == ([{"role": "assistant", "content": text}] if is_chat else text)
            assert sample["input_ids"][-len(ids) :] == ids
            context = sum(1 for mask in sample["completion_mask"] if mask == 0)
            assert bytes(sample["input_ids"][:context]).decode() == f"p:{group['prompt_id'] if not is_chat else 'M'};"
    assert len({tuple(attempt.body.get("prompt", ())) for attempt in engine.find("p:I;")}) == 1
    assert engine.paths["/detokenize"] == 1, "one distinct prompt is asked for once"


async def test_an_engine_without_detokenize_costs_the_text_only(engine: Engine, service: MakeService) -> None:
    from aiohttp import web

    engine.detokenize = lambda ids: web.Response(status=404)
    live = await service()
    await live.submit(prompt("A"))
    (group,) = await live.collect(1)
    assert {sample["prompt"] for sample in group["samples"]} == {None}
    assert live.reward_calls()[0]["prompts"] == [None] * 4


async def test_a_prompt_of_ids_longer_than_the_context_is_dropped_unsent_and_the_rest_goes_on(
    engine: Engine, service: MakeService
) -> None:
    engine.models = {"data": [{"id": MODEL, "max_model_len": 100}]}
    live = await service(groups={"halt_after_failed_groups": 1})
    too_long = {"prompt_id": "long", "prompt_token_ids": [7] * 100}
    fits = {"prompt_id": "fits", "prompt_token_ids": [7] * 99}
    dropped, _, _ = await live.submit(too_long, fits, prompt("A"))
    group = await live.wait_state(dropped, "dropped")
    assert group["reason"] == "prompt_too_long"
    assert "100" in group["error"]
    assert len(await live.collect(2)) == 2
    assert not [attempt for attempt in engine.attempts if len(attempt.body["prompt"]) == 100]
    assert await live.metric("rollout_dropped_groups_total", 'reason="prompt_too_long"') == 1
    assert await live.probe("/readyz") == 200


@pytest.mark.parametrize("param", ["input_text", "input_tokens"])
async def test_vllms_refusal_of_a_text_that_does_not_fit_drops_the_group_once_and_halts_nothing(
    engine: Engine, service: MakeService, param: str
) -> None:
    """Public fault 31."""
    engine.on("p:long;", Act(status=400, param=param, message="maximum context length is 4096 tokens"))
    live = await service(dispatch={"max_attempts": 3})
    (dropped,) = await live.submit({"prompt_id": "long", "prompt": "p:long;"})
    group = await live.wait_state(dropped, "dropped")
    assert (group["reason"], "maximum context length" in group["error"]) == ("prompt_too_long", True)
    assert len(engine.find("p:long;")) <= 4, "no retry"
    await live.submit(prompt("A"))
    assert len(await live.collect(1)) == 1
    assert await live.metric("rollout_dropped_groups_total") == 1
    assert await live.metric("rollout_failed_groups_total") == 0
    assert await live.slots_used() == 0


async def test_raw_logprobs_at_another_temperature_are_told_of_when_a_prompt_asks_for_it(
    engine: Engine, service: MakeService
) -> None:
    live = await service()
    await live.submit(*(prompt(key) | {"sampling": {"temperature": 0.5}} for key in "AB"))
    await live.collect(2)
    assert len(live.logged("raw_logprobs_at_a_temperature")) == 1


async def test_odd_texts_and_columns_arrive_as_they_were_sent(engine: Engine, service: MakeService) -> None:
    columns = {"ä": "\U0001f600\u0000\u2028", "big": 2**63, "deep": [[{"a": None, "b": [True, 1.5, -0.0]}]]}
    live = await service()
    await live.submit({"prompt_id": "odd \U0001f600 id", "prompt": "p:ü\U0001f600;", "columns": columns})
    (group,) = await live.collect(1)
    assert group["prompt_id"] == "odd \U0001f600 id"
    assert group["columns"] == columns
    (call,) = live.reward_calls()
    assert call["columns"] == {name: [value] * 4 for name, value in columns.items()}
    assert {attempt.body["prompt"] for attempt in engine.attempts} == {"p:ü\U0001f600;"}
    await until(lambda: not engine.in_flight())
