"""How the scaling benchmark judges, and one run of it on a real service."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scaling import SWEEPS, Found, Load, Seen, draw, exponent, growth, read, run, table, write

SEEN = Seen(per_s=399, cpu_ms=0.5, helpers_cpu_ms=0.1, lag_p99_ms=3.0, resident=2**27)


def found(x: float, cpu_ms: float = 0.5) -> Found:
    return Found(x=int(x), asked_per_s=400, median=replace(SEEN, cpu_ms=cpu_ms))


def test_the_asked_rate_does_not_depend_on_what_is_in_flight() -> None:
    rates = {load.in_flight / load.latency_s for load in SWEEPS["in_flight"].loads.values()}
    assert len({round(rate, 6) for rate in rates}) == 1


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_exponent_of_a_power_is_found(power: float) -> None:
    assert exponent([(x, 3 * x**power) for x in (1, 2, 8, 64)]) == pytest.approx(power, abs=1e-9)


def test_growth_looks_where_the_fixed_cost_matters_least() -> None:
    points = [found(x, 1.0 + 0.1 * x) for x in (1, 10, 100, 1000, 10_000, 100_000)]
    assert growth(points) == pytest.approx(1.0, abs=0.05)


def test_a_cost_that_grows_faster_than_allowed_is_said_so() -> None:
    sweep = SWEEPS["in_flight"]
    flat = [found(x) for x in sweep.loads]
    assert "not faster than in proportion" in table(sweep, flat)
    rising = [found(x, x**0.5) for x in sweep.loads]
    assert "FASTER THAN IN PROPORTION" in table(sweep, rising)


def test_figures_are_kept_as_they_were(tmp_path: Path) -> None:
    assert read(tmp_path) == {}
    results = {"length": [found(64), found(256, 0.7)], "in_flight": [found(256)]}
    write(results, tmp_path)
    assert read(tmp_path) == results


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    results = {name: [found(x) for x in sweep.loads] for name, sweep in SWEEPS.items()}
    assert draw(results, tmp_path).read_bytes().startswith(b"\x89PNG")


def test_a_run_on_a_real_service_gives_its_rate_cpu_and_memory() -> None:
    seen = run(Load(in_flight=16, group=2, outstanding=10), 1.0)
    assert seen.per_s > 0
    assert seen.cpu_ms > 0
    assert 2**20 < seen.resident < 2**33
