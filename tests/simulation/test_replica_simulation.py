"""Runs of several replicas on a virtual clock, each drawn from its seed, and reproducible from it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import structlog

from tests.simulation.replica_world import EVENTS, FAULTS, simulate

SEEDS = int(os.environ.get("REPLICA_SEEDS", "24"))
FIRST = int(os.environ.get("REPLICA_FIRST_SEED", "0"))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Runs full of faults log every one of them."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    yield
    structlog.configure(**before)


@pytest.mark.timeout(3600)
def test_whatever_befalls_replicas_every_prompt_ends_once(capsys: pytest.CaptureFixture[str]):
    met: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + SEEDS):
        try:
            world = simulate(seed)
        except BaseException as error:
            pytest.fail(f"seed {seed} (REPLICA_FIRST_SEED={seed} REPLICA_SEEDS=1): {error!r}", pytrace=True)
        met.update(world.met)
    with capsys.disabled():
        print(f"\nreplicas simulated: {SEEDS} seeds; met: {dict(met.most_common())}")
    if SEEDS >= 24:
        assert {fault: met[fault] for fault in FAULTS if met[fault] < 10} == {}
        assert {event: met[event] for event in EVENTS if met[event] < 2} == {}
