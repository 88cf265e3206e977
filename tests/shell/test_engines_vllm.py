"""One vLLM server over real sockets: bodies, ids, aborts, connections."""

from __future__ import annotations

import asyncio
from array import array

import pytest
from structlog.testing import capture_logs

from rollout_service.core.model import FailureReason
from rollout_service.engines import Deadline, EngineSpec, Fleet, FleetSettings, GenerateRequest, GenerationFailed
from tests.engine_fleets import SAMPLING, ClosableGate, Counted, OpenGate, ask, fleet_of, generate, until
from tests.engine_script import Asked, Reply, ScriptedEngine, hold


async def cancelled(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)


def started(fleet: Fleet, count: int = 1) -> list[asyncio.Task[object]]:
    return [asyncio.ensure_future(generate(fleet, ask(tag=f"g.1.{index}"))) for index in range(count)]


# -- what is asked


async def test_text_and_ids_go_to_completions_and_messages_to_chat_all_with_ids_and_logprobs() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        text = await generate(fleet, ask("abc"))
        ids = await generate(fleet, ask(ids=[5, 6]))
        messages = [{"role": "user", "content": "hey"}]
        chat = await generate(fleet, GenerateRequest(tag="g.1.2", messages=messages, sampling=SAMPLING))
    assert [asked.path for asked in engine.asked] == ["/v1/completions"] * 2 + ["/v1/chat/completions"]
    common = {"model": "tiny", "return_token_ids": True, **SAMPLING}
    assert engine.asked[0].body == {**common, "prompt": "abc", "logprobs": 0}
    assert engine.asked[1].body == {**common, "prompt": [5, 6], "logprobs": 0}
    assert engine.asked[2].body == {**common, "messages": messages, "logprobs": True}
    assert text.turn.prompt_ids == array("i", list(b"abc"))
    assert ids.turn.prompt_ids == array("i", [5, 6])
    assert chat.turn.message == {"role": "assistant", "content": "hi"}
    assert (text.engine, text.attempts, text.logprobs_mode) == (engine.url, 1, "raw_logprobs")


async def test_chat_template_arguments_go_to_chat_only() -> None:
    arguments = {"chat_template_kwargs": {"enable_thinking": False}}
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        await generate(fleet, ask(**arguments))
        messages = [{"role": "user", "content": "hey"}]
        await generate(fleet, GenerateRequest(tag="g", messages=messages, sampling=SAMPLING | arguments))
    assert "chat_template_kwargs" not in engine.asked[0].body
    assert engine.asked[1].body["chat_template_kwargs"] == {"enable_thinking": False}


async def test_a_seed_is_sent_only_when_wanted_and_then_differs_for_every_attempt() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        await generate(fleet, ask(seed_per_attempt=False))
        for _ in range(8):
            await generate(fleet, ask(seed_per_attempt=True))
    assert "seed" not in engine.asked[0].body
    seeds = {asked.body["seed"] for asked in engine.asked[1:]}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert not any("seed_per_attempt" in asked.body for asked in engine.asked)


async def test_request_ids_begin_with_the_rollout_and_never_repeat_not_even_after_a_restart() -> None:
    async with ScriptedEngine() as engine:
        for _ in range(2):
            async with fleet_of(engine) as fleet:
                await asyncio.gather(*started(fleet, 3), *started(fleet, 3))
    ids = [asked.request_id for asked in engine.asked]
    assert len(set(ids)) == 12
    assert {request_id.partition("-")[0] for request_id in ids} == {"g.1.0", "g.1.1", "g.1.2"}


async def test_the_key_is_sent_everywhere_and_shown_nowhere() -> None:
    async with ScriptedEngine(dev_mode=False) as engine:
        url = engine.url.replace("http://", "http://user:hunter2@")
        with capture_logs() as logs:
            async with fleet_of(url, api_key="sk-secret") as fleet:
                answer = await generate(fleet)
                shown = f"{fleet.describe()} {answer} {EngineSpec(url='x', api_key='sk-secret')} {logs}"
    assert engine.asked[0].headers["authorization"] == "Bearer sk-secret"
    assert "hunter2" not in shown
    assert "sk-secret" not in shown


