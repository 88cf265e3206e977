"""What of a teacher's answer becomes a table, and what is refused."""

from __future__ import annotations

import json
import math
from array import array
from typing import Any

import pytest

from rollout_service.core.sequences import TokenSequence
from rollout_service.engines.faults import BadAnswer
from rollout_service.teachers.answers import PIECE_POSITIONS, teacher_tokens


def sequence(ids: list[int], mask: list[int]) -> TokenSequence:
    return TokenSequence(
        input_ids=array("i", ids), completion_mask=bytes(mask), old_log_probs=array("f", [-1.0 * m for m in mask])
    )


def position(**logprobs: float) -> dict[str, Any]:
    """`position(_7=-1.0)`: the teacher gave token 7 a logprob of -1."""
    return {name[1:]: {"logprob": value, "rank": 1, "decoded_token": "x"} for name, value in logprobs.items()}


def answer(rows: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": "!", "prompt_logprobs": rows}], "usage": {}}).encode()


TWO = sequence([5, 7, 9], [0, 1, 1])


def table(rows: Any, *, of: TokenSequence = TWO, top_k: int = 2) -> tuple[list[int], list[float]]:
    made = teacher_tokens(answer(rows), of, teacher_id="t", top_k=top_k)
    assert made.teacher_id == "t"
    assert made.columns == top_k + 1
    assert len(made.ids) == len(made.logprobs) == of.trained * made.columns
    return made.ids.tolist(), made.logprobs.tolist()


def refusal(raw: bytes, of: TokenSequence = TWO) -> str:
    with pytest.raises(BadAnswer) as caught:
        teacher_tokens(raw, of, teacher_id="t", top_k=2)
    return str(caught.value)


def test_a_row_has_the_likely_tokens_and_the_sampled_one_most_likely_first():
    rows = [None, position(_7=-6.0, _1=-1.0, _2=-2.0), position(_9=-4.0, _3=-0.5, _4=-3.0)]
    assert table(rows) == ([1, 2, 7, 3, 4, 9], [-1.0, -2.0, -6.0, -0.5, -3.0, -4.0])


def test_where_the_sampled_token_is_among_the_likely_ones_the_last_column_is_filled_up():
    rows = [None, position(_7=-0.5, _1=-1.0), position(_9=-2.0, _3=-1.0)]
    assert table(rows) == ([7, 1, -1, 3, 9, -1], [-0.5, -1.0, -math.inf, -1.0, -2.0, -math.inf])


def test_only_the_positions_to_train_are_taken_each_from_its_own_place():
    of = sequence([10, 11, 12, 13, 14, 15], [0, 1, 0, 0, 1, 1])
    rows = [None, *(position(**{f"_{token}": -token / 16}) for token in range(11, 16))]
    ids, logprobs = table(rows, of=of, top_k=1)
    assert ids == [11, -1, 14, -1, 15, -1]
    assert logprobs[::2] == [-11 / 16, -14 / 16, -15 / 16]


def test_a_long_sample_keeps_its_order_over_every_piece():
    count = 3 * PIECE_POSITIONS + 7
    of = sequence([1] + [2 + i for i in range(count)], [0] + [1] * count)
    rows = [None, *(position(**{f"_{2 + i}": -(i + 1) / 8}) for i in range(count))]
    ids, logprobs = table(rows, of=of, top_k=1)
    assert ids[::2] == [2 + i for i in range(count)]
    assert logprobs[::2] == [-(i + 1) / 8 for i in range(count)]


def test_of_more_candidates_than_were_asked_for_the_likeliest_and_the_sampled_one_are_kept():
    many = position(_1=-1.0, _2=-2.0, _3=-3.0, _4=-4.0, _7=-5.0)
    among = position(_9=-1.0, _2=-2.0, _3=-3.0, _4=-4.0)
    assert table([None, many, among]) == ([1, 2, 7, 9, 2, -1], [-1.0, -2.0, -5.0, -1.0, -2.0, -math.inf])


def test_what_vllm_writes_for_minus_infinity_is_passed_on_as_it_is():
    assert table([None, position(_7=-9999.0, _1=0.0), position(_9=-1.0)])[1][1] == -9999.0


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"<html>", "the answer is no completion"),
        (b'{"choices": []}', "0 choices where one was asked for"),
        (b'{"choices": [{}, {}]}', "2 choices where one was asked for"),
        (b'{"choices": [{"text": "x"}]}', "without prompt_logprobs"),
        (answer(None), "without prompt_logprobs"),
        (answer({}), "the answer is no completion"),
        (answer([None, position(_7=-1.0)]), "prompt_logprobs has 2 positions for 3 tokens"),
        (answer([None] * 3), "prompt_logprobs lacks the sampled token 7"),
        (answer([None, position(_7=-1.0), position(_8=-1.0)]), "prompt_logprobs lacks the sampled token 9"),
        (answer([None, position(_7=-1.0), {}]), "prompt_logprobs lacks the sampled token 9"),
        (answer([None, position(_7=-1.0), [1, 2]]), "no list of token ids and logprobs"),
        (answer([None, position(_7=-1.0), position(_x=-1.0)]), "no list of token ids and logprobs"),
        (answer([None, position(_7=-1.0), {"9": {"rank": 1}}]), "no list of token ids and logprobs"),
        (answer([None, position(_7=-1.0), {"9": {"logprob": None}}]), "no list of token ids and logprobs"),
        (answer([None, position(_7=-1.0), {"9": {"logprob": "-1"}}]), "no list of token ids and logprobs"),
        (answer([None, position(_7=-1.0), position(_9=-1e300)]), "-1e+300 is no logprob"),
        (answer([None, position(_7=-1.0), position(_9=7.5, _1=-1.0)]), "7.5 is no logprob (a server with --logprobs"),
        (answer([None, position(_7=-1.0), {"9": {"logprob": -1}, "-3": {"logprob": -2}}]), "-3 or 9 is no token id"),
        (
            answer([None, position(_7=-1.0), {"9": {"logprob": -1}, "2147483648": {"logprob": -2}}]),
            "9 or 2147483648 is no token id",
        ),
        (answer([None, position(_7=-1.0), position(_9=-1.0)]).replace(b"-1.0", b"NaN"), "the answer is no completion"),
    ],
)
def test_an_answer_that_is_no_table_of_this_sample_is_refused(raw: bytes, said: str):
    assert said in refusal(raw)


def test_a_trained_first_token_has_no_logprob_and_is_refused():
    rows = [None, position(_7=-1.0), position(_9=-1.0)]
    assert "lacks the sampled token 5" in refusal(answer(rows), sequence([5, 7, 9], [1, 1, 1]))
