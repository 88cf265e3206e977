"""What is said of a refused value or key, whatever its size."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from rollout_service.settings.problems import MAX_READ, MAX_SHOWN, dotted, near, shown

LONG = "k" * 4_000_000
ESCAPED = "\0" + LONG


@pytest.mark.parametrize(
    "say",
    [lambda: near(LONG, ["max_groups"]), lambda: shown(LONG), lambda: shown(ESCAPED), lambda: dotted(["a", LONG])],
    ids=["near", "shown", "shown escaped", "dotted"],
)
def test_nothing_is_kept_of_a_long_one_but_what_is_said(say: Callable[[], str]):
    tracemalloc.start()
    try:
        said = say()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(said) < 3 * MAX_SHOWN
    assert peak < 1_000_000


def test_a_resembling_key_is_named():
    assert near("max_group", ["max_groups", "lease_s"]) == "; did you mean max_groups?"
    assert near("nothing_alike", ["max_groups"]) == ""


@pytest.mark.parametrize("password", ["hunter2", "hunter2" * MAX_READ])
@pytest.mark.parametrize("before", [0, MAX_READ - 10])
def test_credentials_are_never_shown_even_where_their_end_was_not_read(password: str, before: int):
    said = shown("x" * before + f"//user:{password}@host")
    assert "hunter2" not in said
    assert "user" not in said


def test_what_is_short_is_shown_whole():
    assert shown("//user:pass@host/path") == '"//***@host/path"'
    assert shown("a\nb") == r'"a\nb"'
    assert dotted(["engines", 0, "url"]) == "engines[0].url"
    assert dotted(["k" * 100]) == "k" * MAX_SHOWN + "…"
