"""Python functions as tools, and the loop in which a policy calls them."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from rollout_service.core.model import (
    FailedRollout,
    FailureReason,
    FinishedRollout,
    FinishReason,
    Prompt,
    RolloutJob,
    Turn,
)
from rollout_service.engines import Answer, GenerateRequest, GenerationFailed
from rollout_service.errors import ConfigError
from rollout_service.rollouts import Program, ProgramRunner, ProgramSettings, Threads, ToolBox, tool_program
from rollout_service.rollouts.tools import make_tool
from tests.engine_fleets import OpenGate, until

RELEASE = threading.Event()


def add(a: int, b: float = 2.0, unit: Literal["m", "km"] = "m") -> str:
    """Adds two lengths.

    Both in the same unit.

    Args:
        a: The first length.
        b: The second one,
            which has a default.
    """
    return f"{a + b} {unit}"


async def look_up(name: str) -> dict[str, Any]:
    """Looks a name up."""
    await asyncio.sleep(0)
    return {"name": name, "found": True}


def explodes() -> None:
    """Raises."""
    raise ValueError("out of paper")


def exits() -> None:
    """Ends the process."""
    raise SystemExit(1)


async def cancels() -> None:
    """Cancels itself."""
    raise asyncio.CancelledError


def hangs() -> None:
    """Never answers."""
    RELEASE.wait(20)


def circular() -> Any:
    """Returns what cannot be shown."""
    value: list[Any] = []
    value.append(value)
    return value


def box(*functions: Any, timeout_s: float = 5.0) -> ToolBox:
    tools = [make_tool(function, "program.tools[0]") for function in functions]
    return ToolBox(tools, threads=Threads(4, grace_s=0.05), timeout_s=timeout_s)


def call(name: str, arguments: Any = "{}", id: str = "c1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_schema_is_made_of_signature_and_docstring() -> None:
    assert box(add).schemas == [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Adds two lengths.\n\nBoth in the same unit.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "a": {"type": "integer", "description": "The first length."},
                        "b": {
                            "type": "number",
                            "default": 2.0,
                            "description": "The second one,\nwhich has a default.",
                        },
                        "unit": {"type": "string", "enum": ["m", "km"], "default": "m"},
                    },
                    "required": ["a"],
                    "additionalProperties": False,
                },
            },
        }
    ]


def takes_any(*names: str) -> None: ...


def takes_all(**names: str) -> None: ...


def takes_position(a: int, /) -> None: ...


def takes_threads(a: threading.Thread) -> None: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (takes_any, "cannot have 'names'"),
        (takes_all, "cannot have 'names'"),
        (takes_position, "cannot have 'a'"),
        (takes_threads, "no schema"),
    ],
)
def test_what_cannot_be_called_by_name_is_refused_in_one_line(function: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make_tool(function, "program.tools[3]")
    assert str(caught.value).startswith("program.tools[3]: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "content"),
    [
        (call("add", '{"a": 1, "b": 2.5}'), "3.5 m"),
        (call("add", {"a": 1}), "3.0 m"),
        (call("add", '{"a": "4"}'), "6.0 m"),
        (call("look_up", '{"name": "é"}'), '{"name": "é", "found": true}'),
    ],
)
async def test_a_call_is_answered_under_its_id(asked: dict[str, Any], content: str) -> None:
    answer = await box(add, look_up).answer(asked)
    name = asked["function"]["name"]
    assert answer.message == {"role": "tool", "tool_call_id": "c1", "name": name, "content": content}
    assert not answer.failed


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (call("subtract"), "there is no tool 'subtract'; there are add, look_up, explodes, exits, cancels, circular"),
        (call("add", '{"a": 1'), "the arguments are not JSON"),
        (call("add", "[1]"), "the arguments are list, no object"),
        (call("add", '{"a": "x"}'), "a: Input should be a valid integer"),
        (call("add", "{}"), "a: Missing required argument"),
        (call("add", '{"a": 1, "c": 2}'), "c: Unexpected keyword argument"),
        (call("add", '{"a": 1, "unit": "mile"}'), "unit: Input should be 'm' or 'km'"),
        (call("explodes"), "ValueError: out of paper"),
        (call("exits"), "SystemExit: 1"),
        (call("cancels"), "cancels was cancelled"),
        (call("circular"), "cannot be shown"),
        ({}, "there is no tool ''"),
        ({"function": "add"}, "there is no tool ''"),
    ],
)
async def test_what_goes_wrong_in_a_call_is_an_answer_to_the_policy(asked: dict[str, Any], words: str) -> None:
    answer = await box(add, look_up, explodes, exits, cancels, circular).answer(asked)
    assert answer.failed
    assert answer.message["content"].startswith("Error: ")
    assert words in answer.message["content"]


async def test_a_tool_that_hangs_is_answered_for_after_its_time() -> None:
    answer = await box(hangs, timeout_s=0.05).answer(call("hangs"))
    RELEASE.set()
    assert answer.message["content"] == "Error: hangs did not answer in 0.05 s"


class Unspeakable:
    def __str__(self) -> str:
        raise KeyError("no words")

    def tolist(self) -> list[int]:
        raise KeyError("no list either")


def unspeakable() -> Any:
    """Returns what cannot even be described."""
    return Unspeakable()


def odd() -> Any:
    """Returns what is no JSON."""
    return {"when": object()}


def hidden_async(name: str) -> Any:
    """Looks a name up, by a coroutine its signature does not show."""
    return look_up(name)


async def test_what_a_plain_function_returns_to_be_awaited_is_awaited() -> None:
    answer = await box(hidden_async).answer(call("hidden_async", '{"name": "x"}'))
    assert answer.message["content"] == '{"name": "x", "found": true}'


@pytest.mark.parametrize("name", ["unspeakable", "odd"])
async def test_what_is_no_json_is_an_error_for_the_policy(name: str) -> None:
    answer = await box(unspeakable, odd).answer(call(name))
    assert answer.failed
    assert "cannot be shown" in answer.message["content"]


async def test_waiting_for_a_thread_is_not_the_tools_time() -> None:
    release = threading.Event()

    def waits() -> str:
        """Waits for the test."""
        release.wait(20)
        return "done"

    tools = ToolBox([make_tool(waits, "t")], threads=Threads(1, grace_s=1), timeout_s=0.3)
    first = asyncio.create_task(tools.answer(call("waits")))
    second = asyncio.create_task(tools.answer(call("waits")))
    assert (await first).failed  # its own time is over; its thread still has the place
    assert not second.done()
    release.set()
    assert (await second).message["content"] == "done"


# -- the loop


@dataclass
class Policy:
    """Says what it is told to, turn by turn: a text, or a list of calls, or a failure."""

    says: list[str | list[dict[str, Any]] | GenerationFailed]
    reason: FinishReason = FinishReason.STOP
    asked: list[GenerateRequest] = field(default_factory=list)

    async def generate(self, request: GenerateRequest, *, gate: Any, deadline: Any) -> Answer:
        said = self.says[len(self.asked)]
        self.asked.append(request)
        if isinstance(said, GenerationFailed):
            raise said
        message: dict[str, Any] = {"role": "assistant", "content": said if isinstance(said, str) else None}
        if not isinstance(said, str):
            message["tool_calls"] = said
        text = json.dumps(said)
        turn = Turn(
            prompt_ids=array("i", list(json.dumps(request.messages).encode())),
            output_ids=array("i", list(text.encode())),
            logprobs=array("f", [-0.5] * len(text.encode())),
            finish_reason=self.reason if isinstance(said, str) else FinishReason.TOOL_CALLS,
            text=said if isinstance(said, str) else "",
            message=message,
            engine="http://engine",
        )
        return Answer(
            turn=turn, engine="http://engine", attempts=1, wasted_tokens=0, logprobs_mode=None, policy_version=0
        )

    async def prompt_text(self, ids: array[int]) -> str | None:
        return None


MESSAGES = [{"role": "user", "content": "1 + 2.5?"}]


async def played(policy: Policy, tools: ToolBox, *, max_turns: int = 8, prompt: Prompt | None = None) -> Any:
    runner = ProgramRunner(
        Program(call=tool_program(tools, max_turns=max_turns), in_thread=False),
        engines=policy,
        threads=Threads(1, grace_s=1),
        settings=ProgramSettings(),
    )
    prompt = prompt or Prompt(prompt_id="p", messages=MESSAGES, num_generations=4)
    return await runner.run(RolloutJob(group_id="g-1", attempt=1, index=0, policy_version=0, prompt=prompt), OpenGate())


async def test_calls_are_made_their_answers_read_and_the_last_answer_ends_it() -> None:
    calls = [call("add", '{"a": 1, "b": 2.5}', "c1"), call("nothing", "{}", "c2")]
    policy = Policy(says=[calls, "It is 3.5 m."])
    rollout = await played(policy, box(add))
    assert isinstance(rollout, FinishedRollout)
    assert rollout.completion == [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "3.5 m"},
        {
            "role": "tool",
            "tool_call_id": "c2",
            "name": "nothing",
            "content": "Error: there is no tool 'nothing'; there are add",
        },
        {"role": "assistant", "content": "It is 3.5 m."},
    ]
    assert (rollout.metrics["turns"], rollout.metrics["tool_calls"], rollout.metrics["tool_failures"]) == (2, 2, 1)
    assert rollout.finish_reason is FinishReason.STOP
    assert policy.asked[1].messages == [*MESSAGES, *rollout.completion[:3]]
    assert all(request.extra["tools"] == box(add).schemas for request in policy.asked)


async def test_calls_of_one_turn_run_side_by_side_and_are_answered_in_order() -> None:
    meet = threading.Barrier(2, timeout=5)

    def first() -> str:
        """One."""
        meet.wait()
        return "1"

    def second() -> str:
        """Two."""
        meet.wait()
        return "2"

    rollout = await played(Policy(says=[[call("first", id="a"), call("second", id="b")], "done"]), box(first, second))
    assert [message["content"] for message in rollout.completion] == [None, "1", "2", "done"]


async def test_max_turns_bounds_the_answers_of_the_policy() -> None:
    rollout = await played(Policy(says=[[call("add", '{"a": 1}')]] * 9), box(add), max_turns=3)
    assert rollout.metrics["turns"] == 3
    assert rollout.metrics["tool_calls"] == 2, "nobody would read what the last one came to"
    assert rollout.completion[-1]["tool_calls"]


async def test_an_answer_cut_by_length_ends_the_rollout() -> None:
    rollout = await played(Policy(says=["and on and on"], reason=FinishReason.LENGTH), box(add))
    assert rollout.finish_reason is FinishReason.LENGTH


async def test_a_context_full_of_answers_ends_the_rollout_with_what_it_has() -> None:
    full = GenerationFailed(FailureReason.PROMPT_TOO_LONG, "4097 tokens")
    rollout = await played(Policy(says=[[call("add", '{"a": 1}')], full]), box(add))
    assert isinstance(rollout, FinishedRollout)
    assert (rollout.metrics["context_full"], rollout.metrics["turns"]) == (1.0, 1.0)
    assert [message["role"] for message in rollout.completion] == ["assistant", "tool"]


async def test_an_engine_that_fails_fails_the_rollout() -> None:
    down = GenerationFailed(FailureReason.REJECTED, "tool choice needs --enable-auto-tool-choice")
    rollout = await played(Policy(says=[down]), box(add))
    assert isinstance(rollout, FailedRollout)
    assert "--enable-auto-tool-choice" in rollout.error


async def test_a_text_becomes_a_users_message_and_ids_are_refused() -> None:
    policy = Policy(says=["3.5"])
    await played(policy, box(add), prompt=Prompt(prompt_id="p", text="1 + 2.5?", num_generations=4))
    assert policy.asked[0].messages == MESSAGES
    ids = Prompt(prompt_id="p", token_ids=array("i", [1]), num_generations=4)
    rollout = await played(Policy(says=[]), box(add), prompt=ids)
    assert (rollout.reason, "not as token ids" in rollout.error) == (FailureReason.PROGRAM, True)


async def test_cancelling_the_rollout_ends_a_call_that_waits() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def waits() -> None:
        """Waits."""
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    running = asyncio.create_task(played(Policy(says=[[call("waits")]]), box(waits)))
    await began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(ended.is_set)
