"""Teachers on real sockets: what is asked of them, their limits, and what becomes of a rollout they fail on."""

from __future__ import annotations

import asyncio
import gzip
import math
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import structlog

from rollout_service.core.model import FinishedRollout, FinishReason, Prompt, ScoreJob, Scores, Turn
from rollout_service.errors import ConfigError
from rollout_service.rewards import RewardScorer
from rollout_service.teachers import TeacherScorer, TeacherSpec
from rollout_service.teachers.teacher import LARGE_ANSWER
from tests.fakes import until
from tests.teacher_script import LIKELY, MODEL, OWN, Said, ScriptedTeacher, refused

FAST = {"timeout_s": 5.0, "max_attempts": 1, "top_k": 2}


@dataclass
class Rewards:
    """Reward functions that say what a test wants."""

    scores: Scores = field(default_factory=lambda: Scores(rewards={"accuracy": [1.0]}))
    hold: asyncio.Event | None = None
    running: bool = False

    async def start(self) -> None:
        self.running = True

    async def stop(self) -> None:
        self.running = False

    async def score(self, job: ScoreJob) -> Scores:
        if self.hold is not None:
            await self.hold.wait()
        return self.scores


@pytest.fixture
async def teacher() -> AsyncIterator[ScriptedTeacher]:
    async with ScriptedTeacher() as teacher:
        yield teacher


@asynccontextmanager
async def scorer(
    *teachers: ScriptedTeacher, rewards: Rewards | None = None, errors: list[str] | None = None, **options: Any
) -> AsyncIterator[TeacherScorer]:
    specs = [TeacherSpec(id=f"t{i}", url=t.url, **{**FAST, **options}) for i, t in enumerate(teachers)]
    said: list[str] = [] if errors is None else errors
    made = TeacherScorer(specs, rewards=rewards or Rewards(), on_error=said.append)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def turn(prompt: Sequence[int], output: Sequence[int]) -> Turn:
    return Turn(
        prompt_ids=array("i", prompt),
        output_ids=array("i", output),
        logprobs=array("f", [-0.5] * len(output)),
        finish_reason=FinishReason.STOP,
        text="x",
        engine="e",
    )


def rollout(*turns: Turn, index: int = 0, **more: Any) -> FinishedRollout:
    return FinishedRollout(index=index, prompt="p", completion="c", turns=turns, **more)


ONE = rollout(turn([11, 12], [21, 22, 23]))


def job(*rollouts: FinishedRollout, **columns: Any) -> ScoreJob:
    prompt = Prompt(prompt_id="p", text="p", columns=columns, num_generations=1)
    return ScoreJob(group_id="g-1", attempt=1, prompt=prompt, rollouts=rollouts or (ONE,))


async def test_the_whole_sample_is_asked_for_and_its_trained_tokens_come_back(teacher: ScriptedTeacher):
    async with scorer(teacher) as scoring:
        scores = await scoring.score(job())
    (asked,) = teacher.asked
    assert asked == {
        "model": MODEL,
        "prompt": [11, 12, 21, 22, 23],
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": 2,
    }
    ((table,),) = scores.teacher
    assert (table.teacher_id, table.columns) == ("t0", 3)
    assert table.ids.tolist() == [22, 23, 21, 23, 24, 22, 24, 25, 23]
    assert table.logprobs.tolist() == [LIKELY, LIKELY - 1, OWN] * 3
    assert (scores.rewards, scores.errors) == ({"accuracy": [1.0]}, {})


async def test_a_rollout_of_several_samples_has_a_table_for_each(teacher: ScriptedTeacher):
    # The answer's last token was rendered in another way: with a threshold above 1 it would become context.
    rewritten = rollout(turn([11, 12], [21, 22]), turn([11, 12, 21, 14], [31]), fork_threshold=0)
    async with scorer(teacher) as scoring:
        ((first, second),) = (await scoring.score(job(rewritten))).teacher
    assert [asked["prompt"] for asked in teacher.asked] == [[11, 12, 21, 22], [11, 12, 21, 14, 31]]
    assert first.ids.tolist()[2::3] == [21, 22]
    assert second.ids.tolist()[2::3] == [31]


