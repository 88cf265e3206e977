"""SIGKILL, SIGSTOP and a database that goes away, at moments nobody chose."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.durability.lives import Lives
from tests.postgres_cluster import Cluster
from tests.replicas_chaos.random_kills import die_at_random

SEED = int(os.environ.get("DURABILITY_SEED", "0"))
KILLS = 30


@pytest.mark.timeout(400)
async def test_thirty_kills_among_three_replicas_lose_nothing_and_deliver_nothing_after_its_ack(
    herd: list[Lives], postgres: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    story, ended, identity = await die_at_random(herd, tmp_path, postgres, seed=SEED, kills=KILLS)
    with capsys.disabled():
        print(f"\n{dict(ended)}; {identity}; {story.tally()}\n{story.verdict()}")
    assert story.kills == KILLS
    assert story.history.lost == []
    assert story.history.duplicated == []
    assert story.taken > 0, "claims were taken over"
