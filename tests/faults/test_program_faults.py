"""Programs in a running service: what is delivered, and what a bump does to threads."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import fault_programs
from tests.faults.scripted import Act, Engine, says
from tests.service import LiveService, prompt, trained_text, until

PROGRAMS = Path(fault_programs.__file__)


@pytest.fixture
async def running(engine: Engine, tmp_path: Path) -> AsyncIterator[Any]:
    """Starts a service whose rollouts a function of fault_programs makes."""
    made: list[LiveService] = []

    async def start(function: str, **tables: Any) -> LiveService:
        shutil.copy(PROGRAMS, tmp_path / "programs_under_test.py")
        program = {"target": f"programs_under_test:{function}"} | tables.pop("program", {})
        made.append(LiveService(tmp_path, [engine.url], program=program, rewards=[], **tables))
        return await made[-1].start()

    yield start
    fault_programs.LET_GO.set()
    for live in made:
        await live.checked_stop()


async def test_turns_are_one_sample_with_the_programs_own_reward_and_the_versions_of_its_turns(
    running: Any, engine: Engine
) -> None:
    live = await running("two_turns", groups={"num_generations": 2})
    held = Act(hold=True, text="r=0.5;x")
    engine.on("p:again;", held)
    await live.submit(prompt("a", answer=1))
    (first, second) = await engine.holding(2, "p:again;")
    await live.bump(1)
    for attempt, value in ((first, 0.25), (second, 0.75)):
        attempt.signal.set_result(says(value))
    (group,) = await live.collect(1)
    assert group["policy_version"] == 0
    assert sorted(sample["reward"] for sample in group["samples"]) == [0.25, 0.75]
    for sample in group["samples"]:
        assert sample["rewards"] == {"rollout": sample["reward"]}
        assert sample["advantage"] == pytest.approx(1.0 if sample["reward"] > 0.5 else -1.0, abs=1e-4)
        assert sample["metrics"]["tenth"] == pytest.approx(sample["reward"] / 10)
        assert sample["metrics"]["turns"] == 2
        assert sample["turn_versions"] == [0, 0], "the version at which the engine was asked"
        # One row: both answers are trained, and what stands between them is context.
        assert trained_text(sample).count("r=") == 2
        text = bytes(sample["input_ids"]).decode()
        assert text.startswith("p:a;")
        assert ";p:again;" in text
        assert ";p:again;" not in trained_text(sample)


async def test_a_turn_after_a_bump_carries_its_own_version_and_the_sample_its_groups(
    running: Any, engine: Engine
) -> None:
    live = await running("two_turns", groups={"num_generations": 2})
    engine.on("p:b;", lambda attempt: Act(hold="again" not in attempt.prompt, text="r=0.5;y"))
    await live.submit(prompt("b"))
    await engine.holding(2, "p:b;")
    await live.bump(3)
    engine.release("p:b;")
    (group,) = await live.collect(1)
    assert [sample["turn_versions"] for sample in group["samples"]] == [[0, 3], [0, 3]]
    assert [sample["policy_version"] for sample in group["samples"]] == [0, 0]


async def test_after_a_bump_four_fresh_rollouts_have_the_four_threads_at_once(running: Any, engine: Engine) -> None:
    live = await running(
        "blocks",
        program={"threads": 4, "grace_s": 30.0},
        groups={"num_generations": 4, "max_staleness": 0},
        dispatch={"max_inflight_rollouts": 4},
    )
    engine.on("p:old;", Act(hold=True))
    await live.submit(prompt("old"), prompt("fresh"))
    await engine.holding(4, "p:old;")
    assert (await live.status())["threads"] == {"total": 4, "busy": 4, "waiting": 0, "stuck": 0}
    await live.bump(1)
    (group,) = await live.collect(1)
    assert group["prompt_id"] == "fresh"
    assert {attempt.left for attempt in engine.find("p:old;")} <= {"aborted", "disconnected"}
    await until(lambda: _busy(live, 0))
    assert await live.metric("rollout_threads", 'state="stuck"') == 0


async def _busy(live: LiveService, count: int) -> bool:
    return bool((await live.status())["threads"]["busy"] == count)


async def test_a_thread_that_goes_on_past_its_grace_is_shown_and_its_place_made_good(
    running: Any, engine: Engine
) -> None:
    live = await running(
        "ignores_its_end",
        program={"threads": 2, "grace_s": 0.05},
        groups={"num_generations": 2, "max_staleness": 0},
        dispatch={"max_inflight_rollouts": 2},
    )
    await live.submit(prompt("old"), prompt("fresh"))
    await until(lambda: len(engine.find("p:old;")) == 2)
    await until(lambda: not engine.in_flight())
    await live.bump(1)
    await until(lambda: len(engine.find("p:fresh;")) == 2, what="the places of stuck threads were made good")
    threads = (await live.status())["threads"]
    assert (threads["stuck"], threads["busy"], threads["total"]) == (2, 2, 2)
    assert await live.metric("rollout_threads", 'state="stuck"') == 2


async def test_an_exception_of_a_program_costs_its_rollout(running: Any, engine: Engine) -> None:
    live = await running("fails_on_row_one")
    (group_id,) = await live.submit(prompt("a"))
    (group,) = await live.collect(1)
    assert [sample["index"] for sample in group["samples"]] == [0, 2, 3]
    assert await live.metric("rollout_failed_total", 'reason="program"') == 1
    assert live.logged("program_raised")
    assert (await live.group(group_id))["state"] == "acked"
