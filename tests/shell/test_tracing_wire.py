"""The traces of a whole service: what reaches engines and the collector over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout_service.core.model import RolloutJob
from rollout_service.rollouts import Program, ProgramRunner, ProgramSettings, SingleTurn, SingleTurnSettings, Threads
from rollout_service.settings import Settings
from tests.engine_fleets import OpenGate, fleet_of
from tests.engine_script import Asked, Reply, ScriptedEngine, hold
from tests.fakes import submission
from tests.service import LiveService, prompt
from tests.shell.test_tracing import Traced, told, within
from tests.shell.tracing_collector import Collector, facts


def parent_of(asked: Asked) -> tuple[str, str]:
    """(trace id, span id) that an engine was told."""
    version, trace, span, _ = asked.headers["traceparent"].split("-")
    assert version == "00"
    return trace, span


def job(index: int = 0) -> Any:
    row = submission("a", 1).prompt
    return RolloutJob(group_id="g-1", attempt=1, index=index, policy_version=0, prompt=row)


async def test_every_attempt_of_a_request_is_a_span_under_its_rollout_and_its_engine_is_told_which():
    traced = Traced()
    replies = iter([Reply(status=500), Reply()])
    async with ScriptedEngine() as engine, fleet_of(engine, tracer=traced.tracing.calls) as fleet:
        engine.script = lambda asked: next(replies)
        runner = traced.tracing.runner(make_single_turn(fleet))
        await runner.run(job(), OpenGate())
        (rollout,) = traced.spans("rollout")
        first, second = traced.spans("POST /v1/completions")
        assert (told(first)["outcome"], told(first)["reason"]) == ("failed", "server_error")
        assert told(second)["outcome"] == "answered"
        assert told(second)["completion_tokens"] == 2
        for span, asked in zip((first, second), engine.asked, strict=True):
            assert within(span, rollout)
            assert span.context is not None
            assert parent_of(asked) == (f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}")
            assert told(span)["request_id"] == asked.request_id


async def test_an_aborted_request_and_one_that_ran_out_of_time_are_told_apart():
    traced = Traced()
    async with ScriptedEngine() as engine, fleet_of(engine, max_attempts=1, tracer=traced.tracing.calls) as fleet:
        engine.script, _ = hold()
        task = asyncio.create_task(traced.tracing.runner(make_single_turn(fleet)).run(job(), OpenGate()))
        await engine.wait_asked(1)
        task.cancel()
        await asyncio.wait({task})
        (span,) = traced.spans("POST /v1/completions")
        assert told(span)["outcome"] == "aborted"
    async with (
        ScriptedEngine() as engine,
        fleet_of(engine, max_attempts=1, request_timeout_s=0.1, tracer=traced.tracing.calls) as fleet,
    ):
        engine.script, _ = hold()
        await traced.tracing.runner(make_single_turn(fleet)).run(job(), OpenGate())
        span = traced.spans("POST /v1/completions")[-1]
        assert (told(span)["outcome"], told(span)["reason"]) == ("failed", "timeout")


def make_single_turn(fleet: Any) -> Any:
    return SingleTurn(fleet, SingleTurnSettings())


@pytest.mark.parametrize("in_thread", [False, True])
async def test_every_turn_of_a_program_comes_under_its_rollout(in_thread: bool):
    traced = Traced()

    async def two_turns(ctx: Any, row: Any) -> None:
        await asyncio.gather(ctx.generate("a"), ctx.generate("b"))

    def two_turns_blocking(ctx: Any, row: Any) -> None:
        ctx.generate("a")
        ctx.generate("b")

    program = Program(call=two_turns_blocking if in_thread else two_turns, in_thread=in_thread)
    async with ScriptedEngine() as engine, fleet_of(engine, tracer=traced.tracing.calls) as fleet:
        runner = ProgramRunner(program, engines=fleet, threads=Threads(2, grace_s=1.0), settings=ProgramSettings())
        await traced.tracing.runner(runner).run(job(), OpenGate())
        (rollout,) = traced.spans("rollout")
        calls = traced.spans("POST /v1/completions")
        assert len(calls) == 2
        assert all(within(call, rollout) for call in calls)


async def test_a_fleet_that_is_not_traced_sends_no_trace():
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        await make_single_turn(fleet).run(job(), OpenGate())
        assert "traceparent" not in engine.asked[0].headers


async def test_a_run_is_seen_at_the_collector_as_groups_rollouts_and_requests_and_without_its_texts(tmp_path: Path):
    def script(asked: Asked) -> Reply:
        if "p:bad;" in bytes(asked.body["prompt"]).decode():
            return Reply(status=400, body=b'{"error": {"message": "no: p:bad; is a secret", "param": null}}')
        return Reply(ids=list(b"hello"))

    (tmp_path / "fault_rewards.py").write_text(
        "def accuracy(prompts, completions, completion_ids, **columns):\n    return [1.0] * len(completions)\n"
    )
    async with Collector() as collector, ScriptedEngine() as engine:
        engine.script = script
        service = LiveService(
            tmp_path, [engine.url], tracing={"endpoint": collector.endpoint}, groups={"num_generations": 2}
        )
        await service.start()
        try:
            await service.submit(prompt("good"))
            await service.collect(1)
            await service.submit(prompt("bad"))
            await service.wait_state("g-2", "failed")
        finally:
            await service.checked_stop()
        assert not service.logged("stop_timed_out")
        assert not service.logged("traces_trouble")
    groups = {facts(span)["rollout.group_id"]: span for span in collector.named("group")}
    assert {name: facts(span)["rollout.outcome"] for name, span in groups.items()} == {"g-1": "acked", "g-2": "failed"}
    rollouts, calls = collector.named("rollout"), collector.named("POST /v1/completions")
    assert (len(rollouts), len(calls)) == (4, 4)
    for rollout in rollouts:
        group = groups[facts(rollout)["rollout.group_id"]]
        assert (rollout.parent_span_id, rollout.trace_id) == (group.span_id, group.trace_id)
    by_id = {rollout.span_id: rollout for rollout in rollouts}
    told_engines = {parent_of(asked) for asked in engine.asked}
    for call in calls:
        assert call.trace_id == by_id[call.parent_span_id].trace_id
        assert (call.trace_id.hex(), call.span_id.hex()) in told_engines
    everything = " ".join(map(str, collector.spans))
    for text in ("p:good;", "p:bad;", "hello", "secret"):
        assert text not in everything


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"endpoint": "collector:4318"}, "http"),
        ({"endpoint": "http://collector:4318"}, "/v1/traces"),
        ({"endpoint": "http://user:pass@collector:4318/v1/traces"}, "OTEL_EXPORTER_OTLP_HEADERS"),
        ({"sample_ratio": 1.5}, "sample_ratio"),
    ],
)
def test_what_is_wrong_with_the_table_is_said(table: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        Settings(tracing=table, engines=[{"url": "http://127.0.0.1:8000"}])
