"""Rollouts that programs make: turns, rewards, failures, and cancellation that reaches threads."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from rollout_service.core.model import (
    FailedRollout,
    FailureReason,
    FinishedRollout,
    FinishReason,
    Prompt,
    RolloutJob,
    Turn,
)
from rollout_service.core.sequences import token_sequences
from rollout_service.engines import Answer, GenerateRequest, GenerationFailed
from rollout_service.rollouts import (
    Context,
    NoThreads,
    Program,
    ProgramRunner,
    ProgramSettings,
    RolloutCancelled,
    SamplingDefaults,
    ThreadContext,
    Threads,
)
from tests.engine_fleets import ClosableGate, OpenGate, until

MESSAGES = [{"role": "user", "content": "two plus two?"}]


@dataclass
class Engines:
    """Answers every request at once, or holds it while `held`; renders a history as one id a character."""

    held: bool = False
    asked: list[GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    version: int = 3
    fails: Callable[[int], GenerationFailed | None] = lambda number: None

    async def generate(self, request: GenerateRequest, *, gate: Any, deadline: Any) -> Answer:
        await gate.passed()
        self.asked.append(request)
        number = len(self.asked)
        version = self.version
        if self.held:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiting.append(future)
            try:
                await future
            except asyncio.CancelledError:
                self.aborted.append(request.tag)
                raise
        if (failed := self.fails(number)) is not None:
            raise failed
        if request.token_ids is not None:
            prompt = request.token_ids
        else:
            text = request.text or "".join(f"<{m['role']}>{m.get('content')}" for m in request.messages or ())
            prompt = array("i", list(text.encode()))
        text = f"answer {number}"
        turn = Turn(
            prompt_ids=prompt,
            output_ids=array("i", list(text.encode())),
            logprobs=array("f", [-0.5] * len(text)),
            finish_reason=FinishReason.STOP,
            text=text,
            message={"role": "assistant", "content": text} if request.messages is not None else None,
            engine="http://engine",
        )
        return Answer(
            turn=turn,
            engine="http://engine",
            attempts=2,
            wasted_tokens=5,
            logprobs_mode="processed_logprobs",
            policy_version=version,
        )

    async def prompt_text(self, ids: array[int]) -> str | None:
        return bytes(ids.tolist()).decode()


def job(prompt: Prompt | None = None, index: int = 1) -> RolloutJob:
    prompt = prompt or Prompt(prompt_id="p", messages=MESSAGES, columns={"answer": 4}, num_generations=4)
    return RolloutJob(group_id="g-7", attempt=2, index=index, policy_version=3, prompt=prompt)


def runner(program: Any, engines: Engines, *, threads: Threads | None = None, **settings: Any) -> ProgramRunner:
    return ProgramRunner(
        Program(call=program, in_thread=not inspect.iscoroutinefunction(program)),
        engines=engines,
        threads=threads or Threads(4, grace_s=0.05),
        settings=ProgramSettings(**settings),
    )


async def made(program: Any, engines: Engines | None = None, prompt: Prompt | None = None, **more: Any) -> Any:
    return await runner(program, engines or Engines(), **more).run(job(prompt), OpenGate())


# -- what a program makes


async def test_turns_rewards_and_metrics_are_recorded_and_the_history_between_is_the_completion() -> None:
    engines = Engines()

    async def program(ctx: Context, row: dict[str, Any]) -> None:
        assert (row["prompt_id"], row["answer"], row["messages"]) == ("p", 4, MESSAGES)
        assert (ctx.group_id, ctx.attempt, ctx.index, ctx.policy_version) == ("g-7", 2, 1, 3)
        history = list(row["messages"])
        first = await ctx.chat(history, tools=[{"type": "function"}], temperature=0.5)
        engines.version = 4
        history += [first.message, {"role": "tool", "content": "4"}]
        second = await ctx.chat(history)
        assert bytes(second.ids).decode() == second.text == "answer 2"
        ctx.reward(0.25)
        ctx.metric("looked_up", 1)

    rollout = await made(program, engines)
    assert isinstance(rollout, FinishedRollout)
    assert [turn.version for turn in rollout.turns] == [3, 4]
    assert rollout.completion == [
        {"role": "assistant", "content": "answer 1"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "answer 2"},
    ]
    assert rollout.reward == 0.25
    assert rollout.metrics["looked_up"] == 1.0
    assert (rollout.metrics["turns"], rollout.metrics["attempts"], rollout.metrics["wasted_tokens"]) == (2, 4, 10)
    assert rollout.prompt == MESSAGES
    assert engines.asked[0].extra == {"tools": [{"type": "function"}]}
    assert [request.sampling["temperature"] for request in engines.asked] == [0.5, 1.0]
    assert [request.tag for request in engines.asked] == ["g-7.2.1.0", "g-7.2.1.1"]


async def test_a_plain_function_runs_in_a_thread_with_the_same_calls_blocking() -> None:
    where: list[str] = []

    def program(ctx: ThreadContext, row: dict[str, Any]) -> str:
        where.append(threading.current_thread().name)
        reply = ctx.chat(row["messages"])
        ctx.reward(1)
        ctx.metric("m", 2)
        ctx.sleep(0)
        return reply.text.upper()

    rollout = await made(program)
    assert where == ["rollout-g-7.2.1"]
    assert rollout.completion == [{"role": "assistant", "content": "ANSWER 1"}]
    assert (rollout.reward, rollout.metrics["m"]) == (1.0, 2.0)


async def test_ids_go_in_and_out_and_make_one_row_where_history_is_kept() -> None:
    async def program(ctx: Context, row: dict[str, Any]) -> None:
        first = await ctx.generate(row["prompt_token_ids"])
        await ctx.generate([*first.prompt_ids, *first.ids, 33])

    rollout = await made(program, prompt=Prompt(prompt_id="p", token_ids=array("i", list(b"hi")), num_generations=4))
    (row,) = token_sequences(rollout.turns)
    assert bytes(row.input_ids.tolist()) == b"hianswer 1!answer 2"
    assert (rollout.prompt, rollout.completion) == ("hi", "answer 1answer 2")


async def test_generations_side_by_side_are_recorded_in_the_order_they_began() -> None:
    engines = Engines(held=True)

    async def program(ctx: Context, row: dict[str, Any]) -> None:
        await asyncio.gather(ctx.generate("a"), ctx.generate("b"))

    running = asyncio.create_task(made(program, engines))
    await until(lambda: len(engines.waiting) == 2)
    engines.waiting[1].set_result(None)
    await until(lambda: engines.waiting[1].done())
    engines.waiting[0].set_result(None)
    rollout = await running
    assert [bytes(turn.prompt_ids.tolist()) for turn in rollout.turns] == [b"a", b"b"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
async def test_a_reward_that_is_no_number_scores_nobody(value: float | None) -> None:
    async def program(ctx: Context, row: dict[str, Any]) -> None:
        await ctx.chat(row["messages"])
        ctx.reward(1.0)
        ctx.reward(value)

    assert (await made(program)).reward is None


# -- what goes wrong


async def explodes(ctx: Context, row: dict[str, Any]) -> None:
    await ctx.chat(row["messages"])
    raise ValueError("no such tool")


def explodes_in_a_thread(ctx: ThreadContext, row: dict[str, Any]) -> None:
    ctx.chat(row["messages"])
    raise ValueError("no such tool")


async def exits(ctx: Context, row: dict[str, Any]) -> None:
    raise SystemExit(3)


def exits_in_a_thread(ctx: ThreadContext, row: dict[str, Any]) -> None:
    raise SystemExit(3)


async def cancels_itself(ctx: Context, row: dict[str, Any]) -> None:
    raise asyncio.CancelledError("me")


def cancels_itself_in_a_thread(ctx: ThreadContext, row: dict[str, Any]) -> None:
    raise asyncio.CancelledError("me")


def stops_iterating(ctx: ThreadContext, row: dict[str, Any]) -> None:
    raise StopIteration


async def does_nothing(ctx: Context, row: dict[str, Any]) -> None:
    pass


async def returns_a_number(ctx: Context, row: dict[str, Any]) -> int:
    await ctx.chat(row["messages"])
    return 4


async def asks_for_two(ctx: Context, row: dict[str, Any]) -> None:
    await ctx.chat(row["messages"], n=2)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (explodes, "ValueError: no such tool"),
        (explodes_in_a_thread, "ValueError: no such tool"),
        (exits, "SystemExit: 3"),
        (exits_in_a_thread, "SystemExit: 3"),
        (cancels_itself, "cancelled itself"),
        (cancels_itself_in_a_thread, "CancelledError"),
        (stops_iterating, "StopIteration"),
        (does_nothing, "without a generation"),
        (returns_a_number, "returned int"),
        (asks_for_two, "sampling.n cannot be set"),
    ],
)
async def test_a_program_that_goes_wrong_costs_its_rollout_and_says_why(program: Any, words: str) -> None:
    with capture_logs() as logs:
        rollout = await made(program)
    assert isinstance(rollout, FailedRollout)
    assert rollout.reason is FailureReason.PROGRAM
    assert words in rollout.error
    assert not [entry for entry in logs if entry["event"] == "rollout_internal_error"]


async def test_tokens_of_a_failed_rollout_count_as_wasted() -> None:
    rollout = await made(explodes)
    assert rollout.wasted_tokens == 5 + len("answer 1")


async def test_a_generation_that_failed_fails_the_rollout_with_the_engines_own_words() -> None:
    def fails(number: int) -> GenerationFailed:
        return GenerationFailed(FailureReason.REJECTED, "unlucky", engine="http://e", attempts=1)

    async def program(ctx: Context, row: dict[str, Any]) -> None:
        await ctx.chat(row["messages"])

    rollout = await made(program, Engines(fails=fails))
    assert (rollout.reason, rollout.error, rollout.engine) == (FailureReason.REJECTED, "unlucky", "http://e")


async def test_a_program_may_go_on_after_a_generation_that_failed() -> None:
    def fails(number: int) -> GenerationFailed | None:
        return GenerationFailed(FailureReason.TIMEOUT, "slow") if number == 1 else None

    async def program(ctx: Context, row: dict[str, Any]) -> None:
        try:
            await ctx.chat(row["messages"])
        except GenerationFailed:
            await ctx.chat([{"role": "user", "content": "shorter"}])

    rollout = await made(program, Engines(fails=fails))
    assert isinstance(rollout, FinishedRollout)
    assert len(rollout.turns) == 1


async def test_a_history_that_outgrew_the_context_does_not_drop_the_group_and_a_prompt_that_does_so_does() -> None:
    def too_long_at(number: int) -> Callable[[int], GenerationFailed | None]:
        too_long = GenerationFailed(FailureReason.PROMPT_TOO_LONG, "too long")
        return lambda asked: too_long if asked == number else None

    async def program(ctx: Context, row: dict[str, Any]) -> None:
        await ctx.chat(row["messages"])
        await ctx.chat(row["messages"])

    assert (await made(program, Engines(fails=too_long_at(2)))).reason is FailureReason.REJECTED
    assert (await made(program, Engines(fails=too_long_at(1)))).reason is FailureReason.PROMPT_TOO_LONG


# -- time


async def test_the_deadline_ends_a_program_and_aborts_at_the_engine() -> None:
    engines = Engines(held=True)

    async def program(ctx: Context, row: dict[str, Any]) -> None:
        await ctx.chat(row["messages"])

    rollout = await made(program, engines, rollout_timeout_s=0.05)
    assert (rollout.reason, "deadline" in rollout.error) == (FailureReason.DEADLINE, True)
    await until(lambda: engines.aborted == ["g-7.2.1.0"])


async def test_a_thread_that_waits_in_a_call_wakes_at_the_deadline() -> None:
    ended = threading.Event()

    def program(ctx: ThreadContext, row: dict[str, Any]) -> None:
        try:
            ctx.chat(row["messages"])
        except RolloutCancelled:
            ended.set()
            raise

    rollout = await made(program, Engines(held=True), rollout_timeout_s=0.05)
    assert rollout.reason is FailureReason.DEADLINE
    await until(ended.is_set)


async def test_time_at_a_closed_gate_is_not_the_rollouts() -> None:
    gate = ClosableGate()

    async def program(ctx: Context, row: dict[str, Any]) -> None:
        await asyncio.gather(ctx.chat(row["messages"]), ctx.chat(row["messages"]))

    running = asyncio.create_task(runner(program, Engines(), rollout_timeout_s=0.1).run(job(), gate))
    await until(lambda: gate.waiting == 2)
    began = time.monotonic()
    await until(lambda: time.monotonic() - began > 0.2)  # longer than the rollout may take
    gate.open.set()
    assert isinstance(await running, FinishedRollout)


# -- cancellation


async def test_a_cancelled_program_is_aborted_at_the_engine_and_its_next_call_raises() -> None:
    engines = Engines(held=True)
    seen: list[str] = []

    async def stubborn(ctx: Context, row: dict[str, Any]) -> None:
        try:
            await ctx.chat(row["messages"])
        except RolloutCancelled:
            seen.append(f"cancelled {ctx.cancelled}")
        try:
            await ctx.chat(row["messages"])
        except Exception:
            seen.append("swallowed")
        except RolloutCancelled:
            seen.append("over")
            raise

    running = asyncio.create_task(made(stubborn, engines))
    await until(lambda: len(engines.waiting) == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: seen == ["cancelled True", "over"])
    assert engines.aborted == ["g-7.2.1.0"]
    assert len(engines.asked) == 1


async def test_after_a_bump_the_next_rollouts_have_the_threads_at_once() -> None:
    """A pool of 4, and programs that wait in a call."""
    engines, threads = Engines(held=True), Threads(4, grace_s=30)

    def program(ctx: ThreadContext, row: dict[str, Any]) -> None:
        with contextlib.suppress(Exception):  # the kind of code that must not swallow its end
            ctx.chat(row["messages"])

    make = runner(program, engines, threads=threads)
    old = [asyncio.create_task(make.run(job(index=i), OpenGate())) for i in range(4)]
    await until(lambda: len(engines.waiting) == 4)
    fresh = [asyncio.create_task(make.run(job(index=i), OpenGate())) for i in range(4, 8)]
    await until(lambda: threads.counts().waiting == 4)
    for task in old:
        task.cancel()
    await until(lambda: len(engines.waiting) == 8, within_s=15)  # half of what a stuck thread is given
    assert threads.counts().busy == 4
    assert threads.counts().stuck == 0
    assert sorted(engines.aborted) == [f"g-7.2.{i}.0" for i in range(4)]
    for future in engines.waiting[4:]:
        future.set_result(None)
    assert all(isinstance(outcome, FinishedRollout) for outcome in await asyncio.gather(*fresh))


async def test_a_place_is_free_only_when_its_thread_has_ended_and_a_stuck_one_is_made_good_once() -> None:
    threads = Threads(1, grace_s=0.05)
    release, began = threading.Event(), []

    def ignores(number: int) -> Callable[[], None]:
        def call() -> None:
            began.append(number)
            release.wait(20)

        return call

    first = asyncio.create_task(threads.run(ignores(1), name="one"))
    await until(lambda: began == [1])
    second = asyncio.create_task(threads.run(ignores(2), name="two"))
    first.cancel()
    await asyncio.wait({first})
    assert threads.counts().busy == 1
    assert began == [1], "the thread still runs: its place is not free"
    await until(lambda: began == [1, 2])
    assert (threads.counts().stuck, threads.counts().busy, threads.counts().total) == (1, 1, 1)

    third = asyncio.create_task(threads.run(ignores(3), name="three"))
    second.cancel()
    with pytest.raises(NoThreads, match="2 threads ignore their end"):
        await asyncio.wait_for(third, 5)
    with pytest.raises(NoThreads):
        await threads.run(ignores(4), name="four")
    assert began == [1, 2], "made good as often as there were places, and no more"
    assert (threads.counts().stuck, threads.counts().total, threads.counts().waiting) == (2, 0, 0)

    release.set()
    await until(lambda: (threads.counts().stuck, threads.counts().busy, threads.counts().total) == (0, 0, 1))


async def test_a_call_that_stops_waiting_for_a_place_leaves_it_to_others() -> None:
    threads = Threads(1, grace_s=1)
    release = threading.Event()
    busy = asyncio.create_task(threads.run(lambda: release.wait(20), name="busy"))
    await until(lambda: threads.counts().busy == 1)
    gone = asyncio.create_task(threads.run(lambda: None, name="gone"))
    last = asyncio.create_task(threads.run(lambda: "mine", name="last"))
    await until(lambda: threads.counts().waiting == 2)
    gone.cancel()
    release.set()
    assert await asyncio.wait_for(last, 5) == "mine"
    await busy
    assert threads.counts().busy == 0


async def test_waiting_for_a_thread_is_not_the_rollouts_time() -> None:
    threads = Threads(1, grace_s=1)
    release = threading.Event()
    busy = asyncio.create_task(threads.run(lambda: release.wait(20), name="busy"))
    await until(lambda: threads.counts().busy == 1)

    def program(ctx: ThreadContext, row: dict[str, Any]) -> None:
        ctx.chat(row["messages"])

    running = asyncio.create_task(made(program, threads=threads, rollout_timeout_s=0.1))
    began = time.monotonic()
    await until(lambda: time.monotonic() - began > 0.2)
    release.set()
    assert isinstance(await running, FinishedRollout)
    await busy


async def test_configured_sampling_is_under_the_prompts_own_and_the_calls() -> None:
    engines = Engines()

    async def program(ctx: Context, row: dict[str, Any]) -> None:
        await ctx.chat(row["messages"], max_tokens=3)

    prompt = Prompt(prompt_id="p", messages=MESSAGES, num_generations=4, sampling={"temperature": 0.7, "max_tokens": 9})
    await made(program, engines, prompt, sampling=SamplingDefaults(top_p=0.5))
    sampling = engines.asked[0].sampling
    assert (sampling["temperature"], sampling["max_tokens"], sampling["top_p"]) == (0.7, 3, 0.5)


# -- what a program may leave behind


def returning(value: Any) -> Any:
    async def program(ctx: Context, row: dict[str, Any]) -> Any:
        await ctx.chat(row["messages"])
        return value

    return program


@pytest.mark.parametrize(
    "value",
    [
        [{"role": "assistant", "content": "x", "score": np.float32(1)}],
        [{"role": "assistant", "content": object()}],
        [{"role": "assistant", "content": float("nan")}],
        [{("role",): "assistant"}],
        "x" * 4_000_001,
    ],
    ids=["numpy", "object", "nan", "key", "long"],
)
async def test_a_completion_no_store_could_hold_costs_its_rollout(value: Any) -> None:
    rollout = await made(returning(value))
    assert (rollout.reason, "the completion" in rollout.error) == (FailureReason.PROGRAM, True)


@pytest.mark.parametrize("value", ["a\ud83d", [{"role": "assistant", "content": "a\ud83d"}]])
async def test_half_a_surrogate_in_a_completion_is_replaced(value: Any) -> None:
    rollout = await made(returning(value))
    assert rollout.completion == [{"role": "assistant", "content": "a?"}]


@pytest.mark.parametrize("name", [3, "a\nb", "\ud83d", "x" * 129])
async def test_a_metric_needs_a_name(name: Any) -> None:
    async def program(ctx: Context, row: dict[str, Any]) -> None:
        await ctx.chat(row["messages"])
        ctx.metric(name, 1.0)

    rollout = await made(program)
    assert "a metric's name" in rollout.error


async def test_metrics_are_bounded_in_number() -> None:
    async def program(ctx: Context, row: dict[str, Any]) -> None:
        await ctx.chat(row["messages"])
        for number in range(257):
            ctx.metric(f"m{number}", 1.0)

    assert "256 metrics at most" in (await made(program)).error


async def test_the_sampling_of_a_rollout_is_what_its_turns_were_asked_with() -> None:
    async def program(ctx: Context, row: dict[str, Any]) -> None:
        await ctx.chat(row["messages"], temperature=0.5, max_tokens=3)
        await ctx.chat(row["messages"], temperature=0.5, max_tokens=9)

    sampling = (await made(program)).sampling
    assert (sampling["temperature"], sampling["max_tokens"]) == (0.5, None)


@pytest.mark.parametrize("early", [True, False])
async def test_a_generation_left_running_is_aborted_when_its_rollout_ends(early: bool) -> None:
    engines = Engines(held=True)

    async def program(ctx: Context, row: dict[str, Any]) -> None:
        left = asyncio.create_task(ctx.generate("left"))
        left.add_done_callback(lambda task: task.cancelled() or task.exception())
        await until(lambda: len(engines.waiting) == 1)
        if not early:
            await asyncio.Event().wait()

    running = asyncio.create_task(made(program, engines))
    if early:
        assert (await running).reason is FailureReason.PROGRAM
    else:
        await until(lambda: len(engines.waiting) == 1)
        running.cancel()
        await asyncio.wait({running})
    await until(lambda: engines.aborted == ["g-7.2.1.0"])


async def test_with_every_thread_lost_rollouts_fail_at_once_and_say_so() -> None:
    threads = Threads(1, grace_s=0.0)
    release = threading.Event()

    def stuck(ctx: ThreadContext, row: dict[str, Any]) -> None:
        release.wait(20)

    make = runner(stuck, Engines(), threads=threads, rollout_timeout_s=0.05)
    for _ in range(2):
        assert (await make.run(job(), OpenGate())).reason is FailureReason.DEADLINE
    await until(lambda: threads.counts().stuck == 2)
    rollout = await make.run(job(), OpenGate())
    release.set()
    assert (rollout.reason, "ignore their end" in rollout.error) == (FailureReason.INTERNAL, True)


async def test_a_task_group_keeps_the_reason_of_the_generation_that_failed() -> None:
    async def program(ctx: Context, row: dict[str, Any]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):
                tasks.create_task(ctx.chat(row["messages"]))

    too_long = GenerationFailed(FailureReason.PROMPT_TOO_LONG, "too long", engine="http://e")
    rollout = await made(program, Engines(fails=lambda number: too_long))
    assert (rollout.reason, rollout.engine) == (FailureReason.PROMPT_TOO_LONG, "http://e")


async def test_a_caller_that_no_longer_waits_leaves_no_trace_in_the_queue_for_a_thread() -> None:
    threads = Threads(1, grace_s=30)
    release = threading.Event()
    busy = asyncio.create_task(threads.run(lambda: release.wait(20), name="busy"))
    await until(lambda: threads.counts().busy == 1)
    gone = [asyncio.create_task(threads.run(lambda: None, name="gone")) for _ in range(50)]
    await until(lambda: threads.counts().waiting == 50)
    for task in gone:
        task.cancel()
    await asyncio.wait(gone)
    assert not threads._queue
    release.set()
    await busy
