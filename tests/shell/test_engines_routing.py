"""A fleet over scripted engines: where requests go, what they carry, and engines that fail fast or come back."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from rollout_service.core.model import FailureReason
from rollout_service.engines import CacheSalt, EngineSpec, Fleet, FleetSettings, GenerationFailed
from tests.engine_fleets import ask, fleet_of, generate, until
from tests.engine_script import Asked, Reply, ScriptedEngine, hold

PRIORITY = {"vllm_config": {"model_config": {}, "scheduler_config": {"policy": "priority"}}}


def metrics(running: int = 0, waiting: int = 0, kv: float = 0.0) -> str:
    return (
        f'vllm:num_requests_running{{engine="0"}} {running}.0\n'
        f'vllm:num_requests_waiting{{engine="0"}} {waiting}.0\n'
        f'vllm:kv_cache_usage_perc{{engine="0"}} {kv}\n'
    )


async def test_the_rows_of_a_group_go_to_one_engine_and_groups_are_spread() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, fleet_of(one, two) as fleet:
        one.script, reply = hold()
        two.script = one.script
        tasks = [
            asyncio.ensure_future(generate(fleet, replace(ask(f"prompt {group}"), group=f"g-{group}.1")))
            for group in range(6)
            for _ in range(4)
        ]
        await until(lambda: len(one.asked) + len(two.asked) == 24)
        reply.set_result(Reply())
        await asyncio.gather(*tasks)
        where = [Counter(asked.body["prompt"] for asked in engine.asked) for engine in (one, two)]
        assert not set(where[0]) & set(where[1]), "a group was dealt out over both"
        assert set(where[0].values()) | set(where[1].values()) == {4}
        assert min(len(where[0]), len(where[1])) >= 2


async def test_the_turns_of_a_rollout_stay_where_its_history_is() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, fleet_of(one, two) as fleet:
        for turn in range(3):
            for row in range(4):
                await generate(
                    fleet, replace(ask(f"row {row}"), tag=f"g.1.{row}.{turn}", rollout=f"g.1.{row}", many_turns=True)
                )
        where = [Counter(asked.body["prompt"] for asked in engine.asked) for engine in (one, two)]
        assert not set(where[0]) & set(where[1])
        assert len(where[0]) == len(where[1]) == 2


async def test_a_group_whose_engine_is_gone_makes_another_its_home() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, fleet_of(one, two) as fleet:
        request = replace(ask(), group="g-1.1")
        first = (await generate(fleet, request)).engine
        home, other = (one, two) if first == one.url else (two, one)
        await home.stop()
        await until(lambda: not all(engine["healthy"] for engine in fleet.describe()))
        assert (await generate(fleet, request)).engine == other.url
        await home.start()
        await until(lambda: all(engine["healthy"] for engine in fleet.describe()))
        assert (await generate(fleet, request)).engine == other.url, "its prompt is cached there now"


async def test_what_an_engine_runs_for_others_sends_work_elsewhere() -> None:
    async with ScriptedEngine() as busy, ScriptedEngine() as idle, fleet_of(busy, idle) as fleet:
        busy.metrics = lambda: metrics(running=40)
        idle.metrics = metrics
        await until(lambda: all(engine["running"] is not None for engine in fleet.describe()))
        for _ in range(8):
            assert (await generate(fleet)).engine == idle.url
        busy.metrics = metrics
        idle.metrics = lambda: metrics(waiting=3)
        await until(lambda: [engine["running"] for engine in fleet.describe()] == [0, 0])
        assert (await generate(fleet)).engine == busy.url


async def test_an_engine_without_a_readable_load_is_used_by_our_own_count() -> None:
    async with ScriptedEngine() as silent, ScriptedEngine() as garbled, fleet_of(silent, garbled) as fleet:
        garbled.metrics = lambda: "\x00 vllm:num_requests_running NaN\n" * 100
        await until(lambda: silent.paths["/metrics"] == 1 and garbled.paths["/metrics"] >= 2)
        answers = [await generate(fleet) for _ in range(6)]
        assert Counter(answer.engine for answer in answers) == {silent.url: 3, garbled.url: 3}
        assert silent.paths["/metrics"] == 1, "one that has no such page is not asked again"


async def test_a_lone_engine_with_a_static_limit_is_not_asked_for_its_load() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        await until(lambda: engine.paths["/health"] >= 40)  # two seconds of probes
        assert engine.paths["/metrics"] == 0
        assert fleet.describe()[0]["running"] is None


async def test_a_limit_of_auto_follows_the_engines_queue_and_is_never_exceeded() -> None:
    async with ScriptedEngine() as engine:
        settings = FleetSettings(probe_interval_s=0.05, engine_wait_s=5.0)
        sizes: list[int] = []
        fleet = Fleet(
            [EngineSpec(url=engine.url, max_inflight="auto", ceiling=80)],
            settings,
            on_change=lambda: sizes.append(fleet.healthy_capacity()),
        )
        engine.metrics = metrics
        engine.script, reply = hold()
        await fleet.start()
        try:
            first = fleet.healthy_capacity()
            tasks = [asyncio.ensure_future(generate(fleet)) for _ in range(120)]
            await engine.wait_for(lambda: len(engine.asked) == 80)
            assert first < 80
            assert fleet.healthy_capacity() == 80, "it grew to its ceiling and not beyond"
            engine.metrics = lambda: metrics(running=20, waiting=60)
            await until(lambda: fleet.healthy_capacity() < 80)
            lowered = fleet.healthy_capacity()
            assert fleet.describe()[0]["auto"]
            assert sizes[-1] == lowered, "whoever dispatches is told"
            assert len(engine.asked) == 80, "a lowered limit lets nothing more in"
            reply.set_result(Reply())
            await asyncio.gather(*tasks)
        finally:
            await fleet.stop()


async def test_an_engine_that_refuses_everything_at_once_does_not_get_all_the_work() -> None:
    """It is always the least loaded one; its probes are fine, and a refusal is no reason to try elsewhere."""
    async with ScriptedEngine() as bad, ScriptedEngine() as good, fleet_of(bad, good, max_inflight=4) as fleet:
        bad.script = lambda asked: Reply(status=404, body=b'{"detail": "Not Found"}')

        async def slow(asked: Asked) -> Reply:
            await asyncio.sleep(0.01)
            return Reply()

        good.script = slow
        outcomes = await asyncio.gather(*(generate(fleet) for _ in range(100)), return_exceptions=True)
        failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        assert len(failed) == len(bad.asked) < 12
        assert fleet.describe()[0]["doubtful"]
        assert fleet.healthy_capacity() <= 5, "nor is it counted as room for more"


async def test_one_success_ends_the_doubt() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, fleet_of(one, two, max_attempts=1) as fleet:
        one.script = lambda asked: Reply(status=404, body=b'{"error": {"message": "no"}}')
        failures = 0
        while not fleet.describe()[0]["doubtful"]:
            try:
                await generate(fleet)
            except GenerationFailed:
                failures += 1
        assert failures == 3
        one.script = lambda asked: Reply()
        assert fleet.healthy_capacity() == 64
        while fleet.describe()[0]["doubtful"]:
            await generate(fleet)
        assert fleet.healthy_capacity() == 128


async def test_prompts_that_are_too_long_say_nothing_against_an_engine() -> None:
    too_long = b'{"error": {"message": "too long", "param": "input_tokens"}}'
    async with ScriptedEngine() as one, ScriptedEngine() as two, fleet_of(one, two) as fleet:
        one.script = two.script = lambda asked: Reply(status=400, body=too_long)
        for _ in range(12):
            with pytest.raises(Exception, match="too long") as failed:
                await generate(fleet)
            assert failed.value.reason is FailureReason.PROMPT_TOO_LONG
        assert not any(engine["doubtful"] for engine in fleet.describe())


async def test_requests_carry_the_salt_of_the_moment_and_a_priority_only_where_the_engine_has_them() -> None:
    version = {"now": 3, "returns": 0}
    async with ScriptedEngine() as plain, ScriptedEngine() as ordered:
        ordered.server_info = PRIORITY
        specs = [EngineSpec(url=engine.url) for engine in (plain, ordered)]
        salt = CacheSalt(lambda: version["now"], lambda: version["returns"])
        fleet = Fleet(specs, FleetSettings(), cache_salt=salt)
        await fleet.start()
        try:
            for _ in range(2):
                await generate(fleet, replace(ask(), priority=7))
            version["now"] = 4
            for _ in range(2):
                await generate(fleet, replace(ask(), priority=7))
        finally:
            await fleet.stop()
    assert [asked.body.get("priority") for asked in plain.asked] == [None, None]
    assert [asked.body.get("priority") for asked in ordered.asked] == [7, 7]
    salts = [[asked.body["cache_salt"] for asked in engine.asked] for engine in (plain, ordered)]
    assert salts[0] == salts[1]
    assert len(set(salts[0])) == 2
    assert salts[0][0].startswith("v3-")
    assert salts[0][1].startswith("v4-")


async def test_no_salt_is_sent_where_none_is_wanted() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        await generate(fleet)
    assert "cache_salt" not in engine.asked[0].body


def test_a_salt_is_another_after_the_version_went_back_and_up_again_and_after_a_restart() -> None:
    standing = {"version": 5, "returns": 0}
    salt = CacheSalt(lambda: standing["version"], lambda: standing["returns"])
    before = salt()
    assert salt() == before
    standing.update(version=3, returns=1)
    standing.update(version=5)
    assert salt() != before
    standing.update(returns=0)
    assert salt() == before
    assert CacheSalt(lambda: 5, lambda: 0)() != before


async def test_an_engine_that_comes_back_works_at_once_and_its_answers_wait_until_it_has_told_the_rest() -> None:
    """A vLLM that has just started takes up to 12 s to answer its first /server_info."""
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.server_info = PRIORITY
        await engine.stop()
        await until(lambda: not fleet.describe()[0]["healthy"])
        told = asyncio.Event()
        engine.before_server_info = told.wait
        await engine.start()
        working = asyncio.ensure_future(generate(fleet, replace(ask(), priority=7)))
        await engine.wait_asked(1)
        assert "priority" not in engine.asked[0].body, "whether it has them now is not known yet"
        await engine.wait_for(lambda: engine.asked[0].outcome == "answered")
        assert not working.done()
        told.set()
        assert (await working).attempts == 1


async def test_what_an_engine_answered_before_it_turned_out_to_be_another_is_not_used() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, max_attempts=1) as fleet:
        await engine.stop()
        await until(lambda: not fleet.describe()[0]["healthy"])
        told = asyncio.Event()
        engine.before_server_info = told.wait
        engine.server_info = {"vllm_config": {"model_config": {"logprobs_mode": "raw_logits"}}}
        await engine.start()
        working = asyncio.ensure_future(generate(fleet))
        await engine.wait_asked(1)
        told.set()
        with pytest.raises(GenerationFailed) as failed:
            await working
        assert failed.value.reason is FailureReason.BAD_ANSWER
        assert "logits" in fleet.describe()[0]["error"]


async def test_one_look_that_fails_after_a_return_does_not_keep_an_engine_from_being_used() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        await engine.stop()
        await until(lambda: not fleet.describe()[0]["healthy"])
        looks = 0

        async def once() -> None:
            nonlocal looks
            looks += 1
            engine.models_status = 503 if looks == 1 else 200

        engine.before_server_info = once
        await engine.start()
        assert (await generate(fleet)).attempts >= 1
        await until(lambda: fleet.describe()[0]["healthy"])
        assert (await generate(fleet)).attempts == 1


async def test_an_answer_that_waits_for_the_rest_moves_elsewhere_when_its_engine_is_removed() -> None:
    async with ScriptedEngine() as back, ScriptedEngine() as other, fleet_of(back, other) as fleet:
        await back.stop()
        await until(lambda: not fleet.describe()[0]["healthy"])
        back.before_server_info = asyncio.Event().wait
        await back.start()
        await until(lambda: fleet.describe()[0]["healthy"])
        while not back.asked:
            working = asyncio.ensure_future(generate(fleet))
            await until(lambda: back.asked or other.asked)
            if not back.asked:
                await working
                other.asked.clear()
        await back.wait_for(lambda: back.asked[0].outcome == "answered")
        await fleet.remove_engine(fleet.describe()[0]["id"], drain_s=0)
        answer = await working
        assert (answer.engine, answer.attempts) == (other.url, 1)


async def test_an_answer_does_not_wait_longer_for_the_rest_than_its_request_may_take() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, request_timeout_s=0.3, max_attempts=1) as fleet:
        await engine.stop()
        await until(lambda: not fleet.describe()[0]["healthy"])
        engine.before_server_info = asyncio.Event().wait
        await engine.start()
        with pytest.raises(GenerationFailed) as failed:
            await generate(fleet)
        assert failed.value.reason is FailureReason.TIMEOUT


async def test_refusals_of_a_prompt_say_nothing_against_an_engine() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, fleet_of(one, two) as fleet:
        one.script = two.script = lambda asked: Reply(status=400, body=b'{"error": {"message": "no"}}')
        for _ in range(8):
            with pytest.raises(GenerationFailed):
                await generate(fleet)
        assert not any(engine["doubtful"] for engine in fleet.describe())


async def test_who_waits_is_told_when_a_doubtful_engine_may_be_tried_again() -> None:
    async with (
        ScriptedEngine() as sure,
        ScriptedEngine() as bad,
        fleet_of(sure, bad, max_inflight=1, max_attempts=1) as fleet,
    ):
        sure.script, reply = hold()
        bad.script = lambda asked: Reply(status=404)
        held = asyncio.ensure_future(generate(fleet))
        await sure.wait_asked(1)  # equals take turns, and the first of them is first
        while not fleet.describe()[1]["doubtful"]:
            with pytest.raises(GenerationFailed):
                await generate(fleet)
        bad.script = lambda asked: Reply()
        # Nothing else happens that could wake it: the sure one stays full.
        assert (await generate(fleet)).engine == bad.url
        reply.set_result(Reply())
        await held


async def test_an_engine_whose_logprobs_may_be_others_now_is_asked_before_it_works() -> None:
    async with ScriptedEngine() as engine:
        engine.server_info = {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}
        async with fleet_of(engine, temperature=0.7) as fleet:
            await engine.stop()
            await until(lambda: not fleet.describe()[0]["healthy"])
            engine.server_info = {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}}
            await engine.start()
            await until(lambda: "before the temperature" in (fleet.describe()[0]["error"] or ""))
            assert not fleet.describe()[0]["healthy"]
            assert not engine.asked
