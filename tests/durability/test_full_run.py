"""What is acked in the end is what was submitted but for what was reported otherwise, to the last group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.durability.full_run import KILLS, losses, plan_of, run
from tests.durability.lives import Lives

SEED = int(os.environ.get("DURABILITY_SEED", "0"))
PROMPTS = 200


async def test_the_acked_prompts_are_the_submitted_ones_minus_those_reported_stale_dropped_or_failed(
    lives: Lives, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plan = plan_of(seed=SEED, prompts=PROMPTS, retryable_only=False)
    story, ended = await run(lives, tmp_path, plan)
    with capsys.disabled():
        print(f"\n{dict(ended)}; {story.tally()}; answers: {losses(story)}")
    assert story.kills == KILLS
    assert story.history.lost == story.history.duplicated == []
    assert sum(ended.values()) == PROMPTS
    assert len(story.history.acked) == PROMPTS - ended["stale"] - ended["dropped"] - ended["failed"]
    assert ended["acked"] > 0


async def test_with_faults_that_can_be_retried_and_no_staleness_every_prompt_is_acked(
    lives: Lives, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plan = plan_of(seed=SEED + 1, prompts=PROMPTS, retryable_only=True)
    story, ended = await run(lives, tmp_path, plan)
    with capsys.disabled():
        print(f"\n{dict(ended)}; {story.tally()}; answers: {losses(story)}")
    assert story.history.lost == story.history.duplicated == []
    assert ended == {"acked": PROMPTS}
    assert set(story.history.acked) == set(story.history.prompts.values())
