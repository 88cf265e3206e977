"""Engines that come and go: which addresses are let in, what becomes of work at an engine that leaves."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from rollout_service.core.model import FailureReason, WeightUpdate
from rollout_service.engines import Fleet, GenerationFailed
from rollout_service.errors import (
    Conflict,
    EngineNotAllowed,
    EngineRefused,
    EnginesBehind,
    InvalidField,
    NotFound,
    ShuttingDown,
    Unavailable,
)
from rollout_service.settings.registration import Pattern, RegistrationSettings, allowed_url, read_pattern
from tests.engine_fleets import ClosableGate, Counted, ask, fleet_of, generate, until
from tests.engine_script import Reply, ScriptedEngine, hold
from tests.listening import listening

LOOPBACK = (read_pattern("http://127.0.0.0/8:*"),)


def patterns(*texts: str) -> tuple[Pattern, ...]:
    return tuple(map(read_pattern, texts))


def fact(fleet: Fleet, name: str) -> list[Any]:
    return [engine[name] for engine in fleet.describe()]


def adding(*engines: ScriptedEngine | str, **settings: Any) -> Any:
    return fleet_of(*engines, **{"addable": LOOPBACK} | settings)


# -- which addresses are let in


@pytest.mark.parametrize(
    ("pattern", "url", "plain"),
    [
        ("http://10.0.0.7:8000", "http://10.0.0.7:8000", "http://10.0.0.7:8000"),
        ("http://10.0.0.7:8000", "HTTP://10.0.0.7:8000/", "http://10.0.0.7:8000"),
        ("http://10.0.0.0/8:8000", "http://10.255.0.1:8000/replica-1", "http://10.255.0.1:8000/replica-1"),
        ("http://10.0.0.0/8:*", "http://10.1.2.3", "http://10.1.2.3"),
        ("http://vllm:80", "http://vllm", "http://vllm"),
        ("http://vllm:80", "http://VLLM:80/", "http://vllm"),
        ("https://gpu.example:443", "https://gpu.example", "https://gpu.example"),
        ("HTTP://GPU_1.example:8000", "http://gpu_1.example:8000", "http://gpu_1.example:8000"),
        ("http://*.vllm.svc:8000", "http://a.vllm.svc:8000", "http://a.vllm.svc:8000"),
        ("http://*.vllm.svc:8000", "http://b.a.vllm.svc:8000", "http://b.a.vllm.svc:8000"),
        ("http://xn--bcher-kva.example:1", "http://xn--bcher-kva.example:1", "http://xn--bcher-kva.example:1"),
        ("http://[fd00::/8]:8000", "http://[fd00::7]:8000", "http://[fd00::7]:8000"),
        ("http://[::1]:*", "http://[::1]:5/a.b/c", "http://[::1]:5/a.b/c"),
    ],
)
def test_a_plainly_written_address_that_a_pattern_matches_is_let_in(pattern: str, url: str, plain: str) -> None:
    assert allowed_url(url, patterns(pattern)) == plain


EVERYTHING = patterns("http://0.0.0.0/0:*", "http://[::/0]:*", "http://*.example:*", "http://engine:*")


@pytest.mark.parametrize(
    "url",
    [
        "http://2130706433:8000",
        "http://0x7f000001:8000",
        "http://0x7f.1:8000",
        "http://127.1:8000",
        "http://0177.0.0.1:8000",
        "http://127.0.0.1.:8000",
        "http://127.0.0.01:8000",
        "http://127.0.0.256:8000",
        "http://1.example.1:8000",
        "http://engine.:8000",
        "http://.example:8000",
        "http://a..example:8000",
        "http://-a.example:8000",
        "http://*.example:8000",
        "http://engine%2eexample:8000",
        "http://%65ngine:8000",
        "http://engine%00.example:8000",
        "http://eng\N{LATIN SMALL LETTER DOTLESS I}ne:8000",
        "http://\N{CIRCLED LATIN SMALL LETTER E}ngine:8000",
        "http://\N{FULLWIDTH DIGIT ONE}27.0.0.1:8000",
        "http://\N{KELVIN SIGN}.example:8000",
        "http://engine:08000",
        "http://engine:\N{FULLWIDTH DIGIT EIGHT}000",
        "http://[::ffff:127.0.0.1]:8000",
        "http://[::ffff:7f00:1]:8000",
        "http://[0:0:0:0:0:0:0:1]:8000",
        "http://[FD00::0]:8000",
        "http://[fe80::1%25eth0]:8000",
        "http://[fe80::1%eth0]:8000",
        "http://engine:8000/..",
        "http://engine:8000/a/../b",
        "http://engine:8000/%2e%2e/",
        "http://engine:8000//elsewhere",
        "http://engine:8000/a;b",
        "http://engine.elsewhere:8000",
        "http://xexample:8000",
        "http://example:8000",
        "https://engine:8000",
    ],
)
def test_any_other_spelling_and_any_other_address_is_kept_out(url: str) -> None:
    with pytest.raises(EngineNotAllowed):
        allowed_url(url, EVERYTHING)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "engine:8000",
        "ftp://engine:8000",
        "http://",
        "http://:8000",
        "http://engine:0",
        "http://engine:99999",
        "http://engine:8000#x",
        "http://engine:8000?x=1",
        "http://engine:8000/v1",
        "http://engine :8000",
        "http://engine\n:8000",
        "\thttp://engine:8000",
        "http://[::1",
        "http://user:password@engine:8000",
        "http://user@engine:8000",
        "http://engine:8000@elsewhere:8000",
        "http://engine:8000\\@elsewhere",
        "http://@engine:8000",
    ],
)
def test_what_is_no_engines_url_is_an_invalid_field_and_credentials_are_not_repeated(url: str) -> None:
    with pytest.raises(InvalidField) as caught:
        allowed_url(url, EVERYTHING)
    assert "password" not in str(caught.value)
    assert "user" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://engine:+8000", "http://[127.0.0.1]:8000", "http://engine:8000\\elsewhere", "http://[v1.x]:8000"]
)
def test_what_python_versions_read_differently_is_kept_out_by_all(url: str) -> None:
    with pytest.raises((EngineNotAllowed, InvalidField)):
        allowed_url(url, EVERYTHING)


@pytest.mark.parametrize(
    ("pattern", "url"),
    [
        ("http://10.0.0.0/8:8000", "http://10.0.0.7:8001"),
        ("http://10.0.0.0/8:8000", "http://11.0.0.7:8000"),
        ("http://10.0.0.0/8:8000", "https://10.0.0.7:8000"),
        ("http://[::/0]:8000", "http://10.0.0.7:8000"),
        ("http://0.0.0.0/0:8000", "http://engine:8000"),
        ("http://*.svc:8000", "http://svc:8000"),
        ("http://*.svc:8000", "http://a.svc.evil:8000"),
        ("http://engine:8000", "http://engine.evil:8000"),
        ("http://engine:8000", "http://engine2:8000"),
        ("http://localhost:8000", "http://127.0.0.1:8000"),
    ],
)
def test_scheme_host_and_port_all_have_to_match(pattern: str, url: str) -> None:
    with pytest.raises(EngineNotAllowed):
        allowed_url(url, patterns(pattern))


def test_without_a_pattern_nothing_is_let_in_and_the_setting_is_named() -> None:
    with pytest.raises(EngineNotAllowed, match=r"registration\.allowed"):
        allowed_url("http://engine:8000", ())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "*",
        "http://*:8000",
        "engine:8000",
        "http://engine",
        "http://engine:",
        "http://engine:0",
        "http://engine:65536",
        "http://engine:80-90",
        "http://engine:8000/path",
        "http://a*.example:8000",
        "http://*.*.example:8000",
        "http://10.0.0.7/8:8000",
        "http://10.0.0.0/33:8000",
        "http://127.1:8000",
        "http://2130706433:8000",
        "http://fd00::/8:8000",
        "http://[10.0.0.0/8]:8000",
        "http://user@engine:8000",
        "ftp://engine:8000",
        "http://eng\N{LATIN SMALL LETTER DOTLESS I}ne:8000",
    ],
)
def test_a_pattern_that_says_nothing_plain_is_refused_with_the_configuration(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        RegistrationSettings(allowed=[text])


# -- adding


async def test_an_added_engine_gets_work_and_an_id_of_its_own() -> None:
    changes: list[int] = []
    async with (
        ScriptedEngine() as first,
        ScriptedEngine() as second,
        adding(first, max_inflight=1, on_change=lambda: changes.append(0)) as fleet,
    ):
        first.script, answer = hold()
        running = asyncio.ensure_future(generate(fleet))
        await first.wait_asked(1)
        waiting = asyncio.ensure_future(generate(fleet))
        changes.clear()
        description, new = await fleet.add_engine(second.url, 7)
        assert (description["id"], description["healthy"], description["max_inflight"], new) == (
            "e1",
            True,
            7,
            True,
        )
        assert changes
        assert fleet.healthy_capacity() == 8
        assert (await waiting).engine == second.url
        answer.set_result(Reply())
        await running


async def test_the_same_address_again_is_the_same_engine_and_may_get_another_size() -> None:
    async with ScriptedEngine() as engine, adding(engine) as fleet:
        for spelling, size, shown in (
            (engine.url, None, 64),
            (engine.url.upper().replace("HTTP", "http") + "/", 5, 5),
            (engine.url, None, 5),
        ):
            description, new = await fleet.add_engine(spelling, size)
            assert (description["id"], description["max_inflight"], new) == ("e0", shown, False)
        assert fleet.healthy_capacity() == 5


async def test_a_larger_size_serves_who_waits() -> None:
    async with ScriptedEngine() as engine, adding(engine, max_inflight=1) as fleet:
        engine.script, answer = hold()
        tasks = [asyncio.ensure_future(generate(fleet)) for _ in range(3)]
        await engine.wait_asked(1)
        await fleet.add_engine(engine.url, 3)
        await engine.wait_asked(3)
        answer.set_result(Reply())
        await asyncio.gather(*tasks)


async def test_two_calls_at_once_make_one_member() -> None:
    async with ScriptedEngine() as first, ScriptedEngine() as second, adding(first) as fleet:
        added = await asyncio.gather(*(fleet.add_engine(second.url) for _ in range(5)))
        assert [new for _, new in added] == [True, False, False, False, False]
        assert {description["id"] for description, _ in added} == {"e1"}
        assert {description["healthy"] for description, _ in added} == {True}
        assert fact(fleet, "id") == ["e0", "e1"]


async def test_an_engine_that_is_not_up_yet_is_added_and_used_when_it_is() -> None:
    async with ScriptedEngine() as first, ScriptedEngine() as late, adding(first) as fleet:
        await late.stop()
        description, new = await fleet.add_engine(late.url)
        assert (description["healthy"], new) == (False, True)
        assert description["error"]
        await late.start()
        await until(lambda: fact(fleet, "healthy") == [True, True])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda engine: setattr(engine, "models", {"data": [{"id": "big"}]}), "does not serve model 'tiny'"),
        (lambda engine: setattr(engine, "models", b"<html>"), "no OpenAI-compatible server"),
        (lambda engine: setattr(engine, "models_status", 401), "needs an API key"),
        (lambda engine: setattr(engine, "models_status", 307), "it answered 307"),
    ],
)
async def test_an_engine_that_is_wrong_for_the_run_is_refused_in_its_own_words_and_forgotten(
    change: Callable[[ScriptedEngine], None], words: str
) -> None:
    async with ScriptedEngine() as first, ScriptedEngine() as wrong, adding(first, model="tiny") as fleet:
        change(wrong)
        outcomes = await asyncio.gather(*(fleet.add_engine(wrong.url) for _ in range(3)), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {EngineRefused}
        assert words in str(outcomes[0])
        assert wrong.url in str(outcomes[0])
        assert fact(fleet, "id") == ["e0"]
        seen = wrong.paths.total()
        await until(lambda: first.paths["/health"] > 3)  # probes of the others: nobody asks this one again
        assert wrong.paths.total() == seen


async def test_raw_logprobs_are_refused_and_the_id_of_a_refused_engine_is_not_given_again() -> None:
    processed = {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}
    async with ScriptedEngine() as first, ScriptedEngine() as raw:
        first.server_info = processed
        async with adding(first, temperature=0.7) as fleet:
            with pytest.raises(EngineRefused, match="processed_logprobs"):
                await fleet.add_engine(raw.url)
            raw.server_info = processed
            description, _ = await fleet.add_engine(raw.url)
            assert description["id"] == "e2"


async def test_there_is_a_bound_on_engines() -> None:
    async with ScriptedEngine() as first, ScriptedEngine() as second, adding(first, max_engines=1) as fleet:
        with pytest.raises(Conflict, match="max_engines"):
            await fleet.add_engine(second.url)
        _, new = await fleet.add_engine(first.url, 3)
        assert not new
        assert second.paths.total() == 0


async def test_an_address_that_is_not_allowed_is_never_contacted() -> None:
    async with ScriptedEngine() as first, ScriptedEngine() as other, fleet_of(first) as fleet:
        with pytest.raises(EngineNotAllowed):
            await fleet.add_engine(other.url)
        assert other.paths.total() == 0


async def test_a_caller_that_hangs_up_leaves_no_half_member() -> None:
    async with ScriptedEngine() as first, ScriptedEngine() as good, ScriptedEngine() as wrong, adding(first) as fleet:
        wrong.models = {"data": []}
        for engine in (good, wrong):
            call = asyncio.ensure_future(fleet.add_engine(engine.url))
            await until(lambda engine=engine: engine.paths["/v1/models"])
            call.cancel()
            await asyncio.wait([call])
        await until(lambda: fact(fleet, "healthy") == [True, True])
        assert fact(fleet, "url") == [first.url, good.url]
        good.health = lambda: 503
        await until(lambda: fact(fleet, "healthy") == [True, False])  # it is watched


async def test_the_key_of_added_engines_goes_to_them_and_is_shown_nowhere() -> None:
    async with (
        ScriptedEngine() as first,
        ScriptedEngine() as second,
        adding(first, added_api_key="sk-added", max_inflight=1) as fleet,
    ):
        await fleet.add_engine(second.url)
        await asyncio.gather(*(generate(fleet) for _ in range(4)))
        await fleet.remove_engine("e0", drain_s=5)
        await generate(fleet)
        assert {asked.headers["authorization"] for asked in second.asked} == {"Bearer sk-added"}
        assert all("authorization" not in asked.headers for asked in first.asked)
        assert "sk-added" not in repr(fleet.describe()) + repr(fleet._settings)


async def test_a_fleet_may_begin_empty_and_its_first_engine_serves_who_waits() -> None:
    async with ScriptedEngine() as engine, adding() as fleet:
        assert fleet.healthy_capacity() == 0
        waiting = asyncio.ensure_future(generate(fleet))
        await fleet.add_engine(engine.url)
        assert (await waiting).attempts == 1


# -- removing


async def test_a_removed_engine_gets_no_new_work_and_what_runs_there_may_finish() -> None:
    events = Counted()
    async with (
        ScriptedEngine() as first,
        ScriptedEngine() as second,
        fleet_of(first, second, max_inflight=2, events=events) as fleet,
    ):
        first.script, answer = hold()
        second.script, other = hold()
        tasks = [asyncio.ensure_future(generate(fleet)) for _ in range(4)]
        await first.wait_asked(2)
        waiting = asyncio.ensure_future(generate(fleet))
        removal = asyncio.ensure_future(fleet.remove_engine("e0", drain_s=60))
        await until(lambda: fact(fleet, "leaving") == [True, False])
        assert fleet.healthy_capacity() == 2
        assert fleet.unhealthy() == {}
        other.set_result(Reply())
        assert (await waiting).engine == second.url
        assert not removal.done()
        answer.set_result(Reply())
        description = await removal
        assert (description["id"], description["in_flight"]) == ("e0", 0)
        assert fact(fleet, "id") == ["e1"]
        answers = await asyncio.gather(*tasks)
        assert {answer.attempts for answer in answers} == {1}
        assert len(first.asked) == 2
        assert events.aborts == 0
        with pytest.raises(NotFound):
            await fleet.remove_engine("e0", drain_s=0)


async def test_what_has_not_finished_in_time_is_aborted_there_and_goes_elsewhere_without_an_attempt() -> None:
    events = Counted()
    async with (
        ScriptedEngine() as first,
        ScriptedEngine() as second,
        fleet_of(first, second, max_inflight=8, max_attempts=1, events=events) as fleet,
    ):
        first.script, _ = hold()
        second.script, other = hold()
        tasks = [asyncio.ensure_future(generate(fleet)) for _ in range(8)]
        await first.wait_asked(4)
        await fleet.remove_engine("e0", drain_s=0)
        await second.wait_asked(8)
        other.set_result(Reply())
        answers = await asyncio.gather(*tasks)
        assert {(answer.engine, answer.attempts) for answer in answers} == {(second.url, 1)}
        assert sorted(first.aborted) == sorted(asked.abort_id for asked in first.asked)
        assert events.aborts == 4
        assert events.retries == {FailureReason.ENGINE_UNAVAILABLE: 4}
        await until(lambda: {asked.outcome for asked in first.asked} == {"disconnected"})
        seen = first.paths["/health"]
        probed = second.paths["/health"]
        await until(lambda: second.paths["/health"] > probed + 3)
        assert first.paths["/health"] == seen, "nobody watches an engine that is gone"


async def test_an_engine_that_dies_while_it_leaves_costs_no_attempt() -> None:
    async with (
        ScriptedEngine() as first,
        ScriptedEngine() as second,
        fleet_of(first, second, max_attempts=1) as fleet,
    ):
        first.script, answer = hold()
        task = asyncio.ensure_future(generate(fleet))
        await first.wait_asked(1)
        removal = asyncio.ensure_future(fleet.remove_engine("e0", drain_s=60))
        await until(lambda: fact(fleet, "leaving")[0])
        answer.set_result(Reply(finish_reason="abort"))  # what vLLM says of its requests when it ends
        assert (await task).engine == second.url
        await removal


async def test_with_no_other_engine_rollouts_wait_and_go_on_with_the_next_one() -> None:
    async with ScriptedEngine() as first, ScriptedEngine() as second, adding(first, max_attempts=1) as fleet:
        first.script, _ = hold()
        running = asyncio.ensure_future(generate(fleet))
        await first.wait_asked(1)
        await fleet.remove_engine("e0", drain_s=0)
        assert fleet.describe() == []
        assert fleet.healthy_capacity() == 0
        await fleet.add_engine(second.url)
        answer = await running
        assert (answer.engine, answer.attempts) == (second.url, 1)


async def test_with_no_engine_at_all_the_wait_ends_after_engine_wait() -> None:
    async with ScriptedEngine() as first, fleet_of(first, engine_wait_s=0.2) as fleet:
        await fleet.remove_engine("e0", drain_s=0)
        with pytest.raises(GenerationFailed, match="there is none") as caught:
            await generate(fleet)
        assert caught.value.reason == FailureReason.ENGINE_UNAVAILABLE


async def test_two_removals_at_once_share_one_and_the_shorter_drain_wins() -> None:
    async with ScriptedEngine() as first, ScriptedEngine() as second, fleet_of(first, second) as fleet:
        first.script, _ = hold()
        task = asyncio.ensure_future(generate(fleet))
        await first.wait_asked(1)
        slow = asyncio.ensure_future(fleet.remove_engine("e0", drain_s=3600))
        await until(lambda: fact(fleet, "leaving")[0])
        slower = asyncio.ensure_future(fleet.remove_engine("e0", drain_s=3600))
        fast = asyncio.ensure_future(fleet.remove_engine("e0", drain_s=0))
        gone = await asyncio.gather(slow, slower, fast)
        assert {description["id"] for description in gone} == {"e0"}
        assert (await task).engine == second.url


async def test_a_removal_goes_on_when_its_caller_hangs_up() -> None:
    async with ScriptedEngine() as first, ScriptedEngine() as second, fleet_of(first, second) as fleet:
        first.script, answer = hold()
        task = asyncio.ensure_future(generate(fleet))
        await first.wait_asked(1)
        removal = asyncio.ensure_future(fleet.remove_engine("e0", drain_s=60))
        await until(lambda: fact(fleet, "leaving")[0])
        removal.cancel()
        await asyncio.wait([removal])
        answer.set_result(Reply())
        await task
        await until(lambda: fact(fleet, "id") == ["e1"])


async def test_an_address_that_is_leaving_is_not_added_until_it_is_gone_and_then_has_another_id() -> None:
    async with ScriptedEngine() as engine, adding(engine) as fleet:
        engine.script, answer = hold()
        task = asyncio.ensure_future(generate(fleet))
        await engine.wait_asked(1)
        removal = asyncio.ensure_future(fleet.remove_engine("e0", drain_s=60))
        await until(lambda: fact(fleet, "leaving")[0])
        with pytest.raises(Conflict, match="being removed"):
            await fleet.add_engine(engine.url)
        answer.set_result(Reply())
        await asyncio.gather(task, removal)
        description, new = await fleet.add_engine(engine.url)
        assert (description["id"], new) == ("e1", True)


async def test_an_engine_can_be_removed_before_its_first_contact_has_ended() -> None:
    async with ScriptedEngine() as first, ScriptedEngine() as slow, adding(first) as fleet:
        asked = asyncio.Event()

        async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await reader.read()
            writer.close()

        await slow.stop()
        async with listening(never) as address:
            url = f"http://{address}"
            adds = [asyncio.ensure_future(fleet.add_engine(url)) for _ in range(2)]
            await asked.wait()
            assert (await fleet.remove_engine("e1", drain_s=60))["id"] == "e1"
            for add in adds:
                with pytest.raises(Conflict, match="was removed"):
                    await add
            assert fact(fleet, "id") == ["e0"]


async def test_a_pause_does_not_hold_up_a_removal() -> None:
    gate = ClosableGate()
    gate.open.set()
    async with ScriptedEngine() as first, ScriptedEngine() as second, fleet_of(first, second, max_inflight=1) as fleet:
        first.script, answer = hold()
        second.script, other = hold()
        tasks = [asyncio.ensure_future(generate(fleet, gate=gate)) for _ in range(3)]
        await first.wait_asked(1)
        await second.wait_asked(1)
        gate.open.clear()
        answer.set_result(Reply())  # its slot goes to the one that waits, which the gate then holds
        await until(lambda: gate.waiting)
        await fleet.remove_engine("e0", drain_s=0)
        other.set_result(Reply())
        gate.open.set()
        assert [answer.engine for answer in await asyncio.gather(*tasks)] == [first.url, second.url, second.url]


async def test_the_end_of_the_service_answers_who_waits_for_a_change() -> None:
    async with ScriptedEngine() as first, ScriptedEngine() as other, adding(first) as fleet:
        first.script, answer = hold()
        task = asyncio.ensure_future(generate(fleet))
        await first.wait_asked(1)
        removal = asyncio.ensure_future(fleet.remove_engine("e0", drain_s=3600))
        await until(lambda: fact(fleet, "leaving")[0])
        await fleet.end_changes()
        with pytest.raises(ShuttingDown):
            await removal
        with pytest.raises(ShuttingDown):
            await fleet.add_engine(other.url)
        answer.set_result(Reply())
        await task


async def test_nothing_is_lost_while_engines_come_and_go() -> None:
    async with (
        ScriptedEngine() as a,
        ScriptedEngine() as b,
        ScriptedEngine() as c,
        adding(a, max_inflight=4, max_attempts=1) as fleet,
    ):

        async def slow() -> Reply:
            await asyncio.sleep(0.01)  # how long the engine takes, so that some are caught in flight
            return Reply()

        for engine in (a, b, c):
            engine.script = lambda asked: slow()
        tasks = [asyncio.ensure_future(generate(fleet, ask(tag=f"g.1.{i}"))) for i in range(300)]
        await fleet.add_engine(b.url, 4)
        for round_ in range(12):
            comes, goes = ((c, b), (a, c), (b, a))[round_ % 3]
            await fleet.add_engine(comes.url, 4)
            (gone,) = [engine["id"] for engine in fleet.describe() if engine["url"] == goes.url] or [None]
            if gone is not None:
                await fleet.remove_engine(gone, drain_s=0)
            await asyncio.sleep(0)
        answers = await asyncio.gather(*tasks)
        assert len(answers) == 300
        assert {answer.attempts for answer in answers} == {1}


# -- weights


def update(version: int) -> WeightUpdate:
    return WeightUpdate(version=version, path=f"/ckpt/{version}")


def stuck(path: str) -> tuple[Callable[[str, Any], Any], asyncio.Event]:
    """A control script that hangs at `path`, and what is set when it does."""
    reached = asyncio.Event()

    async def hang() -> web.Response:
        reached.set()
        await asyncio.Event().wait()
        return web.Response()

    return lambda asked, body: hang() if asked == path else None, reached


async def test_an_update_does_not_wait_for_an_engine_that_is_removed_and_it_is_told_to_resume() -> None:
    async with ScriptedEngine() as first, ScriptedEngine() as second:
        first.weight_version = second.weight_version = "default"
        async with fleet_of(first, second) as fleet:
            first.on_control, reached = stuck("/collective_rpc")
            updating = asyncio.ensure_future(fleet.update_weights(update(1)))
            await reached.wait()
            await fleet.remove_engine("e0", drain_s=0)
            assert await updating == []
            assert fact(fleet, "weight_version") == ["1"]
            assert not first.paused


async def test_an_update_whose_last_engine_is_removed_fails_and_says_so() -> None:
    async with ScriptedEngine() as first:
        first.weight_version = "default"
        async with fleet_of(first) as fleet:
            first.on_control, reached = stuck("/collective_rpc")
            updating = asyncio.ensure_future(fleet.update_weights(update(1)))
            await reached.wait()
            await fleet.remove_engine("e0", drain_s=0)
            with pytest.raises(Unavailable, match="removed"):
                await updating


async def test_an_engine_added_during_an_update_gets_no_work_before_it_has_those_weights() -> None:
    version = 0
    async with ScriptedEngine() as first, ScriptedEngine() as late:
        first.weight_version = late.weight_version = "default"
        async with adding(first, probe_interval_s=0.2) as fleet:
            fleet._version = lambda: version  # the orchestrator's
            go_on = asyncio.Event()
            reached = asyncio.Event()

            async def load() -> web.Response:
                reached.set()
                await go_on.wait()
                return web.json_response({"results": [None]})

            first.on_control = lambda path, body: load() if path == "/collective_rpc" else None
            updating = asyncio.ensure_future(fleet.update_weights(update(1)))
            await reached.wait()
            await fleet.add_engine(late.url)
            go_on.set()
            assert await updating == ["e1"]
            version = 1
            assert fact(fleet, "healthy") == [True, False], "not for a moment with other weights"
            for member in fleet._members:
                member._version = lambda: version
            assert (await generate(fleet)).engine == first.url
            await until(lambda: fact(fleet, "healthy") == [True, True])
            assert fact(fleet, "weight_version") == ["1", "1"]


async def test_an_engine_added_after_an_update_is_given_the_weights_of_the_run() -> None:
    async with ScriptedEngine() as first, ScriptedEngine() as late:
        first.weight_version = late.weight_version = "default"
        version = 0
        async with adding(first) as fleet:
            fleet._version = lambda: version
            for member in fleet._members:
                member._version = lambda: version
            await fleet.update_weights(update(1))
            version = 1
            await until(lambda: fleet._reports.seen)
            description, _ = await fleet.add_engine(late.url)
            assert (description["healthy"], description["weight_version"]) == (True, "1")


async def test_a_failed_update_leaves_an_engine_added_meanwhile_as_it_was() -> None:
    async with ScriptedEngine() as first, ScriptedEngine() as late:
        first.weight_version = late.weight_version = "default"
        async with adding(first) as fleet:
            added = asyncio.Event()
            reached = asyncio.Event()

            async def refuse() -> web.Response:
                reached.set()
                await added.wait()
                return web.json_response({"error": "no such folder"}, status=400)

            first.on_control = lambda path, body: refuse() if path == "/collective_rpc" else None
            updating = asyncio.ensure_future(fleet.update_weights(update(1)))
            await reached.wait()
            await fleet.add_engine(late.url)
            added.set()
            with pytest.raises(EnginesBehind):
                await updating
            assert fact(fleet, "healthy") == [True, True]


async def test_texts_of_ids_come_from_an_engine_that_stays() -> None:
    async with ScriptedEngine() as first, ScriptedEngine() as second, fleet_of(first, second) as fleet:
        await fleet.remove_engine("e0", drain_s=0)
        assert await fleet.prompt_text(array("i", [104])) == "h"
        assert first.paths["/detokenize"] == 0


async def test_coming_and_going_is_logged_with_the_id() -> None:
    with capture_logs() as logs:
        async with ScriptedEngine() as first, ScriptedEngine() as second, adding(first) as fleet:
            await fleet.add_engine(second.url)
            await fleet.remove_engine("e1", drain_s=0)
    said = [(entry["event"], entry["id"]) for entry in logs if entry.get("id") == "e1"]
    assert said == [("engine_added", "e1"), ("engine_leaves", "e1"), ("engine_removed", "e1")]
