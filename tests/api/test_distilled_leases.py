"""Distillation over HTTP: one group a rollout, a teacher's tables in both encodings, failures that cost one sample."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from math import inf
from typing import Any

import pytest

from rollout_service.api.binary import MEDIA_TYPE
from rollout_service.core.model import ScoreJob, Scores, TeacherTokens
from rollout_service.settings import EngineSettings, Settings, TeacherSettings
from tests.api.conftest import Service
from tests.fakes import failed, finished, until
from trainer_client.binary import decode_lease


def settings(**tables: Any) -> Settings:
    return Settings(
        mode="distillation",
        engines=[EngineSettings()],
        teachers=[TeacherSettings(id=name, url=f"http://{name}") for name in ("math", "code")],
        **({"groups": {"num_generations": 3}} | tables),
    )


def taught(job: ScoreJob) -> Scores:
    """Two columns a token; the second is filled up."""
    tables = [
        TeacherTokens(
            teacher_id=job.prompt.columns["teacher_id"],
            ids=array("i", [value for token in rollout.turns[0].output_ids for value in (token, -1)]),
            logprobs=array("f", [-0.5, -inf] * len(rollout.turns[0].output_ids)),
            columns=2,
        )
        for rollout in job.rollouts
    ]
    return Scores(rewards={}, teacher=[[table] for table in tables])


@pytest.fixture
async def distilling() -> AsyncIterator[Service]:
    async with Service(settings=settings()).in_process() as service:
        service.runner.answer = lambda job: finished(job.index)
        service.scorer.answer = taught
        yield service


def row(prompt_id: str, teacher_id: str = "math", **more: Any) -> dict[str, Any]:
    return {"prompt_id": prompt_id, "prompt": f"p:{prompt_id};", "columns": {"teacher_id": teacher_id}, **more}


async def submit(service: Service, *rows: dict[str, Any], final: bool = False) -> list[dict[str, str]]:
    answer = await service.post("/prompts", {"prompts": rows, "final": final})
    assert answer.status_code == 202, answer.text
    groups: list[dict[str, str]] = answer.json()["groups"]
    return groups


async def test_a_prompt_is_answered_with_an_entry_for_each_of_its_rollouts(distilling: Service):
    groups = await submit(distilling, row("a"), row("b", num_generations=1), row("c", num_generations=2))
    assert [group["prompt_id"] for group in groups] == ["a", "a#1", "a#2", "b", "c", "c#1"]
    assert [group["group_id"] for group in groups] == [f"g-{seq}" for seq in range(1, 7)]
    looked = (await distilling.http.get("/groups/g-2")).json()
    assert (looked["prompt_id"], looked["num_generations"]) == ("a#1", 1)


async def test_one_rollout_a_prompt_is_enough_in_this_mode(distilling: Service):
    assert (await distilling.post("/prompts", {"prompts": [row("a", num_generations=1)]})).status_code == 202


async def test_tables_come_as_rows_with_null_for_minus_infinity_and_as_tensors(distilling: Service):
    await submit(distilling, row("a", "code", num_generations=1))
    ask = {"max_groups": 1, "wait_s": 10, "request_id": "r"}
    (sample,) = (await distilling.post("/leases", ask)).json()["groups"][0]["samples"]
    assert (sample["teacher_id"], sample["scored"], sample["reward"]) == ("code", True, None)
    assert sample["teacher_topk_ids"] == [[1, -1], [2, -1], [3, -1]]
    assert sample["teacher_topk_logprobs"] == [[-0.5, None]] * 3
    file = await distilling.http.post("/leases", json=ask, headers={"accept": MEDIA_TYPE})
    (decoded,) = decode_lease(file.content).samples
    assert decoded.teacher_topk_ids.tolist() == sample["teacher_topk_ids"]
    assert decoded.teacher_topk_logprobs.tolist() == [[-0.5, -inf]] * 3


async def test_a_teacher_nobody_configured_is_refused_and_nothing_is_taken(distilling: Service):
    answer = await distilling.post("/prompts", {"prompts": [row("a"), row("b", "physics")]})
    assert answer.status_code == 422
    expected = 'prompts[1]: columns.teacher_id: expected the id of a teacher (math, code), got "physics"'
    assert answer.json()["detail"] == expected
    assert (await distilling.http.get("/status")).json()["submitted"] == 0


async def test_more_rollouts_than_the_queue_holds_are_refused():
    limits = {"num_generations": 3, "max_pending_groups": 4}
    async with Service(settings=settings(groups=limits)).in_process() as service:
        for rows in ([row("a", num_generations=5)], [row("a"), row("b")]):
            assert (await service.post("/prompts", {"prompts": rows})).status_code == 422


async def test_a_failed_sample_counts_only_towards_the_unproductive_ones():
    limits = {"num_generations": 3, "halt_after_failed_groups": 1, "halt_after_unproductive_groups": 3}
    async with Service(settings=settings(groups=limits)).in_process() as service:
        service.runner.answer = lambda job: finished(0) if job.prompt.prompt_id == "b" else failed(0)
        service.scorer.answer = taught
        await submit(service, row("a", num_generations=2))
        await until(lambda: service.door.status().counts.groups["failed"] == 2)
        assert service.door.status().halt is None
        await submit(service, row("b", num_generations=1))
        await until(lambda: service.door.status().counts.groups["ready"] == 1)
        await submit(service, row("c", num_generations=2))
        await until(lambda: service.door.status().counts.groups["failed"] == 4)
        assert service.door.status().halt is None, "a sample that was ready begins the count anew"
        await submit(service, row("d", num_generations=1))
        await until(lambda: service.door.status().halt is not None, "halted")


async def test_a_sample_without_its_table_is_dropped_with_the_teachers_words(distilling: Service):
    distilling.scorer.answer = lambda job: Scores(
        rewards={}, errors={"teacher:math": "HTTP 500: ill"}, teacher=[None] * len(job.rollouts)
    )
    ((group),) = await submit(distilling, row("a", num_generations=1))
    await until(lambda: distilling.door.status().counts.groups["dropped"] == 1)
    looked = (await distilling.http.get(f"/groups/{group['group_id']}")).json()
    assert (looked["state"], looked["reason"]) == ("dropped", "unscorable")
    assert "teacher:math: HTTP 500: ill" in str(looked)


async def test_a_lease_is_bounded_by_what_its_tables_take():
    """Tables of top_k 8 make 81 bytes of the 9 that a token has without."""
    few = Service(settings=settings(store={"max_lease_bytes": 9 * 2000}))
    async with few.in_process() as service:
        service.runner.answer = lambda job: finished(job.index)
        service.scorer.answer = taught
        await submit(service, row("a", num_generations=20))
        await until(lambda: service.door.status().counts.groups["ready"] == 20)
        lease = (await service.post("/leases", {"max_groups": 20, "wait_s": 0})).json()
        assert 1 <= len(lease["groups"]) < 20
