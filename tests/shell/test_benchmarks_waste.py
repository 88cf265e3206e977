"""What the benchmarks of aborts, waste and refill read out of an engine's journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.aborts import last_ends
from benchmarks.engine import Entry, How
from benchmarks.serving import config, decoded, running_at
from benchmarks.waste import FIRST_DIGIT, Story, group_and_attempt, prompt_text, shares
from rollout_service.settings import load_settings


def entry(name: str, started: float, ended: float | None, tokens: int = 100, prompt: str = "[1]") -> Entry:
    return Entry(
        id=name,
        prompt=prompt,
        started=started,
        duration=10.0,
        length=tokens,
        how=How.RUNNING if ended is None else How.CLOSED,
        ended=ended,
        tokens=tokens,
    )


def story(*entries: Entry, bumps: tuple[float, ...], delivered: set[tuple[str, int]]) -> Story:
    return Story(entries=entries, bumps=bumps, delivered=delivered, key=group_and_attempt, started=0.0)


def test_a_request_decodes_evenly_from_its_start_to_its_end() -> None:
    one = entry("g-1.1.0-a", 10.0, 20.0)
    assert decoded(one, 0.0, 30.0) == 100
    assert decoded(one, 12.0, 15.0) == pytest.approx(30)
    assert decoded(one, 20.0, 30.0) == 0


def test_tokens_of_a_request_that_has_not_ended_are_not_guessed() -> None:
    with pytest.raises(ValueError, match="still running"):
        decoded(entry("g-1.1.0-a", 0.0, None), 0.0, 1.0)


def test_a_group_is_stale_from_the_second_version_after_its_first_request() -> None:
    # Version 1 is posted at 3, 2 at 6, 3 at 9: a group of version 1 is stale from 9 on, whenever its rows began.
    told = story(
        entry("g-1.1.0-a", 4.0, 8.0),
        entry("g-1.1.1-b", 7.0, 11.0),
        bumps=(3.0, 6.0, 9.0),
        delivered=set(),
    )
    found = shares(told, 0.0, 20.0)
    assert found.tokens == 200
    assert found.stale == pytest.approx(50 / 200)


def test_another_attempt_of_a_group_has_a_version_of_its_own() -> None:
    told = story(
        entry("g-1.1.0-a", 1.0, 6.0),
        entry("g-1.2.1-b", 7.0, 8.0),
        bumps=(3.0, 6.0),
        delivered={("g-1", 2)},
    )
    found = shares(told, 0.0, 20.0)
    assert found.stale == 0
    assert found.delivered == pytest.approx(0.5)


def test_only_tokens_of_the_window_count() -> None:
    told = story(entry("g-1.1.0-a", 0.0, 10.0), bumps=(1.0, 2.0), delivered={("g-1", 1)})
    found = shares(told, 5.0, 10.0)
    assert found.tokens == pytest.approx(50)
    assert found.stale == 1
    assert found.delivered == 1


def test_a_window_without_tokens_is_no_figure() -> None:
    with pytest.raises(RuntimeError, match="nothing was decoded"):
        shares(story(entry("g-1.1.0-a", 0.0, 1.0), bumps=(), delivered=set()), 5.0, 6.0)


def test_the_digits_of_trls_prompt_are_read_from_its_ids() -> None:
    ids = [259, *(FIRST_DIGIT + digit for digit in (0, 0, 1, 7)), 260]
    assert prompt_text(entry("r1", 0.0, 1.0, prompt=str(ids))) == "0017"


def test_the_last_of_what_ran_at_a_moment_counts_and_nothing_that_came_later() -> None:
    entries = [entry("a", 0.0, 5.01), entry("b", 0.0, 5.03), entry("c", 5.001, 9.0), entry("d", 0.0, 2.0)]
    assert last_ends(entries, [5.0], in_flight=2) == [pytest.approx(30)]


@pytest.mark.parametrize("ended", [None, 4.0])
def test_a_request_that_never_ended_or_was_missing_is_no_figure(ended: float | None) -> None:
    with pytest.raises(RuntimeError, match="of 2 requests"):
        last_ends([entry("a", 0.0, 5.01), entry("b", 0.0, ended)], [5.0], in_flight=2)


def test_busy_slots_are_those_of_requests_that_began_since() -> None:
    entries = [entry("old", 0.0, None), entry("new", 5.1, None), entry("over", 5.1, 5.2), entry("late", 5.3, None)]
    assert running_at(entries, 5.25, since=5.0) == 1
    assert running_at(entries, 5.25) == 2


def test_the_configuration_of_a_benchmark_is_one_the_service_takes(tmp_path: Path) -> None:
    path = tmp_path / "bench.toml"
    path.write_text(config("http://127.0.0.1:1", {"groups": {"max_staleness": 0}, "dispatch": {"admission": "slots"}}))
    settings = load_settings(path)
    assert settings.groups.max_staleness == 0
    assert settings.groups.num_generations == 8
    assert settings.rewards[0].function == "bench_rewards:brevity"