async def test_context_between_turns_is_read_but_not_delivered(teacher: ScriptedTeacher):
    tools = rollout(turn([11], [21, 22]), turn([11, 21, 22, 15, 16], [31]))
    async with scorer(teacher) as scoring:
        ((table,),) = (await scoring.score(job(tools))).teacher
    assert teacher.asked[0]["prompt"] == [11, 21, 22, 15, 16, 31]
    assert table.ids.tolist()[2::3] == [21, 22, 31]


async def test_the_row_names_its_teacher_and_each_has_its_own_top_k():
    async with ScriptedTeacher() as one, ScriptedTeacher() as other:
        specs = [TeacherSpec(id="math", url=one.url, top_k=1), TeacherSpec(id="code", url=other.url, top_k=3)]
        scoring = TeacherScorer(specs, rewards=Rewards())
        await scoring.start()
        ((math_table,),) = (await scoring.score(job(teacher_id="math"))).teacher
        ((code_table,),) = (await scoring.score(job(teacher_id="code"))).teacher
        await scoring.stop()
    assert (math_table.teacher_id, math_table.columns) == ("math", 2)
    assert (code_table.teacher_id, code_table.columns) == ("code", 4)
    assert (len(one.asked), len(other.asked)) == (1, 1)


async def test_a_teacher_that_refuses_costs_the_sample_its_table_and_is_asked_once(teacher: ScriptedTeacher):
    teacher.script = lambda body: refused(400, "Token id 21 is out of vocabulary")
    errors: list[str] = []
    async with scorer(teacher, errors=errors, max_attempts=3) as scoring:
        with structlog.testing.capture_logs() as logs:
            scores = await scoring.score(job())
    assert scores.teacher == [None]
    assert scores.errors == {"teacher:t0": "HTTP 400: Token id 21 is out of vocabulary"}
    assert scores.rewards == {"accuracy": [1.0]}
    assert (errors, len(teacher.asked)) == (["t0"], 1)
    (said,) = [entry for entry in logs if entry["event"] == "teacher_failed"]
    assert (said["teacher"], said["group_id"], said["index"]) == ("t0", "g-1", 0)


async def test_a_top_k_beyond_what_the_server_gives_is_explained(teacher: ScriptedTeacher):
    words = "Requested prompt logprobs of 30, which is greater than max allowed: 20"
    teacher.script = lambda body: refused(400, words, param="prompt_logprobs")
    async with scorer(teacher, top_k=30) as scoring:
        scores = await scoring.score(job())
    assert scores.errors["teacher:t0"].endswith("teachers.top_k is 30, the server's own bound is --max-logprobs")


@pytest.mark.parametrize(
    "fault",
    [refused(500), refused(429, **{"Retry-After": "0"}), Said(cut=True), Said(body=b'{"choices": []}'), refused(408)],
    ids=["500", "429", "cut", "bad answer", "408"],
)
async def test_a_passing_fault_is_tried_again(teacher: ScriptedTeacher, fault: Said):
    faults = [fault, fault]
    teacher.script = lambda body: faults.pop() if faults else Said()
    errors: list[str] = []
    async with scorer(teacher, errors=errors, max_attempts=3) as scoring:
        ((table,),) = (await scoring.score(job())).teacher
    assert table.ids.tolist()[2::3] == [21, 22, 23]
    assert (errors, len(teacher.asked)) == ([], 3)


async def test_a_fault_that_does_not_pass_ends_after_max_attempts(teacher: ScriptedTeacher):
    teacher.script = lambda body: refused(503, "loading")
    async with scorer(teacher, max_attempts=2) as scoring:
        scores = await scoring.score(job())
    assert scores.teacher == [None]
    assert scores.errors == {"teacher:t0": "HTTP 503: loading (request 2 of 2)"}
    assert len(teacher.asked) == 2


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (Said(body=b" " * 2**23), "longer than"),
        (Said(body=gzip.compress(b" " * 2**26), headers={"Content-Encoding": "gzip"}), "encoded ('gzip')"),
        (Said(status=307, headers={"Location": "/v1/models"}), "HTTP 307"),
    ],
    ids=["too long", "packed", "redirect"],
)
async def test_an_answer_that_is_no_plain_one_of_bounded_size_is_refused(
    teacher: ScriptedTeacher, said: Said, words: str
):
    teacher.script = lambda body: said
    async with scorer(teacher) as scoring:
        scores = await scoring.score(job())
    assert scores.teacher == [None]
    assert words in scores.errors["teacher:t0"]
    assert teacher.headers[0]["Accept-Encoding"] == "identity"
    assert len(teacher.asked) == 1


