"""Turns to training rows: what is trained is what was sampled, once, in the context it was sampled in."""

from __future__ import annotations

import itertools
from array import array

from hypothesis import given
from hypothesis import strategies as st

from rollout_service.core.model import FinishReason, Turn
from rollout_service.core.sequences import TokenSequence, token_sequences

IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)


def turn(prompt: list[int], output: list[int]) -> Turn:
    return Turn(
        prompt_ids=array("i", prompt),
        output_ids=array("i", output),
        logprobs=array("f", [-0.125 * (i + 1) for i in range(len(output))]),
        finish_reason=FinishReason.STOP,
        text="",
        engine="e",
    )


def test_one_turn_is_context_and_then_trained_tokens():
    (row,) = token_sequences([turn([5, 6], [7, 8, 9])])
    assert row.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert list(row.completion_mask) == [0, 0, 1, 1, 1]
    assert row.old_log_probs.tolist() == [0.0, 0.0, -0.125, -0.25, -0.375]


def test_a_further_turn_that_keeps_history_extends_the_row():
    (row,) = token_sequences([turn([5], [7]), turn([5, 7, 6], [8])])
    assert row.input_ids.tolist() == [5, 7, 6, 8]
    assert list(row.completion_mask) == [0, 1, 0, 1]


def test_small_drift_in_the_last_answer_is_realigned_as_context_and_the_row_goes_on():
    """The template renders the answer [7, 8, 9] as [7, 30]: 8 and 9 are trained nowhere, 30 is context."""
    (row,) = token_sequences([turn([5], [7, 8, 9]), turn([5, 7, 30, 6], [10])])
    assert row.input_ids.tolist() == [5, 7, 30, 6, 10]
    assert list(row.completion_mask) == [0, 1, 0, 0, 1]
    assert row.old_log_probs.tolist() == [0.0, -0.125, 0.0, 0.0, -0.125]


def test_drift_of_the_threshold_or_more_starts_a_row_of_its_own():
    turns = [turn([5], [7, 8, 9]), turn([5, 7, 30, 6], [10])]
    assert len(token_sequences(turns, fork_threshold=3)) == 1
    rows = token_sequences(turns, fork_threshold=2)
    assert [row.input_ids.tolist() for row in rows] == [[5, 7, 8, 9], [5, 7, 30, 6, 10]]
    assert [list(row.completion_mask) for row in rows] == [[0, 1, 1, 1], [0, 0, 0, 0, 1]]


def test_a_rewrite_before_the_last_answer_starts_a_row_of_its_own_however_small():
    rows = token_sequences([turn([5], [7]), turn([5, 7, 6], [8]), turn([5, 99, 6, 8, 4], [9])])
    assert [list(row.completion_mask) for row in rows] == [[0, 1, 0, 1], [0, 0, 0, 0, 0, 1]]


def test_a_prompt_that_is_cut_back_behind_the_last_answer_realigns_too():
    (row,) = token_sequences([turn([5], [7, 8]), turn([5, 7], [9])])
    assert row.input_ids.tolist() == [5, 7, 9]
    assert list(row.completion_mask) == [0, 1, 1]


def test_an_answer_that_was_replaced_whole_leaves_no_empty_row_behind():
    rows = token_sequences([turn([5], [7]), turn([5, 9, 6], [8]), turn([1], [2])], fork_threshold=8)
    assert [row.input_ids.tolist() for row in rows] == [[5, 9, 6, 8], [1, 2]]


def test_long_rows_find_the_first_difference():
    history = list(range(5000))
    rows = token_sequences([turn(history, [1, 2, 3]), turn([*history, 1, 7, 8], [4])])
    assert rows[0].input_ids.tolist() == [*history, 1, 7, 8, 4]
    assert rows[0].trained == 2


def trained_of(rows: tuple[TokenSequence, ...]) -> list[tuple[int, float]]:
    return [
        (token, logprob)
        for row in rows
        for token, logprob, mask in zip(row.input_ids, row.old_log_probs, row.completion_mask, strict=True)
        if mask
    ]


def check_shapes(rows: tuple[TokenSequence, ...]) -> None:
    for row in rows:
        assert len(row.input_ids) == len(row.completion_mask) == len(row.old_log_probs)
        assert all(value == 0.0 for value, mask in zip(row.old_log_probs, row.completion_mask, strict=True) if not mask)


@given(turns=st.lists(st.tuples(IDS, IDS), min_size=1, max_size=4))
def test_with_history_kept_everything_sampled_is_trained_once_in_one_row(turns: list[tuple[list[int], list[int]]]):
    history: list[int] = []
    made = []
    for context, output in turns:
        prompt = history + context
        made.append(turn(prompt, output))
        history = prompt + output
    rows = token_sequences(made)
    check_shapes(rows)
    assert len(rows) == 1
    assert trained_of(rows) == [pair for t in made for pair in zip(t.output_ids, t.logprobs, strict=True)]


@given(
    turns=st.lists(
        st.tuples(IDS, st.integers(1, 6), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=3)),
        min_size=1,
        max_size=6,
    ),
    threshold=st.integers(0, 6),
)
def test_under_templates_that_rewrite_no_token_is_trained_that_was_not_sampled_and_none_twice(
    turns: list[tuple[list[int], int, list[tuple[int, int]]]], threshold: int
):
    """Sampled tokens are numbered, so that each is one of a kind; edits change, drop or add tokens of the history."""
    history: list[int] = []
    made: list[Turn] = []
    fresh = itertools.count(1_000)
    for context, count, edits in turns:
        rendered = list(history)
        for place, kind in edits:
            if rendered:
                at = place % len(rendered)
                rendered[at : at + (kind < 2)] = [place] * (kind != 1)
        output = [next(fresh) for _ in range(count)]
        made.append(turn([*rendered, *(c % 100 for c in context)], output))
        history = [*made[-1].prompt_ids, *output]
    rows = token_sequences(made, fork_threshold=threshold)
    check_shapes(rows)
    sampled = {token: (number, place) for number, t in enumerate(made) for place, token in enumerate(t.output_ids)}
    trained = [token for token, _ in trained_of(rows)]
    assert len(trained) == len(set(trained))
    assert set(trained) <= sampled.keys()
    assert set(made[-1].output_ids) <= set(trained), "the last answer is trained whole"
    for row in rows:
        for at, (token, mask) in enumerate(zip(row.input_ids, row.completion_mask, strict=True)):
            if mask:  # in the very context it was sampled in
                number, place = sampled[token]
                asked = made[number]
                assert row.input_ids[:at].tolist() == [*asked.prompt_ids, *asked.output_ids[:place]]
                assert row.old_log_probs[at] == asked.logprobs[place]
