"""The staleness simulation: its accounts, and what must be so whatever the figures are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.staleness import STALENESS, TRAINERS, draw, row, settings, table, write
from benchmarks.staleness_world import Setting, Tally, World, simulate
from rollout_service.core.group import OnStale
from rollout_service.core.model import GroupState
from rollout_service.core.scheduler import Admission

SMALL = Setting(
    max_staleness=1,
    step_s=2.0,
    groups_per_step=4,
    num_generations=4,
    slots=32,
    max_num_seqs=32,
    max_ready_groups=16,
    scoring_s=0.1,
    mean_tokens=100,
    max_tokens=400,
    tokens_per_s=80.0,
    batch_half=16.0,
)
"""A run of seconds, not minutes, with work that goes stale, partly dispatched groups among it."""


@pytest.mark.parametrize("admission", list(Admission))
@pytest.mark.parametrize("on_stale", list(OnStale))
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_every_decoded_token_is_trained_wasted_held_or_in_flight(
    admission: Admission, on_stale: OnStale, max_staleness: int
) -> None:
    world = World(replace(SMALL, admission=admission, on_stale=on_stale, max_staleness=max_staleness))
    for end in (3.0, 20.0, 61.0):
        world.run_until(end)
        tally = world.tally
        assert tally.decoded == tally.trained + tally.wasted + world.held, "of all rollouts that have ended"
        assert 0 < tally.decoded + world.in_flight <= world.setting.tokens_per_s * world.setting.batch_half * end
        counts = world.core.counts
        assert counts.submitted == sum(counts.groups.values())
        assert counts.groups[GroupState.ACKED] == tally.steps * world.setting.groups_per_step
        assert tally.seconds == pytest.approx(end)


def test_the_same_setting_gives_the_same_run() -> None:
    first, second, other = (
        simulate(setting, warm_up_s=10, window_s=60) for setting in (SMALL, SMALL, replace(SMALL, seed=1))
    )
    assert first == second
    assert first != other


def test_no_group_is_trained_staler_than_the_bound() -> None:
    for bound in (0, 2):
        tally = simulate(replace(SMALL, max_staleness=bound), warm_up_s=10, window_s=60)
        assert tally.groups
        assert tally.mean_staleness <= bound


def test_pace_at_staleness_0_wastes_nothing_and_waits_instead() -> None:
    bound_0 = replace(SMALL, max_staleness=0, admission=Admission.PACE)
    paced = simulate(bound_0, warm_up_s=10, window_s=120)
    free = simulate(replace(bound_0, admission=Admission.SLOTS), warm_up_s=10, window_s=120)
    assert paced.wasted == 0
    assert free.wasted_share > 0.3
    assert paced.busy < free.busy


def test_requeue_loses_fewer_prompts_than_drop() -> None:
    drop = simulate(SMALL, warm_up_s=10, window_s=120)
    requeue = simulate(replace(SMALL, on_stale=OnStale.REQUEUE), warm_up_s=10, window_s=120)
    assert drop.lost > requeue.lost


def test_the_table_the_figures_and_the_picture_have_every_setting(tmp_path: Path) -> None:
    tally = Tally(seconds=10, decoded=200, trained=150, wasted=50, steps=2, groups=8, rollouts=32, asked=400, opened=40)
    rows = [row(trainer, setting, tally) for trainer, setting in settings()]
    assert len(set(rows)) == len(TRAINERS) * len(Admission) * len(OnStale) * len(STALENESS)
    lines = list(table(rows))
    assert len(lines) == 1 + len(rows)
    assert "25.0%" in lines[1], "wasted of decoded"
    assert len(json.loads(write(rows, tmp_path).read_text())) == len(rows)
    assert draw(rows, tmp_path).read_bytes().startswith(b"\x89PNG")
