"""Payloads come back as they were, bit for bit; what is no payload is refused and nothing else."""

from __future__ import annotations

import contextlib
import math
from array import array
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout_service.core.model import (
    FailedRollout,
    FailureReason,
    FinishedRollout,
    FinishReason,
    Prompt,
    TeacherTokens,
    Turn,
)
from rollout_service.core.records import GroupScore, RowScore
from rollout_service.store import codec
from tests.contract.store_samples import failed, finished, prompt, score

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
ANY_WORDS = st.text(max_size=8)  # lone surrogates too: JSON's \ud800 is one
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | ANY_WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_WORDS, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(ANY_WORDS, JSON, max_size=3)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(lambda ids: array("i", ids))
LOGPROBS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20).map(
    lambda values: array("f", values)
)
TURNS = st.builds(
    Turn,
    prompt_ids=IDS,
    output_ids=IDS,
    logprobs=LOGPROBS,
    finish_reason=st.sampled_from(FinishReason),
    text=WORDS,
    message=st.none() | OBJECTS,
    weight_versions=st.lists(OBJECTS, max_size=2).map(tuple),
    engine=WORDS,
    version=st.none() | st.integers(0, 2**53 - 1),
)
FINISHED = st.builds(
    FinishedRollout,
    index=st.integers(0, 1000),
    prompt=st.none() | WORDS | st.lists(OBJECTS, max_size=2),
    completion=WORDS | st.lists(OBJECTS, max_size=2),
    turns=st.lists(TURNS, min_size=1, max_size=3).map(tuple),
    metrics=st.dictionaries(WORDS, NUMBERS, max_size=3),
    logprobs_mode=st.none() | WORDS,
    reward=st.none() | NUMBERS,
    fork_threshold=st.integers(0, 2**31 - 1),
)
FAILED = st.builds(
    FailedRollout,
    index=st.integers(0, 1000),
    reason=st.sampled_from(FailureReason),
    error=WORDS,
    engine=st.none() | WORDS,
    attempts=st.integers(0, 9),
    wasted_tokens=st.integers(0, 2**40),
)
PROMPTS = st.builds(
    Prompt,
    prompt_id=WORDS,
    epoch=st.integers(0, 2**40),
    messages=st.none() | st.lists(OBJECTS, max_size=2),
    text=st.none() | ANY_WORDS,
    token_ids=st.none() | IDS,
    columns=OBJECTS,
    num_generations=st.integers(1, 1024),
    sampling=OBJECTS,
)
REWARDS = st.none() | NUMBERS
TEACHERS = st.builds(TeacherTokens, teacher_id=WORDS, ids=IDS, logprobs=LOGPROBS, columns=st.integers(1, 9))
SCORES = st.builds(
    GroupScore,
    rows=st.dictionaries(
        st.integers(0, 1000),
        st.builds(
            RowScore,
            reward=REWARDS,
            rewards=st.dictionaries(WORDS, REWARDS, max_size=2),
            advantage=NUMBERS,
            teacher=st.lists(TEACHERS, max_size=2).map(tuple),
        ),
        max_size=3,
    ),
    mean=REWARDS,
    std=REWARDS,
    zero_variance=st.booleans(),
    errors=st.dictionaries(WORDS, WORDS, max_size=2),
)


@given(FINISHED)
def test_a_finished_rollout_comes_back_bit_for_bit(rollout: FinishedRollout) -> None:
    again = codec.decode_finished(bytes(codec.encode_finished(rollout)), rollout.index)
    assert again == rollout
    assert repr(again) == repr(rollout)  # types, the sign of zero, integers that are no floats
    for turn, before in zip(again.turns, rollout.turns, strict=True):
        assert (turn.prompt_ids.typecode, turn.logprobs.typecode) == ("i", "f")
        assert turn.logprobs.tobytes() == before.logprobs.tobytes()


