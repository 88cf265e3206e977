"""One rollout of one turn, over a real socket."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from rollout_service.core.model import FailedRollout, FailureReason, FinishedRollout, FinishReason, Prompt, RolloutJob
from rollout_service.engines import Answer, GenerationFailed
from rollout_service.rollouts import SamplingDefaults, SingleTurn, SingleTurnSettings
from tests.engine_fleets import ClosableGate, OpenGate, fleet_of, until
from tests.engine_script import Reply, ScriptedEngine, hold


def job(index: int = 0, sampling: dict[str, Any] | None = None, **prompt: Any) -> RolloutJob:
    return RolloutJob(
        group_id="g-7",
        attempt=2,
        index=index,
        policy_version=3,
        prompt=Prompt(prompt_id="p", num_generations=4, sampling=sampling or {}, **(prompt or {"text": "abc"})),
    )


def settings(rollout_timeout_s: float = 30.0, **sampling: Any) -> SingleTurnSettings:
    return SingleTurnSettings(rollout_timeout_s=rollout_timeout_s, sampling=SamplingDefaults(**sampling))


async def test_a_text_prompt_gives_text() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        rollout = await SingleTurn(fleet, settings()).run(job(text="abc", index=1), OpenGate())
    assert isinstance(rollout, FinishedRollout)
    assert (rollout.index, rollout.prompt, rollout.completion) == (1, "abc", "hi")
    assert rollout.turns[0].prompt_ids == array("i", list(b"abc"))
    assert rollout.logprobs_mode == "raw_logprobs"
    assert engine.asked[0].request_id.startswith("g-7.2.1-")
    assert rollout.metrics.keys() == {"completion_tokens", "prompt_tokens", "duration_s", "attempts", "wasted_tokens"}
    assert all(isinstance(value, float) for value in rollout.metrics.values())
    assert (rollout.metrics["completion_tokens"], rollout.metrics["prompt_tokens"]) == (2.0, 3.0)


async def test_messages_give_the_assistants_message() -> None:
    messages = [{"role": "user", "content": "abc"}]
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        rollout = await SingleTurn(fleet, settings()).run(job(messages=messages), OpenGate())
    assert isinstance(rollout, FinishedRollout)
    assert rollout.prompt == messages
    assert list(rollout.completion) == [{"role": "assistant", "content": "hi"}]


async def test_ids_give_the_engines_own_text_of_prompt_and_completion_asked_for_once_a_prompt() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        runner = SingleTurn(fleet, settings())
        ids = array("i", [97, 98])
        rollouts = await asyncio.gather(*(runner.run(job(index, token_ids=ids), OpenGate()) for index in range(4)))
    assert [rollout.prompt for rollout in rollouts if isinstance(rollout, FinishedRollout)] == ["ab"] * 4
    assert engine.paths["/detokenize"] == 1
    assert {tuple(asked.body["prompt"]) for asked in engine.asked} == {(97, 98)}


async def test_an_engine_that_cannot_tell_the_text_of_ids_leaves_it_unknown() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.detokenize = lambda ids: web.Response(status=404)
        rollout = await SingleTurn(fleet, settings()).run(job(token_ids=array("i", [97])), OpenGate())
    assert isinstance(rollout, FinishedRollout)
    assert rollout.prompt is None


async def test_a_completion_cut_by_max_tokens_is_finished_with_its_reason() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.script = lambda asked: Reply(finish_reason="length")
        rollout = await SingleTurn(fleet, settings()).run(job(), OpenGate())
    assert isinstance(rollout, FinishedRollout)
    assert rollout.finish_reason == FinishReason.LENGTH


async def test_tokens_of_attempts_that_failed_are_counted_as_wasted() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.script = lambda asked: Reply(ids=[1] * 5, finish_reason="abort" if len(engine.asked) < 3 else "stop")
        rollout = await SingleTurn(fleet, settings()).run(job(), OpenGate())
    assert isinstance(rollout, FinishedRollout)
    assert (rollout.metrics["attempts"], rollout.metrics["wasted_tokens"]) == (3.0, 10.0)


async def test_defaults_and_the_prompts_own_sampling_are_sent() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        runner = SingleTurn(fleet, settings(max_tokens=7, top_p=0.5))
        await runner.run(job(sampling={"max_tokens": 3, "stop": ["x"]}), OpenGate())
    body = engine.asked[0].body
    assert (body["max_tokens"], body["top_p"], body["stop"], body["top_k"]) == (3, 0.5, ["x"], 0)
    assert not body.keys() & {"n", "stream"}


@pytest.mark.parametrize(
    ("reply", "reason", "words"),
    [
        (Reply(status=400), FailureReason.REJECTED, "scripted"),
        (Reply(status=500), FailureReason.SERVER_ERROR, "scripted"),
        (Reply(ids=[]), FailureReason.BAD_ANSWER, "token_ids"),
        (Reply(finish_reason="abort"), FailureReason.ABORTED, "abort"),
        (Reply(cut=True), FailureReason.CONNECTION, ""),
    ],
)
async def test_a_failed_generation_is_a_failed_rollout_with_its_reason(
    reply: Reply, reason: FailureReason, words: str
) -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, max_attempts=1) as fleet:
        engine.script = lambda asked: reply
        rollout = await SingleTurn(fleet, settings()).run(job(index=3), OpenGate())
    assert isinstance(rollout, FailedRollout)
    assert (rollout.index, rollout.reason, rollout.engine, rollout.attempts) == (3, reason, engine.url, 1)
    assert words in rollout.error


async def test_a_prompt_that_does_not_fit_is_told_apart() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        rollout = await SingleTurn(fleet, settings()).run(job(token_ids=array("i", [1] * 64)), OpenGate())
    assert isinstance(rollout, FailedRollout)
    assert (rollout.reason, rollout.attempts) == (FailureReason.PROMPT_TOO_LONG, 0)


async def test_the_deadline_of_a_rollout_runs_over_all_its_attempts() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, request_timeout_s=0.1, max_attempts=100) as fleet:
        engine.script, _ = hold()
        rollout = await SingleTurn(fleet, settings(rollout_timeout_s=0.5)).run(job(), OpenGate())
    assert isinstance(rollout, FailedRollout)
    assert rollout.reason == FailureReason.DEADLINE
    assert 1 <= rollout.attempts < 6


async def test_time_at_a_closed_gate_is_not_time_of_the_rollout() -> None:
    gate = ClosableGate(says=60.0)
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        runner = SingleTurn(fleet, settings(rollout_timeout_s=0.1))
        task = asyncio.ensure_future(runner.run(job(), gate))
        await until(lambda: gate.waiting)
        await asyncio.sleep(0.15)  # longer than the deadline: the very thing tested
        gate.open.set()
        assert isinstance(await task, FinishedRollout)


async def test_cancelling_a_rollout_aborts_it_at_the_engine_and_raises_nothing_else() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.script, _ = hold()
        task = asyncio.ensure_future(SingleTurn(fleet, settings()).run(job(), OpenGate()))
        await engine.wait_asked(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.wait_for(lambda: engine.aborts and engine.asked[0].outcome == "disconnected")


class Broken:
    """Engines with a fault of ours in them."""

    async def generate(self, *_: object, **__: object) -> Answer:
        raise ZeroDivisionError("our own fault")

    async def prompt_text(self, ids: array[int]) -> str | None:
        raise GenerationFailed(FailureReason.INTERNAL, "never asked")


async def test_a_fault_of_ours_fails_that_rollout_only_and_is_logged_with_its_traceback() -> None:
    with capture_logs() as logs:
        rollout = await SingleTurn(Broken(), settings()).run(job(index=2), OpenGate())
    assert isinstance(rollout, FailedRollout)
    assert (rollout.index, rollout.reason) == (2, FailureReason.INTERNAL)
    assert "our own fault" in rollout.error
    assert logs[0]["event"] == "rollout_internal_error"
    assert logs[0]["exc_info"]
