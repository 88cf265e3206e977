"""Tools in a running service: what a policy gets wrong is told to the policy, and costs nobody anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine_script import Reply
from tests.faults import fault_tools
from tests.faults.scripted import Act, Attempt, Engine
from tests.service import LiveService

TOOLS = Path(fault_tools.__file__)
GOOD = '{"a": 2, "b": 2}'


@pytest.fixture
async def live(engine: Engine, tmp_path: Path) -> AsyncIterator[LiveService]:
    shutil.copy(TOOLS, tmp_path / "tools_under_test.py")
    shutil.copy(TOOLS.with_name("fault_rewards.py"), tmp_path)
    tools = ["tools_under_test:add", "tools_under_test:cancels"]
    service = LiveService(tmp_path, [engine.url], program={"tools": tools}, dispatch={"max_inflight_rollouts": 64})
    yield await service.start()
    await service.checked_stop()


def calling(*calls: tuple[str, Any]) -> Act:
    """An answer that calls tools: (name, arguments)."""
    told = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]

    def change(answer: dict[str, Any]) -> None:
        answer["choices"][0]["message"] = {"role": "assistant", "content": None, "tool_calls": told}
        answer["choices"][0]["finish_reason"] = "tool_calls"

    return Act(reply=Reply(ids=list(b"<call>"), change=change))


def by_row(acts: list[Act]) -> Any:
    """The nth first turn of a prompt does the nth act; a turn after tools answers with a reward."""

    def rule(attempt: Attempt) -> Act:
        messages = attempt.body["messages"]
        if messages[-1]["role"] == "tool":
            return Act(text=f"r=0.5;{messages[-1]['content'][:30]}")
        return acts[attempt.nth % len(acts)]

    return rule


async def submit(live: LiveService, *names: str) -> None:
    rows = [{"prompt_id": name, "messages": [{"role": "user", "content": f"p:{name};"}]} for name in names]
    await live.submit(*rows)


async def test_bad_arguments_are_told_to_the_policy_and_every_sample_survives(
    live: LiveService, engine: Engine
) -> None:
    bad = ['{"a": 2', "[2, 2]", "", '{"a": "x", "b": 1}']
    engine.on("p:bad;", by_row([calling(("add", arguments)) for arguments in bad]))
    engine.on("p:good;", by_row([calling(("add", GOOD))]))
    await submit(live, "bad", "good")
    groups = {group["prompt_id"]: group for group in await live.collect(2)}
    assert len(groups["bad"]["samples"]) == len(groups["good"]["samples"]) == 4
    for sample in groups["bad"]["samples"]:
        assert (sample["metrics"]["tool_calls"], sample["metrics"]["tool_failures"]) == (1, 1)
        assert sample["completion"][1]["content"].startswith("Error: ")
        assert sample["completion"][2]["content"].startswith("r=0.5;Error: ")
    for sample in groups["good"]["samples"]:
        assert sample["completion"][1]["content"] == "4"
        assert sample["metrics"]["tool_failures"] == 0
    assert await live.metric("rollout_failed_total") == 0


async def test_a_tool_that_raises_a_cancellation_ends_neither_the_rollout_nor_anything_else(
    live: LiveService, engine: Engine
) -> None:
    engine.on("p:a;", by_row([calling(("cancels", "{}"), ("add", GOOD))]))
    await submit(live, "a")
    (group,) = await live.collect(1)
    for sample in group["samples"]:
        contents = [message["content"] for message in sample["completion"] if message["role"] == "tool"]
        assert contents == ["Error: cancels was cancelled", "4"]
    engine.on("p:b;", Act(text="r=1;b"))
    await submit(live, "b")
    (group,) = await live.collect(1)
    assert group["prompt_id"] == "b"


async def test_the_tools_are_offered_with_their_schemas_at_every_turn(live: LiveService, engine: Engine) -> None:
    engine.on("p:c;", by_row([calling(("add", GOOD))]))
    await submit(live, "c")
    await live.collect(1)
    offered = [json.dumps(attempt.body["tools"]) for attempt in engine.attempts]
    assert len(offered) == 8
    assert len(set(offered)) == 1
    names = [tool["function"]["name"] for tool in engine.attempts[0].body["tools"]]
    assert names == ["add", "cancels"]
