"""What rewards read, and how several of them, sync and async, make the scores of a group."""

import asyncio
import os
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import uvloop
from reward_samples import FOLDER, job, told_pid, turn, until
from structlog.testing import capture_logs

from rollout_service.core.model import FinishedRollout, Prompt, ScoreJob, Scores
from rollout_service.errors import ConfigError
from rollout_service.rewards import RewardScorer, RewardSpec

Start = Callable[..., Awaitable[RewardScorer]]
MESSAGES = [{"role": "user", "content": "What?"}]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    scorers = []

    async def make(*functions: str, timeout_s: float = 30.0, **more: object):
        specs = [RewardSpec(name=f, function=f"reward_samples:{f}", timeout_s=timeout_s) for f in functions]
        scorer = RewardScorer(specs, processes=2, **{"path": [FOLDER], **more})
        scorers.append(scorer)
        await scorer.start()
        return scorer

    yield make
    for scorer in scorers:
        await scorer.stop()


def extra() -> dict[str, object]:
    return {"tags": ["a"], "big": 2**100, "small": -(2**70), "f": 0.5, "none": None}


async def test_every_field_and_column_is_aligned_with_the_survivors_and_belongs_to_its_row(start: Start) -> None:
    scorer = await start("aligned")
    completions = [[{"role": "assistant", "content": f"c{i}"}] for i in range(3)]
    group = job(*completions, prompt=MESSAGES, answer="42", extra=extra())
    assert await scorer.score(group) == Scores(rewards={"aligned": [1.0, 1.0, 1.0]})
    assert group.prompt.columns["extra"] == extra()


async def test_completion_ids_are_what_the_policy_generated_in_all_turns(start: Start) -> None:
    scorer = await start("all_turns")
    rollouts = [FinishedRollout(index=0, prompt=None, completion="x", turns=[turn([1, 2]), turn([30])])]
    prompt = Prompt(prompt_id="p", token_ids=array("i", [5]), num_generations=1)
    scores = await scorer.score(ScoreJob(group_id="g", attempt=1, prompt=prompt, rollouts=rollouts))
    assert scores.rewards == {"all_turns": [33.0]}
    assert rollouts[0].turns[0].output_ids.tolist() == [1, 2]


async def test_a_function_without_kwargs_gets_the_columns_it_names(start: Start) -> None:
    scorer = await start("narrow")
    assert await scorer.score(job("a", "b", answer="42", other=1)) == Scores(rewards={"narrow": [2.0, 2.0]})
    scores = await scorer.score(job("a", other=1))
    assert "missing 1 required positional argument: 'answer'" in scores.errors["narrow"]


async def test_a_column_named_like_a_field_is_left_out_with_one_warning(start: Start) -> None:
    scorer = await start("said")
    with capture_logs() as logs:
        for _ in range(2):
            assert await scorer.score(job("0.5", "1", completions="mine")) == Scores(rewards={"said": [0.5, 1.0]})
    assert [(log["event"], log["column"]) for log in logs] == [("reward_column_left_out", "completions")]


async def test_none_nan_and_infinities_are_not_scored(start: Start) -> None:
    scorer = await start("said")
    scores = await scorer.score(job("0.5", "None", "nan", "inf", "-inf", "-2"))
    assert scores == Scores(rewards={"said": [0.5, None, None, None, None, -2.0]})


async def test_a_column_that_cannot_be_encoded_fails_the_group_and_no_other(start: Start) -> None:
    scorer = await start("said")
    scores = await scorer.score(job("0.5", answer="\ud800"))
    assert scores.rewards == {"said": [None]}
    assert "UnicodeEncodeError" in scores.errors["said"]
    assert await scorer.score(job("0.5")) == Scores(rewards={"said": [0.5]})


async def test_several_rewards_run_at_the_same_time_and_fail_alone(start: Start, tmp_path: Path) -> None:
    errors: list[str] = []
    scorer = await start("misbehave", "later", "short", "said", on_error=errors.append)
    touch, go = tmp_path / "touch", tmp_path / "go"
    task = asyncio.create_task(scorer.score(job("0.5", "1", mode="wait", touch=str(touch), go=str(go))))
    await until(lambda: errors == [] and told_pid(touch))
    go.touch()
    scores = await task
    own = float(os.getpid())
    assert scores.rewards == {
        "misbehave": [1.0, 1.0], "later": [own, own], "short": [None, None], "said": [0.5, 1.0],
    }  # fmt: skip
    assert scores.errors == {"short": "returned 1 rewards for 2 completions"}
    assert errors == ["short"]


async def test_async_functions_run_in_the_service_and_plain_ones_that_give_coroutines_in_a_worker(start: Start) -> None:
    scorer = await start("later", "wrapped", "judge")
    scores = await scorer.score(job("a", mode="fine"))
    assert scores.errors == {}
    assert scores.rewards["later"] == [float(os.getpid())]
    assert scores.rewards["wrapped"] not in ([None], [float(os.getpid())])
    assert scores.rewards["judge"] == [2.0]


async def test_an_async_function_cannot_change_what_the_service_delivers(start: Start) -> None:
    scorer = await start("later")
    group = job("a", "b", mode="change", extra=extra())
    assert (await scorer.score(group)).errors == {}
    assert group.prompt.columns["extra"] == extra()


async def test_an_async_function_that_hangs_times_out_even_if_it_refuses_to_be_cancelled(
    start: Start, tmp_path: Path
) -> None:
    scorer = await start("later", timeout_s=0.2)
    refused = tmp_path / "refused"
    for mode in ("hang", "stubborn"):
        scores = await asyncio.wait_for(scorer.score(job("a", mode=mode, refused=str(refused))), 5)
        assert scores == Scores(rewards={"later": [None]}, errors={"later": "timed out after 0.2 s"})
    await until(refused.exists)


