"""Turns to training rows: what is trained is what was sampled, once, in the context it was sampled in."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from rollout_service.core.model import FinishReason, Turn
from rollout_service.core.sequences import token_sequences

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


def test_a_further_turn_that_rewrites_history_starts_a_row_of_its_own():
    rows = token_sequences([turn([5], [7]), turn([5, 99, 6], [8])])
    assert [list(row.completion_mask) for row in rows] == [[0, 1], [0, 0, 0, 1]]


@given(turns=st.lists(st.tuples(IDS, IDS), min_size=1, max_size=4), keep=st.booleans())
def test_every_trained_token_was_sampled_and_none_is_trained_twice(
    turns: list[tuple[list[int], list[int]]], keep: bool
):
    history: list[int] = []
    made = []
    for context, output in turns:
        prompt = history + context if keep else context
        made.append(turn(prompt, output))
        history = prompt + output
    rows = token_sequences(made)
    trained = [
        (token, logprob)
        for row in rows
        for token, logprob, mask in zip(row.input_ids, row.old_log_probs, row.completion_mask, strict=True)
        if mask
    ]
    assert trained == [pair for t in made for pair in zip(t.output_ids, t.logprobs, strict=True)]
    assert all(
        logprob == 0.0
        for row in rows
        for logprob, mask in zip(row.old_log_probs, row.completion_mask, strict=True)
        if not mask
    )
    assert len(rows) == 1 or not keep