async def test_a_slow_answer_is_closed_at_its_deadline(teacher: ScriptedTeacher):
    async def never(body: Any) -> Said:
        await asyncio.Event().wait()
        return Said()

    teacher.script = never
    async with scorer(teacher, timeout_s=0.5) as scoring:
        scores = await scoring.score(job())
        await until(lambda: teacher.left == 1, "the teacher sees the caller leave")
    assert scores.errors == {"teacher:t0": "/v1/completions: no answer in 0.5 s"}


async def test_cancelling_closes_the_connection_to_the_teacher(teacher: ScriptedTeacher):
    async def never(body: Any) -> Said:
        await asyncio.Event().wait()
        return Said()

    teacher.script = never
    async with scorer(teacher) as scoring:
        task = asyncio.create_task(scoring.score(job()))
        await until(lambda: teacher.in_flight == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: teacher.left == 1, "the teacher sees the caller leave")


async def test_no_more_than_max_inflight_requests_are_at_a_teacher(teacher: ScriptedTeacher):
    go = asyncio.Event()

    async def held(body: Any) -> Said:
        await go.wait()
        return Said()

    teacher.script = held
    async with scorer(teacher, max_inflight=3) as scoring:
        tasks = [asyncio.create_task(scoring.score(job())) for _ in range(10)]
        await until(lambda: teacher.in_flight == 3)
        go.set()
        done = await asyncio.gather(*tasks)
    assert all(scores.teacher[0] is not None for scores in done)
    assert (teacher.most_in_flight, len(teacher.asked)) == (3, 10)


async def test_one_rollout_that_fails_costs_no_other(teacher: ScriptedTeacher):
    teacher.script = lambda body: refused(400) if 66 in body["prompt"] else Said()
    rollouts = [rollout(turn([1], [token]), index=i) for i, token in enumerate((33, 66, 44))]
    async with scorer(teacher, rewards=Rewards(Scores(rewards={}))) as scoring:
        tables = (await scoring.score(job(*rollouts))).teacher
    assert [table and table[0].ids.tolist()[2] for table in tables] == [33, None, 44]


async def test_a_sample_that_does_not_fit_the_teacher_fails_without_a_request(teacher: ScriptedTeacher):
    teacher.models = {"data": [{"id": MODEL, "max_model_len": 5}]}
    async with scorer(teacher) as scoring:
        assert (await scoring.score(job(rollout(turn([1], [2, 3, 4]))))).errors == {}
        scores = await scoring.score(job())
    assert scores.teacher == [None]
    assert "a sample of 5 tokens does not fit the teacher, which reads 4" in scores.errors["teacher:t0"]
    assert len(teacher.asked) == 1


async def test_a_large_answer_gives_the_same_table(teacher: ScriptedTeacher):
    output = list(range(100, 600))
    sizes: list[int] = []
    teacher.script = lambda body: Said(change=lambda answer: sizes.append(len(str(answer))))
    async with scorer(teacher) as scoring:
        ((table,),) = (await scoring.score(job(rollout(turn([1], output))))).teacher
    assert sizes[0] > LARGE_ANSWER
    assert table.ids.tolist() == [token for x in output for token in (x + 1, x + 2, x)]
    assert math.fsum(table.logprobs) == pytest.approx((LIKELY + LIKELY - 1 + OWN) * len(output))


async def test_an_api_key_is_sent_to_the_teacher_and_to_nobody_else(teacher: ScriptedTeacher):
    teacher.script = lambda body: refused(400)
    async with scorer(teacher, api_key="s3cret") as scoring:
        scores = await scoring.score(job())
    assert teacher.headers[0]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in str(scores.errors)
    assert "s3cret" not in repr(TeacherSpec(id="t", url=teacher.url, api_key="s3cret"))


async def test_a_teacher_that_is_down_at_the_start_is_used_once_it_is_there(teacher: ScriptedTeacher):
    await teacher.stop()
    async with scorer(teacher) as scoring:
        scores = await scoring.score(job())
        assert scores.teacher == [None]
        assert "/v1/models" in scores.errors["teacher:t0"]
        await teacher.start()
        ((table,),) = (await scoring.score(job())).teacher
    assert table.columns == 3