async def test_a_prompt_of_more_than_a_megabyte_is_sent_whole() -> None:
    ids = list(range(10**6, 10**6 + 200_000))
    async with ScriptedEngine() as engine:
        engine.models = {"data": [{"id": "tiny"}]}
        async with fleet_of(engine) as fleet:
            assert (await generate(fleet, ask(ids=ids))).turn.prompt_ids == array("i", ids)
    assert engine.asked[0].body["prompt"] == ids


# -- cancelling


async def test_cancelling_closes_the_connections_and_sends_all_abort_ids_in_one_call() -> None:
    events = Counted()
    async with ScriptedEngine() as engine, fleet_of(engine, events=events) as fleet:
        engine.script, _ = hold()
        tasks = started(fleet, 16)
        await engine.wait_asked(16)
        await cancelled(*tasks)
        await engine.wait_for(lambda: engine.aborts and all(asked.outcome for asked in engine.asked))
        assert {asked.outcome for asked in engine.asked} == {"disconnected"}
        assert sorted(engine.aborts[0]) == sorted(asked.abort_id for asked in engine.asked)
        assert events.aborts == 16
        assert fleet.describe()[0]["in_flight"] == 0


async def test_ids_of_young_requests_are_sent_once_more_for_the_abort_may_overtake_its_request() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.script, _ = hold()
        tasks = started(fleet, 2)
        await engine.wait_asked(2)
        await cancelled(*tasks)
        await engine.wait_for(lambda: len(engine.aborts) == 2)
        assert engine.aborts[0] == engine.aborts[1]
        tasks = started(fleet)
        await engine.wait_asked(3)
        await cancelled(*tasks)
        await engine.wait_for(lambda: len(engine.aborts) == 4)
        assert len(engine.aborts[2]) == len(engine.aborts[3]) == 1


async def test_ids_of_requests_that_ran_for_long_are_sent_once() -> None:
    now = [0.0]
    async with ScriptedEngine() as engine:
        engine.script, _ = hold()
        fleet = Fleet([EngineSpec(url=engine.url)], FleetSettings(), clock=lambda: now[0])
        await fleet.start()
        old = asyncio.ensure_future(fleet.generate(ask(), gate=OpenGate(), deadline=Deadline(lambda: now[0], 99)))
        await engine.wait_asked(1)
        now[0] = 1.5
        young = asyncio.ensure_future(fleet.generate(ask(), gate=OpenGate(), deadline=Deadline(lambda: now[0], 99)))
        await engine.wait_asked(2)
        await cancelled(old, young)
        await engine.wait_for(lambda: len(engine.aborts) == 2)
        await fleet.stop()
    assert engine.aborts[0] == [asked.abort_id for asked in engine.asked]
    assert engine.aborts[1] == [engine.asked[1].abort_id]


async def test_cancelling_what_was_never_sent_sends_no_abort() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, max_inflight=1) as fleet:
        engine.script, answer = hold()
        running, waiting = started(fleet, 2)
        await engine.wait_asked(1)
        await cancelled(waiting)
        answer.set_result(Reply())
        await running
    assert engine.aborts == []
    assert len(engine.asked) == 1


async def test_an_answer_that_arrives_in_the_moment_of_its_cancellation_is_dropped() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        for _ in range(32):
            engine.script, answer = hold()
            before = len(engine.asked)
            (task,) = started(fleet)
            await engine.wait_asked(before + 1)
            answer.set_result(Reply())
            await engine.wait_for(lambda before=before: engine.asked[before].outcome == "answered")
            await cancelled(task)
        assert fleet.describe()[0]["in_flight"] == 0


