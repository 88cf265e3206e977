"""Whatever a reward does, it costs its own group at most, and no number is made up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.faults.conftest import MakeService
from tests.faults.scripted import Act, Engine, Rule, says
from tests.listening import end
from tests.service import prompt

NO_HALT = {"halt_after_unproductive_groups": 0}
FUNCTION = {"name": "accuracy", "function": "fault_rewards:accuracy", "timeout_s": 10.0}


def each(*rewards: object) -> Rule:
    """The attempt number n is scored with `rewards[n]`."""
    return lambda attempt: says(rewards[attempt.nth % len(rewards)], f"a{attempt.seq}")


async def test_none_nan_and_infinity_are_unscored_and_the_baseline_is_over_the_scored_ones(
    engine: Engine, service: MakeService
) -> None:
    engine.on("p:A;", each("None", "nan", "inf", "-inf", 0.25, 0.75))
    live = await service()
    await live.submit(prompt("A", 6))
    (group,) = await live.collect(1)
    scored = [sample for sample in group["samples"] if sample["scored"]]
    assert len(group["samples"]) == 6
    assert sorted(sample["reward"] for sample in scored) == [0.25, 0.75]
    assert sorted(sample["advantage"] for sample in scored) == pytest.approx([-1, 1], abs=1e-6)
    assert (group["reward_mean"], group["reward_std"]) == (0.5, 0.25)
    for sample in group["samples"]:
        if not sample["scored"]:
            assert (sample["reward"], sample["advantage"], sample["rewards"]) == (None, 0.0, {"accuracy": None})


@pytest.mark.parametrize("rewards", [("None",) * 4, ("nan", "nan", "inf", 1.0)])
async def test_fewer_scored_than_min_group_size_is_dropped_as_unscorable(
    engine: Engine, service: MakeService, rewards: tuple[object, ...]
) -> None:
    engine.on("p:A;", each(*rewards))
    live = await service()
    (group_id,) = await live.submit(prompt("A"))
    assert (await live.wait_state(group_id, "dropped"))["reason"] == "unscorable"
    assert await live.metric("rollout_dropped_groups_total", 'reason="unscorable"') == 1
    assert await live.metric("rollout_reward_errors_total", 'reward="accuracy"') == 0


@pytest.mark.parametrize("mode", ["raise", "short", "long", "none", "text", "die"])
async def test_a_reward_that_raises_or_answers_nonsense_scored_nobody_is_counted_and_others_go_on(
    engine: Engine, service: MakeService, mode: str
) -> None:
    """Public fault 38: nothing is broadcast, nothing is made up."""
    live = await service()
    bad, good = await live.submit(prompt("bad", mode=mode), prompt("good"))
    group = await live.wait_state(bad, "dropped")
    assert group["reason"] == "unscorable"
    assert group["error"].startswith("accuracy: ")
    assert [g["group_id"] for g in await live.collect(1)] == [good]
    assert await live.metric("rollout_reward_errors_total", 'reward="accuracy"') == 1
    (entry,) = live.logged("reward_failed")
    assert entry["group_id"] == bad
    if mode == "raise":
        assert "the judge is ill" in entry["traceback"]


async def test_with_two_rewards_the_other_ones_scores_stand(engine: Engine, service: MakeService) -> None:
    engine.on(None, lambda a: Act(text=f"r={a.nth};s={a.nth % 2}"))
    second = {"name": "second", "function": "fault_rewards:second", "weight": 0.5, "timeout_s": 10.0}
    live = await service(rewards=[FUNCTION, second])
    await live.submit(prompt("both"), prompt("one", mode="raise"))
    groups = {group["prompt_id"]: group for group in await live.collect(2)}
    both = sorted(groups["both"]["samples"], key=lambda sample: sample["rewards"]["accuracy"])
    assert [sample["rewards"]["second"] for sample in both] == [None, 1.0, None, 1.0]
    assert [sample["reward"] for sample in both] == [0, 1.5, 2, 3.5]
    one = groups["one"]["samples"]
    assert (
        sorted((sample["reward"] is None, sample["reward"]) for sample in one if sample["scored"]) == [(False, 0.5)] * 2
    )
    assert sum(sample["scored"] for sample in one) == 2
    assert groups["one"]["zero_variance"] is True
    assert {sample["advantage"] for sample in one} == {0.0}


@pytest.mark.parametrize("function", ["accuracy", "thinking"])
async def test_a_cancellation_raised_in_a_reward_drops_that_group_only(
    engine: Engine, service: MakeService, function: str
) -> None:
    """Public fault 14."""
    live = await service(rewards=[FUNCTION | {"function": f"fault_rewards:{function}"}])
    bad, good = await live.submit(prompt("bad", mode="cancel"), prompt("good"))
    assert (await live.wait_state(bad, "dropped"))["reason"] == "reward_cancelled"
    assert [g["group_id"] for g in await live.collect(1)] == [good]
    assert await live.metric("rollout_dropped_groups_total", 'reason="reward_cancelled"') == 1


@pytest.mark.timeout(180)
async def test_a_reward_that_loops_for_ever_frees_its_worker_ten_times_and_http_stays_responsive(
    engine: Engine, service: MakeService
) -> None:
    """Public fault 40: a busy loop, which no thread could be torn out of."""
    live = await service(rewards=[FUNCTION | {"timeout_s": 1.0}], groups=NO_HALT)
    await live.submit(*(prompt(f"warm{number}") for number in range(20)))
    began = time.monotonic()
    await live.collect(20)
    normal_s = time.monotonic() - began
    slowest = [0.0]
    async with _asking(live, slowest):
        for number in range(10):
            (group_id,) = await live.submit(prompt(f"busy{number}", mode="busy"))
            group = await live.wait_state(group_id, "dropped")
            assert (group["reason"], "1 s" in group["error"]) == ("unscorable", True)
        await live.submit(*(prompt(f"after{number}") for number in range(20)))
        began = time.monotonic()
        await live.collect(20)
    assert time.monotonic() - began < max(5.0, 5 * normal_s), "a worker is missing"
    assert slowest[0] < 1.0, "the event loop stood still"
    assert await live.metric("rollout_reward_errors_total", 'reward="accuracy"') == 10
    workers = {call["pid"] for call in live.reward_calls()}
    assert len(workers) >= 11, "each loop cost a process"


async def test_an_async_reward_that_sleeps_is_ended_by_its_deadline_and_by_a_bump(
    engine: Engine, service: MakeService
) -> None:
    live = await service(
        rewards=[FUNCTION | {"function": "fault_rewards:thinking", "timeout_s": 0.5}], groups={"max_staleness": 0}
    )
    (group_id,) = await live.submit(prompt("A", mode="sleep"))
    assert (await live.wait_state(group_id, "dropped"))["reason"] == "unscorable"
    (group_id,) = await live.submit(prompt("B", mode="sleep"))
    await live.wait_state(group_id, "scoring")
    await live.bump(1)
    assert await live.state(group_id) == "stale"
    await live.submit(prompt("C"))
    assert len(await live.collect(1)) == 1


async def test_a_delete_while_the_judge_sleeps_frees_the_worker_for_others(
    engine: Engine, service: MakeService
) -> None:
    live = await service(rewards=[FUNCTION | {"timeout_s": 600.0}])
    (slow,) = await live.submit(prompt("slow", mode="sleep"))
    await live.wait_state(slow, "scoring")
    assert (await live.http.delete(f"/groups/{slow}")).json()["reason"] == "cancelled"
    await live.submit(prompt("next"))
    assert len(await live.collect(1)) == 1


async def test_a_judge_over_http_that_fails_scores_nobody_and_null_is_unscored(
    engine: Engine, service: MakeService
) -> None:
    """Public fault 41."""
    asked: list[dict[str, Any]] = []

    async def judge(request: web.Request) -> web.Response:
        fields = await request.json()
        asked.append(fields)
        if fields["kind"][0] == "ill":
            return web.Response(status=503, text="judge overloaded")
        if fields["kind"][0] == "nan":
            return web.Response(body=b'{"rewards": [NaN, 1, 2, 3]}', content_type="application/json")
        return web.json_response({"rewards": [None, 1, 2.5, True][: len(fields["completions"])]})

    app = web.Application()
    app.router.add_post("/score", judge)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/score"
        live = await service(rewards=[{"name": "judge", "url": url, "timeout_s": 5.0}])
        ill, nan, _ = await live.submit(
            prompt("ill", kind="ill"), prompt("nan", kind="nan"), prompt("well", kind="well")
        )
        assert "judge overloaded" in (await live.wait_state(ill, "dropped"))["error"]
        await live.wait_state(nan, "dropped")
        (group,) = await live.collect(1)
    finally:
        await end(runner)
    assert [sample["reward"] for sample in group["samples"]] == [None, 1.0, 2.5, 1.0]
    assert await live.metric("rollout_reward_errors_total", 'reward="judge"') == 2
    (call,) = [fields for fields in asked if fields["kind"] == ["well"] * 4]
    assert call["prompts"] == ["p:well;"] * 4
    assert call["completions"] == [bytes(ids).decode() for ids in call["completion_ids"]]
    json.dumps(call)


async def test_equal_rewards_give_exactly_zero_and_are_kept_or_dropped_as_configured(
    engine: Engine, service: MakeService
) -> None:
    engine.on("p:same;", says(0.1))
    live = await service()
    await live.submit(prompt("same"))
    (group,) = await live.collect(1)
    assert group["zero_variance"] is True
    assert [sample["advantage"] for sample in group["samples"]] == [0.0] * 4
    dropping = await service(groups={"zero_variance": "drop"})
    (group_id,) = await dropping.submit(prompt("same"))
    assert (await dropping.wait_state(group_id, "dropped"))["reason"] == "zero_variance"


@asynccontextmanager
async def _asking(live: Any, slowest: list[float]) -> AsyncIterator[None]:
    """Ask /livez again and again, and keep the slowest answer."""

    async def ask() -> None:
        while True:
            began = time.monotonic()
            await live.probe("/livez")
            slowest[0] = max(slowest[0], time.monotonic() - began)
            await asyncio.sleep(0.02)

    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        asking.cancel()
