"""A 200 is not yet a success: nothing that is malformed, aborted or misaligned becomes a sample."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.engine_script import Reply
from tests.faults.conftest import MakeService
from tests.faults.scripted import Act, Engine, answers, says
from tests.service import prompt, trained_ids, until

NAN, INF = math.nan, math.inf


def _without(name: str) -> Any:
    return lambda answer: answer["choices"][0].pop(name)


def _with(**fields: Any) -> Any:
    return lambda answer: answer["choices"][0].update(fields)


def _two_choices(answer: dict[str, Any]) -> None:
    answer["choices"] *= 2


BAD: dict[str, tuple[str, Act]] = {
    "finish_reason abort": ("aborted", answers(finish_reason="abort")),
    "finish_reason error": ("aborted", answers(finish_reason="error")),
    "finish_reason null": ("aborted", answers(finish_reason=None)),
    "finish_reason unknown": ("aborted", answers(finish_reason="scaled_down")),
    "finish_reason a number": ("aborted", answers(finish_reason=3)),
    "finish_reason missing": ("aborted", answers(change=_without("finish_reason"))),
    "no choices": ("bad_answer", answers(change=lambda answer: answer.update(choices=[]))),
    "two choices": ("bad_answer", answers(change=_two_choices)),
    "no token_ids": ("bad_answer", answers(change=_without("token_ids"))),
    "token_ids null": ("bad_answer", answers(change=_with(token_ids=None))),
    "token_ids empty": ("bad_answer", answers(ids=[])),
    "a negative id": ("bad_answer", answers(ids=[1, -1])),
    "an id of 2**31": ("bad_answer", answers(ids=[1, 2**31])),
    "a huge id": ("bad_answer", answers(ids=[1, 2**70])),
    "a float id": ("bad_answer", answers(ids=[1, 2.0])),
    "a text id": ("bad_answer", answers(ids=[1, "2"])),
    "a bool id": ("bad_answer", answers(ids=[1, True])),
    "fewer logprobs": ("bad_answer", answers(ids=[1, 2, 3, 4, 5], logprobs=[-0.5] * 4)),
    "more logprobs": ("bad_answer", answers(ids=[1, 2], logprobs=[-0.5] * 3)),
    "no logprobs": ("bad_answer", answers(change=_with(logprobs=None))),
    "a NaN logprob": ("bad_answer", answers(ids=[1, 2], logprobs=[-0.5, NAN])),
    "an infinite logprob": ("bad_answer", answers(ids=[1, 2], logprobs=[-0.5, -INF])),
    "a null logprob": ("bad_answer", answers(ids=[1, 2], logprobs=[-0.5, None])),
    "a logprob beyond float32": ("bad_answer", answers(ids=[1, 2], logprobs=[-0.5, -1e300])),
    "usage says more tokens": (
        "bad_answer",
        answers(change=lambda answer: answer.update(usage={"completion_tokens": 12})),
    ),
    "another prompt": ("bad_answer", answers(change=_with(prompt_token_ids=[1, 2, 3]))),
    "half a body": ("bad_answer", answers(body=b'{"choices": [{"index": 0, "finish_reason": "stop", "token_i')),
    "no JSON": ("bad_answer", answers(body=b"<html>502</html>")),
    "an empty body": ("bad_answer", answers(body=b"")),
    "a list": ("bad_answer", answers(body=b"[]")),
    "a number": ("bad_answer", answers(body=b"7")),
    "no UTF-8": ("bad_answer", answers(body=b'{"choices": "\xff"}')),
    "an error object": ("bad_answer", answers(body=b'{"error": {"message": "engine core died"}}')),
    "the connection cut inside the body": ("connection", answers(cut_inside=True)),
}


async def test_every_bad_answer_is_a_failed_attempt_with_its_reason_and_never_a_sample(
    engine: Engine, service: MakeService
) -> None:
    live = await service(groups={"halt_after_unproductive_groups": 0})
    for number, (_, act) in enumerate(BAD.values()):
        engine.on(f"p:bad{number};", lambda attempt, act=act: act if attempt.nth == 0 else says(attempt.nth))
    expected = await live.metrics()
    for number, (name, (reason, _)) in enumerate(BAD.items()):
        await live.submit(prompt(f"bad{number}", 3))
        (group,) = await live.collect(1)
        assert sorted(sample["reward"] for sample in group["samples"]) == [1, 2], name
        label = ("rollout_failed_total", f'{{reason="{reason}"}}')
        expected[label] += 1
        now = await live.metrics()
        failed = {key: value for key, value in expected.items() if key[0] == "rollout_failed_total"}
        assert {key: now[key] for key in failed} == failed, name
    assert len(engine.attempts) == 3 * len(BAD), "one attempt each: max_attempts is 1"
    assert await live.slots_used() == 0


async def test_a_connection_cut_for_ever_fails_the_rollouts_after_one_free_try_on_a_fresh_connection(
    engine: Engine, service: MakeService
) -> None:
    engine.on("p:A;", answers(cut=True))
    live = await service()
    await live.submit(prompt("warm"))
    await live.collect(1)  # idle connections are there to be reused
    (group_id,) = await live.submit(prompt("A"))
    await live.wait_state(group_id, "failed")
    assert await live.metric("rollout_failed_total", 'reason="connection"') == 4
    assert 4 <= len(engine.find("p:A;")) <= 8


async def test_a_bad_answer_is_tried_again_under_a_new_id_as_any_transient_fault(
    engine: Engine, service: MakeService
) -> None:
    for key, (_, act) in (("abort", BAD["finish_reason abort"]), ("half", BAD["half a body"])):
        engine.on(f"p:{key};", lambda attempt, act=act: act if attempt.nth < 4 else says(attempt.nth))
    live = await service(dispatch={"max_attempts": 2})
    await live.submit(prompt("abort"), prompt("half"))
    for group in await live.collect(2):
        assert sorted(sample["reward"] for sample in group["samples"]) == [4, 5, 6, 7]
        assert {sample["metrics"]["attempts"] for sample in group["samples"]} == {2}
    assert await live.metric("rollout_failed_total") == 0
    assert await live.metric("rollout_retries_total") == 8
    assert len({attempt.asked.request_id for attempt in engine.attempts}) == 16


async def test_truncated_completions_are_delivered_flagged_and_in_the_baseline(
    engine: Engine, service: MakeService
) -> None:
    """Public fault 45."""
    reason = {0: "length", 1: "length", 2: "stop", 3: "tool_calls"}
    engine.on(
        "p:A;",
        lambda a: Act(reply=Reply(ids=list(f"r={a.nth};".encode()), finish_reason=reason[a.nth])),
    )
    live = await service()
    await live.submit(prompt("A"))
    (group,) = await live.collect(1)
    by_reward = {sample["reward"]: sample for sample in group["samples"]}
    truncated = {reward: sample["truncated"] for reward, sample in by_reward.items()}
    assert truncated == {0: True, 1: True, 2: False, 3: False}
    assert {reward: sample["finish_reason"] for reward, sample in by_reward.items()} == reason
    assert group["reward_mean"] == 1.5


async def test_ids_and_logprobs_arrive_exactly_as_the_engine_gave_them(engine: Engine, service: MakeService) -> None:
    ids = [0, 2**31 - 1, 255, 256, 50_000, 7]
    logprobs = [0.0, -1.5, -0.0625, -1e-30, -103.97, -3.25]
    engine.on("p:A;", answers(ids=ids, logprobs=logprobs))
    live = await service()
    await live.submit(prompt("A"))
    (group,) = await live.collect(1)
    for sample in group["samples"]:
        assert trained_ids(sample) == ids
        assert sample["input_ids"] == [*b"p:A;", *ids]
        assert sample["completion_mask"] == [0] * 4 + [1] * 6
        assert sample["old_log_probs"][:4] == [0.0] * 4
        assert sample["old_log_probs"][4:] == pytest.approx(logprobs, rel=1e-6, abs=1e-37)


async def test_half_a_character_does_not_cost_the_tokens(engine: Engine, service: MakeService) -> None:
    ids = list("ü".encode()[:1])
    engine.on("p:A;", answers(ids=ids, change=_with(text="\udcc3")))
    live = await service()
    await live.submit(prompt("A"))
    (group,) = await live.collect(1)
    assert {tuple(trained_ids(sample)) for sample in group["samples"]} == {tuple(ids)}


async def test_an_answer_that_stalls_past_the_request_timeout_is_closed_and_replaced(
    engine: Engine, service: MakeService
) -> None:
    """Public fault 33: a new id for every attempt, the old one closed first, one result a row."""
    engine.on("p:A;", lambda a: Act(hold=a.nth < 2))
    live = await service(dispatch={"max_attempts": 3, "request_timeout_s": 0.7})
    await live.submit(prompt("A"))
    (group,) = await live.collect(1)
    assert sorted(sample["index"] for sample in group["samples"]) == [0, 1, 2, 3]
    assert len(engine.attempts) == 6
    assert all(attempt.left for attempt in engine.attempts[:2])
    assert len({attempt.asked.request_id for attempt in engine.attempts}) == 6
    assert await live.metric("rollout_retries_total", 'reason="timeout"') == 2


async def test_idle_connections_that_the_engine_closes_cost_no_rollout(service: MakeService, make_engine: Any) -> None:
    """Public fault 36."""
    engine = await make_engine(keepalive_s=0.3)
    live = await service([engine.url])
    for wave in range(6):
        await live.submit(*(prompt(f"{wave}.{number}") for number in range(4)))
        assert len(await live.collect(4)) == 4
        # Around the engine's limit, so that some connections are closed just as they are used again.
        if wave % 2:
            await until(lambda: engine.connections == 0)
    assert await live.metric("rollout_failed_total") == 0
    assert len(engine.attempts) == 6 * 16