async def test_a_teacher_that_comes_up_with_the_wrong_model_fails_every_sample(teacher: ScriptedTeacher):
    await teacher.stop()
    async with scorer(teacher, model="huge") as scoring:
        await teacher.start()
        scores = await scoring.score(job())
    assert scores.errors["teacher:t0"].endswith("does not serve model 'huge'; it serves 'big'")


async def test_a_teacher_started_again_with_another_model_is_asked_for_that(teacher: ScriptedTeacher):
    async with scorer(teacher, max_attempts=1) as scoring:
        teacher.models = {"data": [{"id": "bigger", "max_model_len": 4096}]}
        teacher.script = lambda body: Said() if body["model"] == "bigger" else refused(404, "no such model")
        assert (await scoring.score(job())).teacher == [None]
        ((table,),) = (await scoring.score(job())).teacher
    assert table.columns == 3


@pytest.mark.parametrize(
    ("models", "status", "said"),
    [
        ({"data": [{"id": "other"}]}, 200, "does not serve model 'huge'; it serves 'other'"),
        ({"object": "error"}, 200, "is no OpenAI-compatible server"),
        ({}, 404, "refuses GET /v1/models: HTTP 404"),
        ({"error": "Unauthorized"}, 401, "refuses GET /v1/models (api_key_env): HTTP 401: Unauthorized"),
    ],
)
async def test_a_teacher_that_is_wrong_for_the_run_is_refused_at_the_start(
    teacher: ScriptedTeacher, models: Any, status: int, said: str
):
    teacher.models, teacher.models_status = models, status
    rewards = Rewards()
    with pytest.raises(ConfigError, match=r"^teacher http") as caught:
        async with scorer(teacher, model="huge", rewards=rewards):
            pass
    assert said in str(caught.value)
    assert not rewards.running


async def test_a_stored_row_whose_teacher_is_configured_no_more_is_unscored(teacher: ScriptedTeacher):
    errors: list[str] = []
    async with scorer(teacher, errors=errors) as scoring:
        scores = await scoring.score(job(teacher_id="gone"))
    assert scores.errors == {"teacher:gone": "no teacher of this id is configured"}
    assert (scores.teacher, errors, teacher.asked) == ([None], ["gone"], [])


async def test_rewards_and_teacher_are_asked_side_by_side(teacher: ScriptedTeacher):
    hold = asyncio.Event()

    async def meet(body: Any) -> Said:
        hold.set()  # rewards wait for the teacher to be asked: one after the other they would never end
        return Said()

    teacher.script = meet
    async with scorer(teacher, rewards=Rewards(hold=hold)) as scoring, asyncio.timeout(10):
        scores = await scoring.score(job())
    assert scores.rewards == {"accuracy": [1.0]}
    assert scores.teacher[0] is not None


async def test_a_reward_that_was_cancelled_or_failed_keeps_its_place_beside_the_table(teacher: ScriptedTeacher):
    said = Scores(rewards={"accuracy": [None]}, errors={"accuracy": "boom"}, cancelled="accuracy: stop")
    async with scorer(teacher, rewards=Rewards(said)) as scoring:
        scores = await scoring.score(job())
    assert (scores.errors, scores.cancelled) == ({"accuracy": "boom"}, "accuracy: stop")
    assert scores.teacher[0] is not None


async def test_without_any_reward_the_teacher_alone_scores(teacher: ScriptedTeacher):
    specs = [TeacherSpec(id="t", url=teacher.url, top_k=2)]
    scoring = TeacherScorer(specs, rewards=RewardScorer([], processes=1))
    await scoring.start()
    scores = await scoring.score(job())
    await scoring.stop()
    assert scores.rewards == {}
    assert scores.teacher[0] is not None


async def test_stopping_ends_scoring_under_way_as_a_cancellation(teacher: ScriptedTeacher):
    async def never(body: Any) -> Said:
        await asyncio.Event().wait()
        return Said()

    teacher.script = never
    errors: list[str] = []
    async with scorer(teacher, errors=errors) as scoring:
        task = asyncio.create_task(scoring.score(job()))
        await until(lambda: teacher.in_flight == 1)
        await scoring.stop()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert errors == []
