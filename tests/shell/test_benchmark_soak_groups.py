"""The soak of a million groups in its small form, and that it would notice what grows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak_groups import Line, grown, soak

FLAT = Line(
    groups=0,
    per_s=1000.0,
    resident=90 * 2**20,
    objects=100_000,
    lease_ms=20.0,
    lease_p99_ms=40.0,
    ack_ms=10.0,
    stored=2**30,
)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_twenty_thousand_groups_leave_nothing_behind(tmp_path: Path) -> None:
    lines: list[Line] = []
    found = soak(20_000, 1_000, lines.append, parent=tmp_path)
    assert found == lines
    assert lines[-1].groups == 20_000, "each acked once, none lost"
    # The times of a loaded test machine say nothing; what is kept does.
    assert grown([replace(line, lease_ms=1.0, ack_ms=1.0) for line in lines]) == []
    second, last = (max(line.objects for line in part) for part in (lines[5:10], lines[-5:]))
    assert last < second + 5_000, "ten thousand groups later, not even one object for two of them more"
    assert not list(tmp_path.iterdir()), "the folder of the run is gone"


def test_what_is_flat_is_not_called_grown() -> None:
    first = replace(FLAT, resident=40 * 2**20, lease_ms=2.0)
    assert grown([first] * 5 + [FLAT] * 15) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"resident": 104 * 2**20}, "memory"),
        ({"lease_ms": 31.0}, "lease"),
        ({"ack_ms": 15.5}, "ack"),
    ],
)
def test_what_grew_between_the_second_and_the_last_quarter_is_named(change: dict[str, float], words: str) -> None:
    lines = [FLAT] * 15 + [replace(FLAT, **change)] * 5  # type: ignore[arg-type]  # fields of several types
    (found,) = grown(lines)
    assert words in found


def test_a_page_cache_that_still_fills_is_no_leak_and_a_full_one_excuses_nothing() -> None:
    filling = [replace(FLAT, stored=10 * 2**20)] * 10 + [replace(FLAT, stored=30 * 2**20, resident=108 * 2**20)] * 10
    assert grown(filling) == []
    full = [FLAT] * 10 + [replace(FLAT, resident=108 * 2**20)] * 10
    assert len(grown(full)) == 1


def test_too_few_lines_to_judge_are_refused() -> None:
    with pytest.raises(ValueError, match="quarters"):
        grown([FLAT] * 3)
