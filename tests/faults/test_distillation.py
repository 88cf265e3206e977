"""Distillation: each rollout stands alone, and whatever a teacher does costs the samples it failed on and no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import MakeService
from tests.faults.scripted import Act, Engine, says
from tests.faults.test_bad_start import refused as refused_at_start
from tests.service import prompt, trained_ids, trained_text, until
from tests.teacher_script import LIKELY, OWN, Said, ScriptedTeacher, found, refused

STALE_SAMPLES = "rollout_stale_samples_total"
TEACHER_ERRORS = "rollout_teacher_errors_total"
TOP_K = 2


@pytest.fixture
async def teacher() -> AsyncIterator[ScriptedTeacher]:
    async with ScriptedTeacher() as teacher:
        yield teacher


def distilling(*teachers: ScriptedTeacher, **changes: Any) -> dict[str, Any]:
    """Settings of a run with these teachers, called t0, t1, ..., and no reward."""
    tables = [
        {"id": f"t{i}", "url": teacher.url, "top_k": TOP_K, "timeout_s": 10.0, "max_attempts": 1}
        for i, teacher in enumerate(teachers)
    ]
    return {"mode": "distillation", "teachers": tables, "rewards": [], **changes}


def check_tables(sample: Mapping[str, Any]) -> None:
    """One row a trained token, about that very token."""
    trained = trained_ids(sample)
    assert sample["teacher_topk_ids"] == [[token + 1, token + 2, token] for token in trained]
    assert sample["teacher_topk_logprobs"] == [[LIKELY, LIKELY - 1, OWN]] * len(trained)


def texts(groups: list[dict[str, Any]]) -> list[str]:
    return sorted(trained_text(group["samples"][0]) for group in groups)


def hold(body: Mapping[str, Any]) -> Any:
    return asyncio.Event().wait()


async def test_every_rollout_is_a_group_of_its_own_with_its_teachers_tables(
    engine: Engine, teacher: ScriptedTeacher, service: MakeService
) -> None:
    live = await service(**distilling(teacher))
    answer = await live.post_prompts(prompt("a", 3), prompt("b", 1, level=2))
    assert [group["prompt_id"] for group in answer.json()["groups"]] == ["a", "a#1", "a#2", "b"]
    groups = await live.collect(4)
    assert sorted(group["prompt_id"] for group in groups) == ["a", "a#1", "a#2", "b"]
    for group in groups:
        (sample,) = group["samples"]
        check_tables(sample)
        assert (sample["teacher_id"], sample["scored"], sample["index"]) == ("t0", True, 0)
        assert (sample["reward"], sample["advantage"], sample["rewards"]) == (None, 0.0, {})
        assert (group["num_generations"], group["zero_variance"], group["reward_mean"]) == (1, False, None)
        assert group["columns"] == ({"level": 2} if group["prompt_id"] == "b" else {})
    assert len(teacher.asked) == len(engine.attempts) == 4
    assert sorted(asked["prompt"] for asked in teacher.asked) == sorted(g["samples"][0]["input_ids"] for g in groups)
    assert await live.metric(STALE_SAMPLES) == await live.metric(TEACHER_ERRORS, 't0"') == 0


async def test_rewards_stand_beside_the_tables_without_a_baseline(
    engine: Engine, teacher: ScriptedTeacher, service: MakeService
) -> None:
    engine.on(None, lambda attempt: says(attempt.nth / 4, f"a{attempt.nth}"))
    rewards = [{"name": "accuracy", "function": "fault_rewards:accuracy", "timeout_s": 10.0}]
    live = await service(**distilling(teacher, rewards=rewards))
    await live.submit(prompt("a", 3))
    samples = [group["samples"][0] for group in await live.collect(3)]
    assert sorted(sample["reward"] for sample in samples) == [0.0, 0.25, 0.5]
    for sample in samples:
        assert sample["advantage"] == sample["reward"] == sample["rewards"]["accuracy"]
        check_tables(sample)


async def test_the_row_names_its_teacher_and_an_unknown_one_is_refused_with_nothing_taken(
    engine: Engine, service: MakeService
) -> None:
    async with ScriptedTeacher() as first, ScriptedTeacher() as second:
        live = await service(**distilling(first, second))
        for wrong, given in (({"teacher_id": "t7"}, '"t7"'), ({}, "null"), ({"teacher_id": 1}, "1")):
            answer = await live.post_prompts(prompt("good", 1, teacher_id="t1"), prompt("bad", 1, **wrong))
            assert answer.status_code == 422
            detail = answer.json()["detail"]
            assert detail.startswith("prompts[1]: columns.teacher_id: expected the id of a teacher (t0, t1), got")
            assert given in detail
        assert (await live.counts())["submitted"] == 0
        await live.submit(prompt("a", 1, teacher_id="t0"), prompt("b", 1, teacher_id="t1"))
        groups = await live.collect(2)
        assert {g["prompt_id"]: g["samples"][0]["teacher_id"] for g in groups} == {"a": "t0", "b": "t1"}
        assert {g["prompt_id"]: g["columns"]["teacher_id"] for g in groups} == {"a": "t0", "b": "t1"}
        assert [bytes(t.asked[0]["prompt"][:4]) for t in (first, second)] == [b"p:a;", b"p:b;"]


async def test_an_unknown_teacher_in_the_prompts_file_is_named_by_its_line(
    tmp_path: Path, engine: Engine, teacher: ScriptedTeacher
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "teacher_id": "t0"}\n\n{"prompt": "y", "teacher_id": "t9"}\n')
    line = await refused_at_start(
        tmp_path, engine.url, **distilling(teacher, prompts={"path": str(tmp_path / "rows.jsonl")})
    )
    assert 'rows.jsonl:3: teacher_id: expected the id of a teacher (t0), got "t9"' in line


async def test_a_teacher_with_another_model_is_refused_at_the_start(
    tmp_path: Path, engine: Engine, teacher: ScriptedTeacher
) -> None:
    tables = distilling(teacher)
    tables["teachers"][0]["model"] = "huge"
    line = await refused_at_start(tmp_path, engine.url, **tables)
    assert "does not serve model 'huge'; it serves 'big'" in line


async def test_one_failed_rollout_costs_one_sample_and_halts_nothing(
    engine: Engine, teacher: ScriptedTeacher, service: MakeService
) -> None:
    engine.on(
        None, lambda attempt: Act(status=400, message="unlucky") if attempt.nth == 1 else says(0, f"a{attempt.nth}")
    )
    live = await service(**distilling(teacher))
    ids = await live.submit(prompt("a", 4))
    groups = await live.collect(3)
    assert texts(groups) == ["r=0;a0", "r=0;a2", "r=0;a3"]
    states = sorted([await live.state(group_id) for group_id in ids])
    assert states == ["acked", "acked", "acked", "failed"]
    assert await live.probe("/readyz") == 200
    assert await live.metric("rollout_failed_total") == await live.metric("rollout_failed_groups_total") == 1


async def test_a_bump_takes_each_sample_by_its_own_version(
    engine: Engine, teacher: ScriptedTeacher, service: MakeService
) -> None:
    engine.on(None, Act(hold=True))
    limits = {"dispatch": {"max_inflight_rollouts": 1}, "groups": {"max_staleness": 0}}
    live = await service(**distilling(teacher, **limits))
    old, *others = await live.submit(prompt("a", 3))
    await engine.holding(1)
    assert await live.bump(1) == {"version": 1, "previous": 0, "stale_groups": 1, "aborted_rollouts": 1}
    assert await live.state(old) == "stale"
    await until(lambda: len(engine.attempts) == 2)
    engine.on(None, Act())
    engine.release()
    groups = await live.collect(2)
    assert [group["group_id"] for group in groups] == others
    assert [group["policy_version"] for group in groups] == [1, 1]
    assert await live.metric(STALE_SAMPLES) == await live.metric("rollout_stale_groups_total") == 1
    assert engine.attempts[0].left in ("aborted", "disconnected")
    assert len(teacher.asked) == 2


async def test_one_sample_is_cancelled_without_the_others_of_its_prompt(
    engine: Engine, teacher: ScriptedTeacher, service: MakeService
) -> None:
    engine.on(None, Act(hold=True))
    live = await service(**distilling(teacher))
    first, *_ = await live.submit(prompt("a", 3))
    await engine.holding(3)
    assert (await live.http.delete(f"/groups/{first}")).status_code == 200
    await engine.holding(2)
    engine.release()
    assert sorted(group["prompt_id"] for group in await live.collect(2)) == ["a#1", "a#2"]


async def test_a_bump_while_the_teacher_reads_closes_the_connection_and_delivers_nothing_of_it(
    engine: Engine, teacher: ScriptedTeacher, service: MakeService
) -> None:
    teacher.script = hold
    live = await service(**distilling(teacher, groups={"max_staleness": 0}))
    ids = await live.submit(prompt("a", 2))
    await until(lambda: teacher.in_flight == 2)
    assert (await live.bump(1))["stale_groups"] == 2
    await until(lambda: teacher.left == 2, what="the teacher sees the service leave")
    assert [await live.state(group_id) for group_id in ids] == ["stale", "stale"]
    assert (await live.pull(wait_s=0))["groups"] == []
    assert await live.metric(STALE_SAMPLES) == 2
    assert await live.metric(TEACHER_ERRORS, 't0"') == 0


@pytest.mark.parametrize(
    "fault",
    [
        refused(500),
        refused(400),
        Said(cut=True),
        Said(body=b"{}"),
        Said(change=lambda answer: answer["choices"][0]["prompt_logprobs"].pop()),
        Said(change=lambda answer: answer["choices"][0]["prompt_logprobs"].__setitem__(-1, found(0, 2))),
        Said(change=lambda answer: answer["choices"][0]["prompt_logprobs"].__setitem__(-1, None)),
    ],
    ids=["500", "400", "cut", "empty", "too short", "another token", "no last position"],
)
async def test_a_teacher_that_fails_on_a_sample_has_it_dropped_and_counted_and_nothing_is_filled_in(
    engine: Engine, teacher: ScriptedTeacher, service: MakeService, fault: Said
) -> None:
    teacher.script = lambda body: fault if bytes(body["prompt"][:4]) == b"p:x;" else Said()
    live = await service(**distilling(teacher))
    (lost, _, _) = await live.submit(prompt("x", 1), prompt("y", 2))
    groups = await live.collect(2)
    assert {group["prompt_id"] for group in groups} == {"y", "y#1"}
    group = await live.wait_state(lost, "dropped", "acked", "ready")
    assert (group["state"], group["reason"]) == ("dropped", "unscorable")
    assert await live.metric(TEACHER_ERRORS, 'teacher="t0"') == 1
    assert await live.metric("rollout_dropped_groups_total", 'reason="unscorable"') == 1
    assert (live.logged("teacher_failed")[0]["teacher"], live.logged("teacher_failed")[0]["group_id"]) == ("t0", lost)


async def test_a_teacher_that_stays_down_halts_with_its_own_words_and_resume_goes_on(
    engine: Engine, teacher: ScriptedTeacher, service: MakeService
) -> None:
    limits = {"groups": {"halt_after_unproductive_groups": 3}, "dispatch": {"engine_wait_s": 0.2}}
    live = await service(**distilling(teacher, **limits))
    await teacher.stop()
    await live.submit(prompt("a", 3))
    halted = await until(lambda: _halt(live), what="halted")
    assert halted["reason"] == "3 groups in a row were dropped or failed"
    assert halted["error"].startswith("teacher:t0: /v1/completions: ")
    assert (await live.lease(wait_s=0)).status_code == 503
    await teacher.start()
    await live.http.post("/resume")
    await live.submit(prompt("b", 2))
    assert sorted(group["prompt_id"] for group in await live.collect(2)) == ["b", "b#1"]


async def test_samples_wait_for_a_teacher_that_is_down_and_cost_nothing(
    engine: Engine, teacher: ScriptedTeacher, service: MakeService
) -> None:
    tables = distilling(teacher)
    # It may come back between a refused connection and the look whether it is down: then that one counts.
    tables["teachers"][0]["max_attempts"] = 3
    live = await service(**tables)
    await teacher.stop()
    await live.submit(prompt("a", 3))
    await until(lambda: _scoring(live, 3))
    await teacher.start()
    assert len(await live.collect(3)) == 3
    assert await live.metric(TEACHER_ERRORS, 't0"') == 0


async def _scoring(live: Any, count: int) -> bool:
    return bool((await live.counts())["scoring"] == count)


async def _halt(live: Any) -> Any:
    return (await live.status())["halted"]


async def test_a_restart_while_the_teacher_reads_asks_it_again(
    engine: Engine, teacher: ScriptedTeacher, service: MakeService
) -> None:
    teacher.script = hold
    live = await service(**distilling(teacher))
    await live.submit(prompt("a", 2))
    await until(lambda: teacher.in_flight == 2)
    await live.stop()
    teacher.script = lambda body: Said()
    await live.start()
    groups = await live.collect(2)
    for group in groups:
        check_tables(group["samples"][0])
    assert len(engine.attempts) == 2, "finished rollouts are not generated again"
    assert await live.metric(TEACHER_ERRORS, 't0"') == 0


async def test_a_lease_after_a_restart_has_the_tables_from_the_store(
    engine: Engine, teacher: ScriptedTeacher, service: MakeService
) -> None:
    live = await service(**distilling(teacher))
    await live.submit(prompt("a", 2))
    await until(lambda: _ready(live, 2))
    await live.stop()
    await live.start()
    for group in await live.collect(2):
        check_tables(group["samples"][0])
    assert len(teacher.asked) == 2


async def _ready(live: Any, count: int) -> bool:
    return (await live.counts())["ready"] == count


async def test_a_prompt_sent_again_is_known_by_every_rollout_and_another_size_is_a_conflict(
    engine: Engine, teacher: ScriptedTeacher, service: MakeService
) -> None:
    live = await service(**distilling(teacher))
    ids = await live.submit(prompt("a", 3))
    assert await live.submit(prompt("a", 3)) == ids
    assert (await live.post_prompts(prompt("a", 2))).status_code == 409
    # A prompt whose own id is that of another one's rollout: refused, not mistaken for it.
    namesake = prompt("a", 3) | {"prompt_id": "a#1"}
    assert (await live.post_prompts(namesake)).status_code == 409
    assert (await live.counts())["submitted"] == 3


async def test_a_prompts_file_of_large_groups_is_read_no_faster_than_its_rollouts_fit_the_queue(
    engine: Engine, teacher: ScriptedTeacher, service: MakeService, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt_id": "r{i}", "prompt": "p:r{i};"}}\n' for i in range(12)))
    groups = {"num_generations": 4, "max_pending_groups": 8}
    live = await service(**distilling(teacher, prompts={"path": str(path)}, groups=groups))
    delivered = await live.collect(48)
    assert {group["prompt_id"] for group in delivered} == {
        f"r{i}#{row}" if row else f"r{i}" for i in range(12) for row in range(4)
    }
    assert (await live.pull(wait_s=5))["status"] == "exhausted"
    assert not live.logged("prompts_wait")


async def test_a_row_of_more_rollouts_than_the_queue_holds_is_refused_at_the_start(
    tmp_path: Path, engine: Engine, teacher: ScriptedTeacher
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "num_generations": 9}\n')
    changes = distilling(teacher, prompts={"path": str(tmp_path / "rows.jsonl")}, groups={"max_pending_groups": 8})
    line = await refused_at_start(tmp_path, engine.url, **changes)
    assert "rows.jsonl:1: num_generations: expected an integer from 1 to 8, got 9" in line


async def test_a_requeued_sample_is_generated_and_read_again(
    engine: Engine, teacher: ScriptedTeacher, service: MakeService
) -> None:
    teacher.script = hold
    live = await service(**distilling(teacher, groups={"max_staleness": 0, "on_stale": "requeue"}))
    await live.submit(prompt("a", 2))
    await until(lambda: teacher.in_flight == 2)
    teacher.script = lambda body: Said()
    await live.bump(1)
    groups = await live.collect(2)
    assert [(group["attempt"], group["policy_version"]) for group in groups] == [(2, 1), (2, 1)]
    for group in groups:
        check_tables(group["samples"][0])
    assert await live.metric(STALE_SAMPLES) == 2
