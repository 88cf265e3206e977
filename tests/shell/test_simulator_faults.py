"""Each scripted fault does what it says, to the requests its rule picks and to no others."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec
import pytest

from rollout_service.simulator import FaultPlan
from tests.simulator_caller import CHAT, COMPLETIONS, GENERATE, Start, simulators, soon


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with simulators(latency=0.0) as started:
        yield started


# -- which requests


def test_the_newest_rules_come_first_and_are_used_up() -> None:
    plan = FaultPlan()
    plan.on(status=500)
    plan.add([{"match": "a", "times": 2, "do": {"status": 501}}, {"match": "a", "do": {"status": 502}}])
    picked = [plan.pick(prompt) for prompt in ("xax", "b", "a", "a", "a")]
    assert [action.status for action in picked if action] == [501, 500, 501, 502, 502]
    assert [(rule["matched"], rule["used"]) for rule in plan.view()] == [(2, 2), (2, 2), (1, 1)]
    plan.clear()
    assert plan.pick("a") is None
    assert not plan


def test_a_probability_picks_its_share_and_the_same_ones_again() -> None:
    picks = []
    for seed in (3, 3, 4):
        plan = FaultPlan(seed)
        plan.on(probability=0.3, status=500)
        picks.append([plan.pick("a") is not None for _ in range(2000)])
    assert sum(picks[0]) == pytest.approx(600, abs=90)
    assert picks[0] == picks[1] != picks[2]


@pytest.mark.parametrize(
    "rule",
    [
        {"do": {"explode": True}},
        {"do": {"status": 200}},
        {"do": {"delay": -1}},
        {"do": {"token_ids": "wrong"}},
        {"do": {"status": 500}, "times": 0},
        {"do": {"status": 500}, "probability": 0},
        {"do": {"status": 500}, "matches": "x"},
        {},
    ],
)
async def test_a_rule_that_makes_no_sense_is_refused_whole(start: Start, rule: dict[str, Any]) -> None:
    caller = await start()
    status, answer = await caller.send("POST", "/sim/faults", [{"do": {"status": 500}}, rule])
    assert (status, answer["error"]["code"]) == (400, 400)
    with pytest.raises(msgspec.ValidationError):
        caller.sim.faults.add([rule])
    assert not caller.sim.faults
    assert (await caller.ask())[0] == 200


async def test_rules_are_set_seen_and_cleared_over_http(start: Start) -> None:
    caller = await start()
    rules = [{"match": "bad", "times": 1, "do": {"status": 503, "message": "overloaded"}}]
    assert (await caller.send("POST", "/sim/faults", rules))[0] == 200
    assert (await caller.ask("good"))[0] == 200
    status, answer = await caller.ask("bad")
    assert (status, json.loads(answer)["error"]["message"]) == (503, "overloaded")
    assert (await caller.ask("bad"))[0] == 200
    _, seen = await caller.send("GET", "/sim/faults")
    assert seen["rules"] == [{**rules[0], "matched": 1, "used": 1}]
    assert (await caller.send("DELETE", "/sim/faults"))[1] == {"rules": []}
    assert not caller.sim.faults


async def test_a_rule_matches_ids_and_chats_by_their_text(start: Start) -> None:
    caller = await start()
    caller.sim.faults.on("<user>secret", status=500)
    chat = {"messages": [{"role": "user", "content": "secret"}]}
    assert (await caller.send("POST", CHAT, chat))[0] == 500
    ids = [259, *b"secret"]
    assert (await caller.send("POST", COMPLETIONS, {"prompt": ids}))[0] == 500
    assert (await caller.send("POST", GENERATE, {"token_ids": ids, "sampling_params": {}}))[0] == 500
    assert (await caller.ask("secret"))[0] == 200


# -- what happens to them


async def test_an_error_of_the_server_closes_the_connection(start: Start) -> None:
    caller = await start()
    caller.sim.faults.on("five", status=500)
    caller.sim.faults.on("four", status=429)
    for prompt, header in (("five", "close"), ("four", None)):
        async with caller.session.post(caller.sim.url + COMPLETIONS, json={"prompt": prompt}) as response:
            assert response.status >= 400
            assert response.headers.get("Connection") == header


async def test_during_a_delay_the_engine_does_not_know_the_request(start: Start) -> None:
    caller = await start()
    caller.sim.faults.on(delay=0.1)
    began = asyncio.get_running_loop().time()
    call = soon(caller.choice())
    await caller.sim.until(lambda sim: sim.journal.requests == 1)
    await caller.send("POST", "/abort_requests", {"request_ids": ["cmpl-X-0"]})
    assert (await call)["finish_reason"] == "length"
    assert asyncio.get_running_loop().time() - began >= 0.099


async def test_hanging_up_in_a_delay_ends_the_request(start: Start) -> None:
    caller = await start()
    caller.sim.faults.on(delay=3600)
    call = soon(caller.ask())
    await caller.sim.until(lambda sim: sim.journal.requests == 1)
    call.cancel()
    await caller.sim.until(lambda sim: sim.stats()["outcomes"]["disconnected"] == 1)


async def test_a_delayed_request_that_ignores_the_hang_up_is_decoded_for_nobody(start: Start) -> None:
    caller = await start()
    caller.sim.faults.on(delay=0.1, ignore_disconnect=True)
    call = soon(caller.ask())
    await caller.sim.until(lambda sim: sim.journal.requests == 1)
    call.cancel()
    await caller.sim.until(lambda sim: sim.stats()["outcomes"]["disconnected"] == 1)
    assert caller.sim.requests()[0]["tokens_after_abort"] == 20


async def test_a_hanging_request_ends_by_abort_or_hang_up(start: Start) -> None:
    caller = await start()
    caller.sim.faults.on(hang=True)
    calls = [soon(caller.choice(request_id=name)) for name in ("X", "Y")]
    await caller.sim.until(lambda sim: sim.engine.running == 2)
    await caller.send("POST", "/abort_requests", {"request_ids": ["cmpl-X-0"]})
    choice = await calls[0]
    assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [])
    calls[1].cancel()
    await caller.sim.until(lambda sim: sim.engine.running == 0)


async def test_a_cut_resets_the_connection(start: Start) -> None:
    caller = await start()
    caller.sim.faults.on(cut=True, times=1)
    with pytest.raises(aiohttp.ClientError):
        await caller.ask()
    assert caller.sim.stats()["outcomes"]["cut"] == 1
    assert (await caller.ask())[0] == 200


async def test_half_a_body_is_a_read_error_and_half_an_answer_is_not(start: Start) -> None:
    caller = await start()
    caller.sim.faults.on("cut", cut_body=True)
    caller.sim.faults.on("half", truncate=True)
    with pytest.raises(aiohttp.ClientPayloadError):
        await caller.ask("cut")
    status, body = await caller.ask("half")
    assert status == 200
    with pytest.raises(json.JSONDecodeError):
        json.loads(body)
    assert body.startswith(b'{"id":"cmpl-X"')


async def test_a_malformed_answer_is_200_and_no_json(start: Start) -> None:
    caller = await start()
    caller.sim.faults.on(malformed=True)
    status, body = await caller.ask()
    assert status == 200
    with pytest.raises(json.JSONDecodeError):
        json.loads(body)


async def test_an_ignored_abort_runs_to_its_end_and_is_counted(start: Start) -> None:
    caller = await start(latency=0.2)
    caller.sim.faults.on(ignore_abort=True)
    call = soon(caller.choice())
    await caller.sim.until(lambda sim: sim.engine.running == 1)
    await caller.send("POST", "/abort_requests", {"request_ids": ["cmpl-X-0"]})
    choice = await call
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 20)
    record = caller.sim.requests()[0]
    assert (record["outcome"], record["tokens"]) == ("answered", 20)
    assert 0 < record["tokens_after_abort"] <= 20
    assert record["abandoned"] < record["ended"]
    assert caller.sim.stats()["tokens_after_abort"] == record["tokens_after_abort"]


async def test_an_ignored_hang_up_runs_to_its_end_and_is_counted(start: Start) -> None:
    caller = await start(latency=0.2)
    caller.sim.faults.on(ignore_disconnect=True)
    call = soon(caller.ask())
    await caller.sim.until(lambda sim: sim.engine.running == 1)
    call.cancel()
    await caller.sim.until(lambda sim: sim.stats()["outcomes"]["disconnected"] == 1)
    record = caller.sim.requests()[0]
    assert record["tokens"] == 20
    assert record["tokens_after_abort"] > 0
    assert caller.sim.engine.running == 0


@pytest.mark.parametrize("reason", ["abort", "error", "unheard-of", None])
async def test_a_finish_reason_is_replaced(start: Start, reason: str | None) -> None:
    caller = await start()
    rules = [{"do": {"finish_reason": reason}}]
    await caller.send("POST", "/sim/faults", rules)
    assert (await caller.choice())["finish_reason"] == reason


async def test_fields_are_dropped(start: Start) -> None:
    caller = await start()
    caller.sim.faults.on("ids", drop=["token_ids", "finish_reason"])
    caller.sim.faults.on("all", drop=["choices"])
    choice = await caller.choice("ids")
    assert "token_ids" not in choice
    assert "finish_reason" not in choice
    assert len(choice["logprobs"]["token_logprobs"]) == 20
    assert json.loads((await caller.ask("all"))[1])["choices"] == []


@pytest.mark.parametrize(
    ("how", "wrong"),
    [
        ("short", lambda ids, true: len(ids) == len(true) - 1),
        ("long", lambda ids, true: len(ids) == len(true) + 1),
        ("negative", lambda ids, true: ids[0] == -1),
        ("huge", lambda ids, true: ids[0] == 2**31),
        ("float", lambda ids, true: isinstance(ids[0], float)),
        ("text", lambda ids, true: isinstance(ids[0], str)),
    ],
)
async def test_token_ids_are_spoiled(start: Start, how: str, wrong: Callable[[list, list], bool]) -> None:
    caller = await start()
    true = (await caller.choice())["token_ids"]
    caller.sim.faults.on(token_ids=how)
    assert wrong((await caller.choice())["token_ids"], true)


@pytest.mark.parametrize(
    ("how", "wrong"),
    [
        ("short", lambda values: len(values) == 19),
        ("long", lambda values: len(values) == 21),
        ("null", lambda values: values[0] is None),
        ("nan", lambda values: math.isnan(values[0])),
        ("inf", lambda values: math.isinf(values[0])),
        ("text", lambda values: isinstance(values[0], str)),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
async def test_logprobs_are_spoiled(start: Start, path: str, how: str, wrong: Callable[[list], bool]) -> None:
    caller = await start()
    caller.sim.faults.on(logprobs=how)
    common = {"max_tokens": 20, "ignore_eos": True}
    body: dict[str, Any] = {
        COMPLETIONS: {"prompt": "a", "logprobs": 0, **common},
        CHAT: {"messages": [{"role": "user", "content": "a"}], "logprobs": True, **common},
        GENERATE: {"token_ids": [1], "sampling_params": {"logprobs": 0, **common}},
    }[path]
    _, answer = await caller.send("POST", path, body)
    logprobs = answer["choices"][0]["logprobs"]
    assert wrong(logprobs["token_logprobs"] if path == COMPLETIONS else [e["logprob"] for e in logprobs["content"]])


async def test_a_text_is_scripted(start: Start) -> None:
    caller = await start()
    caller.sim.faults.on("hello", text="42 ü")
    choice = await caller.choice(max_tokens=2)
    assert (choice["text"], choice["finish_reason"]) == ("42 ü", "stop")
    assert choice["token_ids"] == [*"42 ü".encode(), 258]
    assert len(set(choice["logprobs"]["token_logprobs"])) > 3


@pytest.mark.parametrize("do", [{"cut": True}, {"truncate": True}, {"cut_body": True}])
async def test_a_stream_breaks_off_after_its_first_chunk(start: Start, do: dict[str, Any]) -> None:
    caller = await start(latency=0.1, stream_interval_s=0.01)
    caller.sim.faults.on(**do)
    with pytest.raises(aiohttp.ClientError):
        await caller.ask(stream=True)
    assert caller.sim.engine.running == 0
    assert caller.sim.stats()["outcomes"]["cut"] == 1


async def test_a_stream_is_spoiled_like_an_answer(start: Start) -> None:
    caller = await start()
    caller.sim.faults.on("abort", finish_reason="abort")
    caller.sim.faults.on("garbage", malformed=True)
    assert b'"finish_reason":"abort"' in (await caller.ask("abort", stream=True))[1]
    assert b"data: {malformed" in (await caller.ask("garbage", stream=True))[1]


# -- the whole engine


async def test_a_dead_engine_core_answers_500_then_503_and_is_gone(start: Start) -> None:
    caller = await start(latency=3600.0)
    call, stream = soon(caller.ask()), soon(caller.ask(stream=True))
    await caller.sim.until(lambda sim: sim.engine.running == 2)
    assert (await caller.send("POST", "/sim/crash"))[1] == {"crashed": True}
    status, answer = await call
    assert (status, json.loads(answer)["error"]["type"]) == (500, "InternalServerError")
    status, answer = await stream
    assert status == 200
    assert b'data: {"error":' in answer
    async with caller.session.get(caller.sim.url + "/health") as response:
        assert response.status == 503
    assert (await caller.ask())[0] == 500
    await caller.sim.wait_gone()
    with pytest.raises(aiohttp.ClientError):
        await caller.ask()
    await caller.sim.start()
    async with caller.session.get(caller.sim.url + "/health") as response:
        assert response.status == 200


async def test_an_engine_that_is_down_answers_one_status_everywhere(start: Start) -> None:
    caller = await start()
    await caller.send("POST", "/sim/down", {"status": 502})
    assert (await caller.ask())[0] == 502
    async with caller.session.get(caller.sim.url + "/health") as response:
        assert response.status == 502
    await caller.send("POST", "/sim/down", {"status": None})
    assert (await caller.ask())[0] == 200
    assert (await caller.send("POST", "/sim/down", {"status": 200}))[0] == 400


# -- what was seen


async def test_requests_are_remembered_with_how_they_ended(start: Start) -> None:
    caller = await start()
    caller.sim.faults.on("bad", status=503)
    await caller.ask("good", request_id="one", temperature=0.5)
    await caller.ask("bad", request_id="two")
    await caller.ask("good", request_id="three", model="nope")
    _, seen = await caller.send("GET", "/sim/requests")
    assert [(r["request_id"], r["outcome"], r["status"], r["fault"]) for r in seen["requests"]] == [
        ("one", "answered", 200, False),
        ("two", "answered", 503, True),
        ("", "answered", 404, False),
    ]
    first = seen["requests"][0]
    assert (first["prompt"], first["abort_ids"], first["tokens"]) == ("good", ["cmpl-one-0"], 20)
    assert (first["body"]["temperature"], first["finish_reasons"]) == (0.5, ["length"])
    assert seen["outcomes"] == {"answered": 3, "aborted": 0, "disconnected": 0, "cut": 0}
    _, some = await caller.send("GET", "/sim/requests?match=bad&outcome=answered&limit=5")
    assert [r["request_id"] for r in some["requests"]] == ["two"]
    assert (await caller.send("GET", "/sim/requests?limit=many"))[0] == 400
    assert (await caller.send("GET", "/sim/requests?outcome=lost"))[0] == 400


async def test_memory_of_requests_is_bounded_and_the_counts_are_not(start: Start) -> None:
    caller = await start(journal_size=3)
    for number in range(5):
        await caller.ask(request_id=str(number))
    assert [record["request_id"] for record in caller.sim.requests()] == ["2", "3", "4"]
    _, stats = await caller.send("GET", "/sim/stats")
    assert (stats["requests"], stats["completions"], stats["tokens_decoded"]) == (5, 5, 100)
    assert (stats["running"], stats["outcomes"]["answered"], stats["peak_in_flight"]) == (0, 5, 1)
    await caller.send("DELETE", "/sim/requests")
    assert caller.sim.stats()["requests"] == 0
    assert caller.sim.requests() == []


async def test_a_long_body_is_not_kept(start: Start) -> None:
    caller = await start(max_model_len=65536)
    await caller.ask("a" * 20000)
    record = caller.sim.requests()[0]
    assert record["body"] is None
    assert len(record["prompt"]) == 20000


async def test_waiting_for_what_never_comes_times_out(start: Start) -> None:
    caller = await start()
    with pytest.raises(TimeoutError):
        await caller.sim.until(lambda sim: sim.engine.running == 1, timeout_s=0.01)
