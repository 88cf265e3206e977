"""SIGKILL at moments nobody chose: while a life starts, works, or is told nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.durability.lives import Lives
from tests.durability.random_kills import die_at_random

SEED = int(os.environ.get("DURABILITY_SEED", "0"))
KILLS = 30


@pytest.mark.timeout(300)
async def test_thirty_kills_at_any_moment_lose_nothing_and_deliver_nothing_after_its_ack(
    lives: Lives, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    story = await die_at_random(lives, tmp_path, seed=SEED, kills=KILLS)
    with capsys.disabled():
        print(f"\n{story.tally()}\n{story.verdict()}")
    assert story.kills == KILLS
    assert story.history.lost == []
    assert story.history.duplicated == []
