"""Several engines as one: retries, health, routing, waiting, start."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from rollout_service.core.model import FailureReason
from rollout_service.engines import EngineSpec, Fleet, FleetSettings, GenerationFailed
from rollout_service.errors import ConfigError
from tests.engine_fleets import ClosableGate, Counted, OpenGate, ask, fleet_of, generate, until
from tests.engine_script import Asked, Reply, ScriptedEngine, hold
from tests.listening import listening


def error(status: int, message: str, param: str | None = None, **headers: str) -> Reply:
    body = json.dumps({"error": {"message": message, "param": param}}).encode()
    return Reply(status=status, body=body, headers=headers)


def in_turn(*replies: Reply) -> Callable[[Asked], Reply]:
    """The replies in order; the last one for ever."""
    left = list(replies)
    return lambda asked: left.pop(0) if len(left) > 1 else left[0]


async def failure(fleet: Fleet, *args: Any, **kwargs: Any) -> GenerationFailed:
    with pytest.raises(GenerationFailed) as caught:
        await generate(fleet, *args, **kwargs)
    return caught.value


# -- the one retry policy


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
async def test_a_transient_status_is_asked_again_and_counted(status: int) -> None:
    events = Counted()
    async with ScriptedEngine() as engine, fleet_of(engine, events=events) as fleet:
        engine.script = in_turn(error(status, "later"), Reply())
        answer = await generate(fleet)
    assert answer.attempts == 2
    assert events.retries == {FailureReason.SERVER_ERROR: 1}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
async def test_a_permanent_status_is_not_asked_again_and_keeps_the_engines_message(status: int) -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.script = in_turn(error(status, "unlucky prompt 4711"))
        failed = await failure(fleet)
    assert (failed.reason, failed.attempts, failed.engine) == (FailureReason.REJECTED, 1, engine.url)
    assert "unlucky prompt 4711" in str(failed)
    assert len(engine.asked) == 1


@pytest.mark.parametrize(
    ("reply", "reason", "tokens"),
    [
        (error(503, "paused"), FailureReason.SERVER_ERROR, 0),
        (Reply(ids=[1, 2, 3], logprobs=[-1.0]), FailureReason.BAD_ANSWER, 9),
        (Reply(ids=[1, 2, 3], logprobs=[-1.0, float("nan"), -1.0]), FailureReason.BAD_ANSWER, 0),
        (Reply(ids=[], logprobs=[]), FailureReason.BAD_ANSWER, 0),
        (Reply(body=b'{"choices": [{"fin'), FailureReason.BAD_ANSWER, 0),
        (Reply(change=lambda answer: answer["choices"].clear()), FailureReason.BAD_ANSWER, 6),
        (Reply(change=lambda answer: answer["usage"].update(completion_tokens=12)), FailureReason.BAD_ANSWER, 36),
        (Reply(ids=[1, 2, 3], finish_reason="abort"), FailureReason.ABORTED, 9),
        (Reply(finish_reason=None), FailureReason.ABORTED, 6),
        (Reply(cut_inside=True), FailureReason.CONNECTION, 0),
    ],
)
async def test_what_is_no_completion_is_asked_again_and_fails_after_max_attempts(
    reply: Reply, reason: FailureReason, tokens: int
) -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, max_attempts=3) as fleet:
        engine.script = in_turn(reply)
        failed = await failure(fleet)
        assert (failed.reason, failed.attempts, failed.wasted_tokens) == (reason, 3, tokens)
        assert len(engine.asked) == 3
        engine.script = in_turn(reply, Reply())
        assert (await generate(fleet)).attempts == 2


async def test_an_engine_that_says_503_five_times_is_outlasted_only_by_six_attempts() -> None:
    async with ScriptedEngine() as engine:
        script = [error(503, "paused")] * 5 + [Reply()]
        async with fleet_of(engine, max_attempts=6) as fleet:
            engine.script = in_turn(*script)
            assert (await generate(fleet)).attempts == 6
        async with fleet_of(engine, max_attempts=5) as fleet:
            engine.script = in_turn(*script)
            assert (await failure(fleet)).attempts == 5


async def test_retry_after_is_honoured() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.script = in_turn(error(429, "full", **{"Retry-After": "1"}), Reply())
        began = time.monotonic()
        await generate(fleet)
        assert time.monotonic() - began >= 1.0


async def test_retry_after_may_be_a_date() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        when = format_datetime(datetime.now(UTC) + timedelta(seconds=3), usegmt=True)
        engine.script = in_turn(error(429, "full", **{"Retry-After": when}), Reply())
        began = time.monotonic()
        await generate(fleet)
        assert time.monotonic() - began >= 1.5  # dates have whole seconds


async def test_retry_after_does_not_hold_back_from_another_engine() -> None:
    async with ScriptedEngine() as full, ScriptedEngine() as other, fleet_of(full, other) as fleet:
        full.script = in_turn(error(429, "full", **{"Retry-After": "30"}))
        async with asyncio.timeout(5):
            answer = await generate(fleet)
        assert answer.engine == other.url


async def test_a_failed_request_is_sent_to_another_engine_where_there_is_one() -> None:
    async with ScriptedEngine() as bad, ScriptedEngine() as good, fleet_of(bad, good) as fleet:
        bad.script = in_turn(error(500, "boom"))
        answer = await generate(fleet)
        assert (answer.engine, answer.attempts) == (good.url, 2)


async def test_the_gate_is_passed_before_every_request() -> None:
    gate = OpenGate()
    async with ScriptedEngine() as engine, fleet_of(engine, max_attempts=3) as fleet:
        engine.script = in_turn(error(429, "x"), error(429, "x"), Reply())
        await generate(fleet, gate=gate)
    assert gate.passes == 3


async def test_a_retry_waits_at_the_gate_while_it_is_closed() -> None:
    gate = ClosableGate()
    gate.open.set()
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:

        def script(asked: Asked) -> Reply:
            gate.open.clear()
            return error(429, "x")

        engine.script = script
        task = asyncio.ensure_future(generate(fleet, gate=gate))
        await until(lambda: gate.waiting)
        assert len(engine.asked) == 1
        engine.script = in_turn(Reply())
        gate.open.set()
        assert (await task).attempts == 2


async def test_a_caller_that_waited_for_a_slot_looks_at_the_gate_again() -> None:
    gate = ClosableGate()
    gate.open.set()
    async with ScriptedEngine() as engine, fleet_of(engine, max_inflight=1) as fleet:
        engine.script, answer = hold()
        first = asyncio.ensure_future(generate(fleet, gate=gate))
        await engine.wait_asked(1)
        second = asyncio.ensure_future(generate(fleet, gate=gate))
        await asyncio.sleep(0)
        gate.open.clear()
        answer.set_result(Reply())
        await first
        await until(lambda: gate.waiting)
        assert len(engine.asked) == 1
        gate.open.set()
        await second


# -- prompts that do not fit


@pytest.mark.parametrize("param", ["input_tokens", "input_text"])
async def test_the_engines_refusal_of_a_long_prompt_is_told_apart_from_other_refusals(param: str) -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.script = in_turn(error(400, "context length is 64", param))
        failed = await failure(fleet)
    assert (failed.reason, failed.attempts) == (FailureReason.PROMPT_TOO_LONG, 1)
    assert "context length is 64" in str(failed)


async def test_a_prompt_of_ids_that_fills_the_context_is_not_sent() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        failed = await failure(fleet, ask(ids=[1] * 64))
        assert (failed.reason, failed.attempts) == (FailureReason.PROMPT_TOO_LONG, 0)
        assert engine.asked == []
        await generate(fleet, ask(ids=[1] * 63))


async def test_a_prompt_goes_to_the_engine_that_has_room_for_it() -> None:
    async with ScriptedEngine() as short, ScriptedEngine() as long:
        long.models = {"data": [{"id": "tiny", "max_model_len": 128}]}
        async with fleet_of(short, long) as fleet:
            for _ in range(3):
                assert (await generate(fleet, ask(ids=[1] * 100))).engine == long.url
            assert (await failure(fleet, ask(ids=[1] * 128))).reason == FailureReason.PROMPT_TOO_LONG


# -- routing and capacity


async def test_work_goes_to_the_least_loaded_engine_and_never_above_its_capacity() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, fleet_of(one, two, max_inflight=4) as fleet:
        assert fleet.healthy_capacity() == 8
        one.script, first = hold()
        two.script, second = hold()
        tasks = [asyncio.ensure_future(generate(fleet)) for _ in range(12)]
        await one.wait_asked(4)
        await two.wait_asked(4)
        assert [engine["in_flight"] for engine in fleet.describe()] == [4, 4]
        first.set_result(Reply())
        second.set_result(Reply())
        await asyncio.gather(*tasks)
        assert len(one.asked) + len(two.asked) == 12


async def test_callers_that_wait_for_a_slot_are_served_first_come_first_served() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, max_inflight=1) as fleet:
        tasks = [asyncio.ensure_future(generate(fleet, ask(str(number)))) for number in range(8)]
        await asyncio.gather(*tasks)
    assert [asked.body["prompt"] for asked in engine.asked] == [str(number) for number in range(8)]


async def test_a_cancelled_waiter_takes_no_slot_with_it() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, max_inflight=1) as fleet:
        engine.script, answer = hold()
        tasks = [asyncio.ensure_future(generate(fleet)) for _ in range(4)]
        await engine.wait_asked(1)
        tasks[1].cancel()
        answer.set_result(Reply())
        await asyncio.wait(tasks[:1])
        tasks[2].cancel()  # may just have been given the slot
        await tasks[3]
        assert fleet.describe()[0]["in_flight"] == 0


async def test_a_waiter_past_its_deadline_gives_up() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, max_inflight=1) as fleet:
        engine.script, answer = hold()
        first = asyncio.ensure_future(generate(fleet))
        await engine.wait_asked(1)
        assert (await failure(fleet, deadline_s=0.05)).reason == FailureReason.DEADLINE
        answer.set_result(Reply())
        await first


# -- health


async def test_a_failed_probe_takes_an_engine_out_and_a_good_one_brings_it_back() -> None:
    changes: list[int] = []
    fleets: list[Fleet] = []

    def changed() -> None:
        changes.extend(fleet.healthy_capacity() for fleet in fleets)

    async with ScriptedEngine() as engine, fleet_of(engine, on_change=changed) as fleet:
        fleets.append(fleet)
        engine.health = lambda: 503
        await until(lambda: not fleet.describe()[0]["healthy"])
        assert fleet.describe()[0]["error"] == "/health: HTTP 503"
        assert fleet.healthy_capacity() == 0
        engine.health = lambda: 200
        await until(lambda: fleet.describe()[0]["healthy"])
        assert changes == [0, 64]
        assert fleet.describe()[0]["error"] is None


async def test_three_server_errors_in_a_row_take_an_engine_out_until_a_probe_succeeds() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, max_attempts=1, probe_interval_s=30) as fleet:
        engine.script = in_turn(error(500, "boom"))
        for _ in range(2):
            await failure(fleet)
        assert fleet.describe()[0]["healthy"]
        engine.script = in_turn(Reply())
        await generate(fleet)
        engine.script = in_turn(error(500, "boom"))
        for _ in range(2):
            await failure(fleet)
        assert fleet.describe()[0]["healthy"], "a success in between starts the count anew"
        await failure(fleet)
        assert not fleet.describe()[0]["healthy"]
        assert "boom" in fleet.describe()[0]["error"]
        engine.script = in_turn(Reply())
        assert (await generate(fleet)).attempts == 1  # after the early probe, long before the interval


async def test_refusals_and_bad_answers_do_not_take_an_engine_out() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, max_attempts=1) as fleet:
        for reply in (error(400, "no"), error(429, "full"), Reply(ids=[], logprobs=[])):
            engine.script = in_turn(reply)
            for _ in range(4):
                await failure(fleet)
        assert fleet.describe()[0]["healthy"]


async def test_an_engine_that_fails_fast_does_not_swallow_the_work_of_a_good_one() -> None:
    async with (
        ScriptedEngine() as bad,
        ScriptedEngine() as good,
        fleet_of(bad, good, max_inflight=4, probe_interval_s=60) as fleet,
    ):
        bad.script = in_turn(error(502, "bad gateway"))

        async def slow() -> Reply:
            await asyncio.sleep(0.02)
            return Reply()

        good.script = lambda asked: slow()
        answers = await asyncio.gather(*(generate(fleet) for _ in range(60)))
        assert {answer.engine for answer in answers} == {good.url}
        assert len(bad.asked) < 20


async def test_an_engine_that_is_dead_at_the_start_is_merely_unhealthy_and_used_when_it_comes_up() -> None:
    async with ScriptedEngine() as dead, ScriptedEngine() as alive:
        await dead.stop()
        async with fleet_of(dead, alive) as fleet:
            assert [engine["healthy"] for engine in fleet.describe()] == [False, True]
            assert (await generate(fleet)).attempts == 1
            await dead.start()
            await until(lambda: fleet.describe()[0]["healthy"])
            engines = Counter([(await generate(fleet)).engine for _ in range(4)])
            assert dead.url in engines


async def test_an_engine_that_answers_5xx_at_the_start_is_merely_unhealthy() -> None:
    async with ScriptedEngine() as engine:
        engine.models_status = 503
        async with fleet_of(engine) as fleet:
            assert not fleet.describe()[0]["healthy"]
            engine.models_status = 200
            await generate(fleet)


async def test_an_engine_that_dies_and_comes_back_costs_no_attempt_and_is_used_again_on_the_same_port() -> None:
    events = Counted()
    async with ScriptedEngine() as engine, fleet_of(engine, events=events, max_attempts=1) as fleet:
        engine.script, _ = hold()
        tasks = [asyncio.ensure_future(generate(fleet)) for _ in range(8)]
        await engine.wait_asked(8)
        await engine.stop()
        await until(lambda: not fleet.describe()[0]["healthy"])
        late = asyncio.ensure_future(generate(fleet))
        await until(lambda: events.retries[FailureReason.CONNECTION] == 8)
        engine.script = in_turn(Reply())
        await engine.start()
        answers = await asyncio.gather(*tasks, late)
        assert [answer.attempts for answer in answers] == [1] * 9


async def test_a_prompt_that_brings_down_every_engine_it_meets_does_not_go_round_for_ever() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, max_attempts=1, probe_interval_s=0.02) as fleet:
        up_again = 0.0

        def crash(asked: Asked) -> Reply:
            nonlocal up_again
            up_again = time.monotonic() + 0.1  # long enough for the probe that follows a broken connection
            return Reply(cut=True)

        def health() -> int:
            return 503 if time.monotonic() < up_again else 200

        engine.script, engine.health = crash, health
        failed = await failure(fleet)
    assert (failed.reason, failed.attempts) == (FailureReason.CONNECTION, 1)
    assert 10 < len(engine.asked) < 30


async def test_without_a_healthy_engine_a_generation_waits_engine_wait_and_then_fails_naming_the_engine() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, engine_wait_s=0.3) as fleet:
        await engine.stop()
        began = time.monotonic()
        failed = await failure(fleet)
        assert failed.reason == FailureReason.ENGINE_UNAVAILABLE
        assert time.monotonic() - began >= 0.3
        assert engine.url in str(failed)
        assert failed.attempts == 0


async def test_the_wait_begins_when_the_last_engine_is_lost_not_when_the_caller_began_to_wait() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, engine_wait_s=0.3, max_inflight=1) as fleet:
        engine.script, _ = hold()
        running = asyncio.ensure_future(generate(fleet))
        await engine.wait_asked(1)
        waiting = asyncio.ensure_future(failure(fleet))
        await asyncio.sleep(0.4)  # longer than engine_wait_s: the very thing tested
        assert not waiting.done()
        await engine.stop()
        assert (await waiting).reason == FailureReason.ENGINE_UNAVAILABLE
        running.cancel()
        await asyncio.wait([running])


async def test_an_engine_that_comes_back_with_another_model_stays_out_and_says_why() -> None:
    async with ScriptedEngine() as engine:
        with capture_logs() as logs:
            async with fleet_of(engine, model="tiny") as fleet:
                await engine.stop()
                await until(lambda: not fleet.describe()[0]["healthy"])
                engine.models = {"data": [{"id": "other"}]}
                await engine.start()
                await until(lambda: "does not serve model 'tiny'" in str(fleet.describe()[0]["error"]))
                seen = engine.paths["/v1/models"]
                await until(lambda: engine.paths["/v1/models"] > seen + 2)
                assert not fleet.describe()[0]["healthy"]
    wrong = [entry for entry in logs if "does not serve" in str(entry.get("error"))]
    assert len(wrong) == 1


# -- start


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda engine: setattr(engine, "models_status", 404), "no OpenAI-compatible server"),
        (lambda engine: setattr(engine, "models", b"<html>hello</html>"), "no OpenAI-compatible server"),
        (lambda engine: setattr(engine, "models", {"data": 7}), "no OpenAI-compatible server"),
        (lambda engine: setattr(engine, "models", {"data": []}), "does not serve model 'tiny'; it serves nothing"),
        (lambda engine: setattr(engine, "models", {"data": [{"id": "big"}]}), "it serves 'big'"),
        (lambda engine: setattr(engine, "models_status", 401), "needs an API key"),
    ],
)
async def test_an_engine_that_answers_wrongly_at_the_start_is_refused_in_one_line_with_its_url(
    change: Callable[[ScriptedEngine], None], words: str
) -> None:
    async with ScriptedEngine() as engine:
        change(engine)
        with pytest.raises(ConfigError, match=words) as caught:
            async with fleet_of(engine, model="tiny"):
                pass
        assert engine.url in str(caught.value)
        assert "\n" not in str(caught.value)


async def test_an_address_that_speaks_no_http_is_refused_at_the_start() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(b"-ERR unknown command 'GET'\r\n\r\n")
        writer.close()

    async with listening(greet) as address:
        url = f"http://{address}"
        with pytest.raises(ConfigError, match="no OpenAI-compatible server") as caught:
            async with fleet_of(url):
                pass
        assert url in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        b'HTTP/1.1 200 OK\r\nContent-Length: 171\r\n\r\n{"data": [',
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"dat\r\n',
        b"HTTP/1.1 200 OK\r\nContent-",
        b"",
    ],
    ids=["body", "chunks", "headers", "nothing"],
)
async def test_one_whose_connections_break_at_the_start_is_down_and_no_mistake_of_the_configuration(
    answer: bytes,
) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(answer)
        writer.close()

    async with listening(break_off) as address, fleet_of(f"http://{address}") as fleet:
        (engine,) = fleet.describe()
        assert not engine["healthy"]


async def test_a_plain_server_under_an_https_url_is_refused_at_the_start() -> None:
    async with ScriptedEngine() as engine:
        with pytest.raises(ConfigError, match="SSL"):
            async with fleet_of(engine.url.replace("http:", "https:")):
                pass


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1", "127.0.0.1:8000", "http://[::1"])
async def test_what_is_no_http_url_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError):
        async with fleet_of(url):
            pass


RAW = {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}}
PROCESSED = {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}
TEXT = {"vllm_config": "model='tiny', logprobs_mode='processed_logprobs', seed=0"}


async def test_raw_logprobs_are_refused_at_a_temperature_other_than_one_unless_allowed() -> None:
    async with ScriptedEngine() as engine:
        engine.server_info = RAW
        with pytest.raises(ConfigError, match="processed_logprobs"):
            async with fleet_of(engine, temperature=0.7):
                pass
        async with fleet_of(engine, temperature=0.7, allow_raw_logprobs=True) as fleet:
            assert fleet.describe()[0]["logprobs_mode"] == "raw_logprobs"
        async with fleet_of(engine, temperature=1.0):
            pass
        for info in (PROCESSED, TEXT):
            engine.server_info = info
            async with fleet_of(engine, temperature=0.7) as fleet:
                assert fleet.describe()[0]["logprobs_mode"] == "processed_logprobs"


async def test_logits_in_the_place_of_logprobs_are_refused() -> None:
    async with ScriptedEngine() as engine:
        engine.server_info = {"vllm_config": {"model_config": {"logprobs_mode": "raw_logits"}}}
        with pytest.raises(ConfigError, match="logits"):
            async with fleet_of(engine):
                pass


@pytest.mark.parametrize("info", [None, {"vllm_config": 7}, {"vllm_config": {"model_config": {}}}, [], "x"])
async def test_a_logprobs_mode_that_cannot_be_read_is_warned_of_once(info: Any) -> None:
    async with ScriptedEngine(dev_mode=info is not None) as engine:
        engine.server_info = info
        with capture_logs() as logs:
            async with fleet_of(engine, temperature=0.7) as fleet:
                assert fleet.describe()[0]["logprobs_mode"] is None
                await engine.stop()
                await until(lambda: not fleet.describe()[0]["healthy"])
                await engine.start()
                await until(lambda: fleet.describe()[0]["healthy"])
    assert [entry["event"] for entry in logs].count("engine_logprobs_mode_unreadable") == 1


async def test_a_prompts_own_temperature_over_raw_logprobs_is_warned_of_once() -> None:
    async with ScriptedEngine() as engine:
        with capture_logs() as logs:
            async with fleet_of(engine) as fleet:
                for _ in range(3):
                    await generate(fleet, ask(temperature=0.7))
    assert [entry["event"] for entry in logs].count("raw_logprobs_at_a_temperature") == 1


async def test_the_vocabulary_bounds_ids_where_the_engine_tells_it() -> None:
    async with ScriptedEngine() as engine:
        engine.server_info = {"vllm_config": {"model_config": {"hf_config": {"vocab_size": 100}}}}
        async with fleet_of(engine, max_attempts=1) as fleet:
            engine.script = in_turn(Reply(ids=[99]), Reply(ids=[100]))
            await generate(fleet)
            assert (await failure(fleet)).reason == FailureReason.BAD_ANSWER


async def test_a_refused_start_leaves_nothing_open() -> None:
    async with ScriptedEngine() as engine, ScriptedEngine() as wrong:
        wrong.models = {"data": []}
        fleet = Fleet([EngineSpec(url=engine.url), EngineSpec(url=wrong.url)], FleetSettings())
        with pytest.raises(ConfigError):
            await fleet.start()
        await until(lambda: engine.connections == wrong.connections == 0)


# -- the text of prompts given as ids


async def test_the_text_of_ids_is_asked_for_once_a_prompt_however_many_want_it() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        ids = array("i", [104, 105])
        texts = await asyncio.gather(*(fleet.prompt_text(ids) for _ in range(8)))
        assert texts == ["hi"] * 8
        assert await fleet.prompt_text(array("i", [104, 105])) == "hi"
        assert engine.paths["/detokenize"] == 1
        assert await fleet.prompt_text(array("i", [105])) == "i"
        assert engine.paths["/detokenize"] == 2


async def test_one_caller_that_is_cancelled_does_not_take_the_text_from_the_others() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        ids = array("i", [104, 105])
        first, second = (asyncio.ensure_future(fleet.prompt_text(ids)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == "hi"
        assert engine.paths["/detokenize"] == 1


async def test_an_engine_that_cannot_tell_the_text_is_warned_of_once_and_not_asked_again() -> None:
    async with ScriptedEngine() as engine:
        engine.detokenize = lambda ids: web.json_response({"detail": "Not Found"}, status=404)
        with capture_logs() as logs:
            async with fleet_of(engine) as fleet:
                for token in range(4):
                    assert await fleet.prompt_text(array("i", [token])) is None
    assert engine.paths["/detokenize"] == 1
    assert [entry["event"] for entry in logs].count("no_text_of_prompt_ids") == 1


async def test_texts_that_cannot_be_had_hold_up_one_rollout_and_not_all_that_follow() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.detokenize = lambda ids: web.Response(status=500)
        for token in range(8):
            assert await fleet.prompt_text(array("i", [token])) is None
        assert engine.paths["/detokenize"] == 3


async def test_a_text_that_could_not_be_had_once_is_asked_for_again() -> None:
    answers = iter([web.Response(status=500), web.Response(body=b"?"), web.json_response({"prompt": "hi"})])
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.detokenize = lambda ids: next(answers)
        assert await fleet.prompt_text(array("i", [1])) == "hi"
        assert engine.paths["/detokenize"] == 3