async def test_hundreds_of_cancelled_requests_leave_no_connection_and_no_slot_behind() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, max_inflight=8) as fleet:
        for cycle in range(64):
            engine.script, _ = hold()
            tasks = started(fleet, 12)
            await engine.wait_asked(8 * (cycle + 1))
            await cancelled(*tasks)
        engine.script = lambda asked: Reply()
        answers = await asyncio.gather(*started(fleet, 32))
        assert len(answers) == 32
        await until(lambda: engine.connections <= 8)
        assert fleet.describe()[0]["in_flight"] == 0


async def test_without_an_abort_route_the_connections_are_closed_and_it_is_said_once() -> None:
    async with ScriptedEngine(dev_mode=False) as engine:
        with capture_logs() as logs:
            async with fleet_of(engine) as fleet:
                assert fleet.describe()[0]["abort"] == "close"
                engine.script, _ = hold()
                tasks = started(fleet, 4)
                await engine.wait_asked(4)
                await cancelled(*tasks)
                await engine.wait_for(lambda: all(asked.outcome == "disconnected" for asked in engine.asked))
    assert engine.paths["/abort_requests"] == 0
    assert [entry["event"] for entry in logs].count("engine_has_no_abort_route") == 1


async def test_scale_out_servers_are_aborted_over_their_own_route() -> None:
    async with ScriptedEngine(dev_mode=False, scale_out=True) as engine, fleet_of(engine) as fleet:
        assert fleet.describe()[0]["abort"] == "scale_out"
        engine.script, _ = hold()
        tasks = started(fleet, 2)
        await engine.wait_asked(2)
        await cancelled(*tasks)
        await engine.wait_for(lambda: len(engine.aborts) == 2)
        assert set(engine.aborted) == {asked.abort_id for asked in engine.asked}


async def test_an_abort_route_that_turns_out_to_be_missing_is_given_up() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.script, _ = hold()
        engine.abort_status = 404
        tasks = started(fleet)
        await engine.wait_asked(1)
        await cancelled(*tasks)
        await until(lambda: fleet.describe()[0]["abort"] == "close")


async def test_a_failing_abort_call_is_counted_and_hurts_nobody() -> None:
    events = Counted()
    async with ScriptedEngine() as engine, fleet_of(engine, events=events) as fleet:
        engine.abort_status = 500
        engine.script, _ = hold()
        tasks = started(fleet, 3)
        await engine.wait_asked(3)
        await cancelled(*tasks)
        await until(lambda: events.failed_aborts >= 3)
        engine.script = lambda asked: Reply()
        await generate(fleet)


async def test_stopping_aborts_what_is_out() -> None:
    async with ScriptedEngine() as engine:
        engine.script, _ = hold()
        async with fleet_of(engine) as fleet:
            tasks = started(fleet, 3)
            await engine.wait_asked(3)
            await fleet.stop()
            assert sorted(engine.aborted) == sorted(asked.abort_id for asked in engine.asked)
            await cancelled(*tasks)


# -- timeouts


async def test_a_request_past_its_limit_is_closed_aborted_and_asked_again_under_another_id() -> None:
    events = Counted()
    async with ScriptedEngine() as engine, fleet_of(engine, events=events, request_timeout_s=0.1) as fleet:
        held, _ = hold()
        engine.script = lambda asked: held(asked) if len(engine.asked) == 1 else Reply()
        answer = await generate(fleet)
        assert answer.attempts == 2
        assert events.retries == {FailureReason.TIMEOUT: 1}
        await engine.wait_for(lambda: engine.asked[0].outcome == "disconnected" and engine.aborts)
        assert engine.aborts[0] == [engine.asked[0].abort_id]


