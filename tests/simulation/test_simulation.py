"""Five hundred runs of the whole service on a virtual clock, each drawn from its seed, and reproducible from it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import structlog

from tests.simulation.world import FAULTS, simulate

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "500"))
FIRST = int(os.environ.get("SIMULATION_FIRST_SEED", "0"))
DRAWN_IN = 50
"""Each kind of fault must be met in at least this many of the runs, or they prove nothing about it."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Runs full of faults log every one of them."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    yield
    structlog.configure(**before)


@pytest.mark.timeout(600)
def test_whatever_fails_every_prompt_ends_once_and_nothing_is_lost_or_delivered_twice(
    capsys: pytest.CaptureFixture[str],
):
    met: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + SEEDS):
        try:
            world = simulate(seed)
        except BaseException as error:
            pytest.fail(f"seed {seed} (SIMULATION_FIRST_SEED={seed} SIMULATION_SEEDS=1): {error!r}", pytrace=True)
        met.update(fault for fault, times in world.met.items() if times)
    with capsys.disabled():
        print(f"\nsimulation: {SEEDS} seeds; runs that met each fault: {dict(met.most_common())}")
    if SEEDS >= 500:
        assert {fault: met[fault] for fault in FAULTS if met[fault] < DRAWN_IN} == {}


@pytest.mark.parametrize("seed", [3, 17, 101])
def test_a_seed_gives_the_same_run_again(seed: int):
    first, second = simulate(seed), simulate(seed)
    assert first.trace
    assert first.trace == second.trace
    assert first.history == second.history
