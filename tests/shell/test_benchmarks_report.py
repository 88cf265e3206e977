"""Figures of the benchmarks: what the table and the file say of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.report import Figure, alternate, at_least, at_most, below, percentile, table, write
from benchmarks.trainer import quantile


@pytest.mark.parametrize(
    ("goal", "value", "reached"),
    [
        (at_least(0.95), 0.95, True),
        (at_least(0.95), 0.949, False),
        (at_most(2), 2, True),
        (at_most(2), 2.01, False),
        (below(50), 50, False),
        (below(50), 49.9, True),
        (below(50), math.nan, False),
        (at_least(50), math.nan, False),
    ],
)
def test_a_goal_is_reached_on_its_own_side_only_and_never_by_nan(goal: object, value: float, reached: bool) -> None:
    assert Figure(key="k", what="w", value=value, goal=goal).reached is reached  # type: ignore[arg-type]  # parametrized


def test_a_missed_goal_shows_in_the_table_and_a_figure_without_one_says_nothing() -> None:
    lines = table(
        [
            Figure(key="a", what="one", value=0.5, unit="%", goal=at_least(0.95), note="why"),
            Figure(key="b", what="two", value=1234.5, unit="/s"),
        ]
    ).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == ["one [1]", "50.00 %", "", "≥ 95.00 %", "NO"]
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == ["two", "1,234/s", "", "", ""]
    assert lines[4] == "[1] why"


def test_a_part_that_is_measured_again_leaves_the_other_figures_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    missed = Figure(key="a", what="one", value=1.0, goal=below(1), runs=(1.0, 2.0))
    write([missed, Figure(key="b", what="two", value=2.0)], path, rounds=2, quick=False)
    assert json.loads(path.read_text())["unreached"] == ["a"]
    write([Figure(key="a", what="one", value=0.5, goal=below(1), runs=(0.5,))], path, rounds=1, quick=True)
    content = json.loads(path.read_text())
    assert (content["a"], content["b"], content["unreached"]) == (0.5, 2.0, [])
    assert content["runs"] == {"a": [0.5], "b": []}


def test_ways_take_turns_and_every_second_round_runs_backwards() -> None:
    order: list[str] = []
    ways = {name: (lambda name=name: order.append(name)) for name in "ab"}  # type: ignore[misc]  # bound at once
    alternate(3, ways)
    assert order == ["a", "b", "b", "a", "a", "b"]


def test_the_percentile_is_a_value_that_was_seen() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([7.0], 0.99) == 7.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_the_lag_of_a_window_leaves_out_what_came_before_it() -> None:
    before = {0.01: 0.0, 0.05: 10.0, math.inf: 100.0}
    after = {0.01: 90.0, 0.05: 110.0, math.inf: 200.0}
    assert quantile(before, after, 0.5) == pytest.approx(0.01 * 50 / 90)
    assert quantile(before, after, 0.95) == pytest.approx(0.01 + 0.04 * 5 / 10)
    assert math.isnan(quantile(before, before, 0.5))