async def test_requests_that_always_time_out_fail_after_max_attempts() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, request_timeout_s=0.05, max_attempts=2) as fleet:
        engine.script, _ = hold()
        with pytest.raises(GenerationFailed) as caught:
            await generate(fleet)
        assert (caught.value.reason, caught.value.attempts) == (FailureReason.TIMEOUT, 2)
        assert len(engine.asked) == 2


async def test_the_rollouts_deadline_ends_a_request_and_aborts_it() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.script, _ = hold()
        with pytest.raises(GenerationFailed) as caught:
            await generate(fleet, deadline_s=0.1)
        assert caught.value.reason == FailureReason.DEADLINE
        await engine.wait_for(lambda: engine.asked[0].outcome == "disconnected" and engine.aborts)


async def test_time_at_a_closed_gate_does_not_count_towards_the_deadline() -> None:
    gate = ClosableGate(says=100.0)
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        task = asyncio.ensure_future(generate(fleet, gate=gate, deadline_s=0.05))
        await until(lambda: gate.waiting)
        await asyncio.sleep(0.1)  # longer than the deadline: the very thing tested
        assert engine.asked == []
        gate.open.set()
        assert (await task).attempts == 1


# -- connections


def cut_reused(engine: ScriptedEngine) -> None:
    """Have the engine close a connection that is used again, before the first byte of an answer."""
    seen: set[object] = set()

    def script(asked: Asked) -> Reply:
        reused = asked.peer in seen
        seen.add(asked.peer)
        return Reply(cut=reused)

    engine.script = script


async def test_a_stale_keep_alive_connection_is_nobodys_fault_and_costs_no_attempt() -> None:
    events = Counted()
    async with ScriptedEngine() as engine, fleet_of(engine, events=events, max_attempts=1) as fleet:
        cut_reused(engine)
        gate = OpenGate()
        answers = [await generate(fleet, gate=gate) for _ in range(6)]
        assert [answer.attempts for answer in answers] == [1] * 6
        assert any(asked.outcome == "cut" for asked in engine.asked)
        assert gate.passes == len(engine.asked)
        assert not events.retries
        assert fleet.describe()[0]["healthy"]


async def test_waves_over_connections_that_the_engine_closes_when_idle_lose_nothing() -> None:
    async with ScriptedEngine(keepalive_s=0.25) as engine, fleet_of(engine, max_attempts=1) as fleet:
        for _ in range(8):
            await asyncio.gather(*started(fleet, 8))
            await asyncio.sleep(0.25)  # the pace of the waves: just when the engine closes
        assert len({asked.peer for asked in engine.asked}) > 8


async def test_a_new_connection_that_is_cut_is_a_failed_attempt() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, max_attempts=2) as fleet:
        engine.script = lambda asked: Reply(cut=True)
        with pytest.raises(GenerationFailed) as caught:
            await generate(fleet)
        assert (caught.value.reason, caught.value.attempts) == (FailureReason.CONNECTION, 2)
        assert len(engine.asked) == 2
        assert caught.value.engine == engine.url


async def test_a_connection_that_breaks_inside_the_answer_is_a_failed_attempt_even_when_reused() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, max_attempts=1) as fleet:
        await generate(fleet)
        engine.script = lambda asked: Reply(cut_inside=True)
        with pytest.raises(GenerationFailed, match="inside the answer") as caught:
            await generate(fleet)
        assert caught.value.reason == FailureReason.CONNECTION
        assert len(engine.asked) == 2


async def test_redirects_are_not_followed() -> None:
    async with ScriptedEngine() as other, ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.script = lambda asked: Reply(status=307, headers={"Location": other.url + asked.path})
        with pytest.raises(GenerationFailed) as caught:
            await generate(fleet)
        assert caught.value.reason == FailureReason.REJECTED
        assert other.asked == []


async def test_cookies_of_an_engine_are_not_kept() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.script = lambda asked: Reply(headers={"Set-Cookie": "a=b"})
        await generate(fleet)
        await generate(fleet)
    assert "cookie" not in engine.asked[1].headers