@given(FAILED)
def test_a_failed_rollout_comes_back(rollout: FailedRollout) -> None:
    assert codec.decode_failed(bytes(codec.encode_failed(rollout)), rollout.index) == rollout


@given(PROMPTS)
@example(prompt(1))
def test_a_prompt_comes_back_with_any_json_in_its_columns(value: Prompt) -> None:
    again = codec.decode_prompt(bytes(codec.encode_prompt(value)))
    assert again == value
    assert repr(again) == repr(value)


@given(SCORES)
def test_a_score_comes_back(value: GroupScore) -> None:
    assert codec.decode_score(bytes(codec.encode_score(value))) == value


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**64, 10**40, "\ud83d", {"\udc00": 1}, 1e308, [[[None]]]])
def test_values_msgpack_cannot_hold_are_kept_too(value: Any) -> None:
    held = Prompt(prompt_id="p", text="t", columns={"x": value, "y": [value]}, num_generations=1)
    assert codec.decode_prompt(bytes(codec.encode_prompt(held))) == held


def test_read_only_mappings_come_back_as_dicts() -> None:
    held = Prompt(prompt_id="p", text="t", columns=MappingProxyType({"x": MappingProxyType({})}), num_generations=1)
    assert codec.decode_prompt(bytes(codec.encode_prompt(held))).columns == {"x": {}}


def test_not_a_number_in_metrics_and_columns_comes_back() -> None:
    held = Prompt(prompt_id="p", text="t", columns={"x": math.nan, "y": math.inf}, num_generations=1)
    columns = codec.decode_prompt(bytes(codec.encode_prompt(held))).columns
    assert math.isnan(columns["x"])
    assert columns["y"] == math.inf


DECODERS = [
    lambda data: codec.decode_finished(data, 0),
    lambda data: codec.decode_failed(data, 0),
    codec.decode_prompt,
    codec.decode_score,
]


@given(st.binary(max_size=64), st.sampled_from(DECODERS))
def test_bytes_that_are_no_payload_raise_one_error(data: bytes, decode: Any) -> None:
    with pytest.raises(codec.CodecError):
        decode(b"\x00" + data)
    with contextlib.suppress(codec.CodecError):
        decode(b"\x01" + data)


PAYLOADS = [
    (bytes(codec.encode_finished(finished(1))), DECODERS[0]),
    (bytes(codec.encode_failed(failed(1))), DECODERS[1]),
    (bytes(codec.encode_prompt(prompt(1))), DECODERS[2]),
    (bytes(codec.encode_score(score())), DECODERS[3]),
]


@pytest.mark.parametrize(("payload", "decode"), PAYLOADS)
def test_a_shortened_payload_is_refused_wherever_it_ends(payload: bytes, decode: Any) -> None:
    for end in range(len(payload)):
        with pytest.raises(codec.CodecError):
            decode(payload[:end])


def test_half_a_token_is_refused() -> None:
    payload = bytes(codec.encode_finished(finished(1)))
    with pytest.raises(codec.CodecError):
        codec.decode_finished(payload.replace(b"\xc4\x0c\x01\x00\x00\x00", b"\xc4\x0b\x01\x00\x00", 1), 1)


def test_a_payload_of_a_later_format_is_refused_by_number() -> None:
    with pytest.raises(codec.CodecError, match="payload format 2; this version reads 1"):
        codec.decode_prompt(b"\x02" + PAYLOADS[2][0][1:])


def test_tokens_are_kept_as_raw_little_endian_bytes() -> None:
    turn = Turn(
        prompt_ids=array("i", [1]),
        output_ids=array("i", range(1000)),
        logprobs=array("f", [-0.5] * 1000),
        finish_reason=FinishReason.LENGTH,
        text="",
        engine="e",
    )
    data = bytes(codec.encode_finished(FinishedRollout(index=0, prompt=None, completion="", turns=(turn,))))
    assert b"".join(token.to_bytes(4, "little") for token in range(1000)) in data
    assert len(data) < 8 * 1000 + 100