async def test_an_async_exception_is_logged_with_its_traceback(start: Start) -> None:
    scorer = await start("later")
    with capture_logs() as logs:
        scores = await scorer.score(job("a", mode="raise"))
    assert scores == Scores(rewards={"later": [None]}, errors={"later": "ValueError: async went wrong"})
    assert "reward_samples.py" in logs[0]["traceback"]


@pytest.mark.parametrize("mode", ["cancel", "cancel-self"])
async def test_a_cancellation_raised_by_async_user_code_is_not_ours(start: Start, mode: str) -> None:
    scorer = await start("later", "said")
    scores = await scorer.score(job("0.5", mode=mode))
    assert scores.cancelled is not None
    assert scores.cancelled.startswith("later: ")
    assert scores.rewards == {"later": [None], "said": [0.5]}
    assert scores.errors == {}


async def test_cancelling_score_cancels_async_functions(start: Start, tmp_path: Path) -> None:
    scorer = await start("later")
    touch, refused = tmp_path / "touch", tmp_path / "refused"
    task = asyncio.create_task(scorer.score(job("a", mode="stubborn", touch=str(touch), refused=str(refused))))
    await until(lambda: told_pid(touch))
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()
    await until(refused.exists)


async def test_stop_does_not_look_like_a_failed_or_cancelled_reward(start: Start, tmp_path: Path) -> None:
    errors: list[str] = []
    scorer = await start("later", "misbehave", on_error=errors.append)
    touch = tmp_path / "touch"
    task = asyncio.create_task(scorer.score(job("a", mode="hang", touch=str(touch))))
    await until(lambda: told_pid(touch))
    await scorer.stop()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()
    assert errors == []


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere:f", "no module named 'nowhere' (looked in FOLDER, sys.path)"),
        ("reward_samples.sub:f", "no module named 'reward_samples.sub' (looked in FOLDER, sys.path)"),
        ("sample:missing", "module sample (FOLDER/sample.py) has no function 'missing'"),
        ("sample:NUMBER", "'NUMBER' in module sample (FOLDER/sample.py) is not a function"),
        ("raises:f", "importing module raises raised ZeroDivisionError: division by zero (FOLDER/raises.py, line 2)"),
        ("exits:f", "importing module exits raised SystemExit: 3 (FOLDER/exits.py, line 1)"),
        ("needs:f", "importing module needs raised ModuleNotFoundError: No module named 'absent' (FOLDER/needs.py, "),
        ("syntax:f", "importing module syntax raised SyntaxError: unmatched ']' (FOLDER/syntax.py, line 2)"),
        ("sample", 'function "sample" is not of the form package.module:function'),
    ],
)
async def test_what_cannot_be_imported_is_one_line_that_says_what_and_where(
    tmp_path: Path, target: str, message: str
) -> None:
    (tmp_path / "sample.py").write_text("NUMBER = 1\n")
    (tmp_path / "reward_samples.py").write_text("")
    (tmp_path / "raises.py").write_text("def f(): pass\n1 / 0\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "needs.py").write_text("import absent\n")
    (tmp_path / "syntax.py").write_text("def f():\n    return ]\n")
    scorer = RewardScorer([RewardSpec(name="acc", function=target)], processes=1, path=[str(tmp_path)])
    with pytest.raises(ConfigError) as caught:
        await scorer.start()
    line = str(caught.value)
    assert line.startswith('reward "acc": ')
    assert message.replace("FOLDER", str(tmp_path)) in line
    assert "\n" not in line


def test_a_reward_is_a_function_or_a_url_and_its_name_its_own() -> None:
    with pytest.raises(ConfigError, match="either function or url"):
        RewardSpec(name="both", function="a:b", url="http://judge")
    with pytest.raises(ConfigError, match="either function or url"):
        RewardSpec(name="neither")
    twice = [RewardSpec(name="same", function="a:b"), RewardSpec(name="same", function="c:d")]
    with pytest.raises(ConfigError, match='reward "same" is there twice'):
        RewardScorer(twice, processes=1)


async def test_trl_accuracy_reward_runs_unmodified() -> None:
    pytest.importorskip("trl.rewards", reason="trl is not installed")
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    spec = RewardSpec(name="accuracy", function="trl.rewards:accuracy_reward", timeout_s=60)
    scorer = RewardScorer([spec], processes=1)
    await scorer.start()
    try:
        answers = [r"It is \boxed{\frac{1}{3}}", r"It is \boxed{\frac{1}{2}}", "no idea"]
        completions = [[{"role": "assistant", "content": answer}] for answer in answers]
        group = job(*completions, prompt=MESSAGES, solution=r"$\frac{2}{6}$", level=3)
        assert await scorer.score(group) == Scores(rewards={"accuracy": [1.0, 0.0, 0.0]})
        unparseable = job(*completions, prompt=MESSAGES, solution="")
        assert await scorer.score(unparseable) == Scores(rewards={"accuracy": [None, None, None]})
    finally:
        await scorer.stop()


def test_scoring_works_on_uvloop_with_groups_larger_than_a_socket_buffer() -> None:
    async def main() -> Scores:
        scorer = RewardScorer([RewardSpec(name="ids", function="reward_samples:all_turns")], processes=1, path=[FOLDER])
        await scorer.start()
        try:
            rollouts = [
                FinishedRollout(index=i, prompt="p", completion="x" * 500_000, turns=[turn([1] * 200_000)])
                for i in range(4)
            ]
            prompt = Prompt(prompt_id="p", text="p", num_generations=4)
            return await scorer.score(ScoreJob(group_id="g", attempt=1, prompt=prompt, rollouts=rollouts))
        finally:
            await scorer.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == Scores(rewards={"ids": [200_000.0] * 4})
