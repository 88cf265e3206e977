"""Rows to prompts: what is taken, what is refused and under which name; the digest of a prompt's content."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from rollout_service.core.model import Prompt
from rollout_service.prompts import RowError, content_digest, parse_row, parse_submitted
from rollout_service.prompts.rows import MAX_PROMPT_BYTES, MAX_PROMPT_IDS

CHAT = [{"role": "user", "content": "2 + 2?"}]


def row(fields: Any, *, epoch: int = 0, min_group_size: int = 2) -> Prompt:
    return parse_row(
        fields,
        where="train.jsonl:7",
        default_num_generations=8,
        default_prompt_id="train-6",
        min_group_size=min_group_size,
        epoch=epoch,
    )


def submitted(fields: Any) -> Prompt:
    return parse_submitted(
        fields, where="prompts[3]", default_num_generations=8, default_prompt_id="p-1", min_group_size=2
    )


def test_messages_text_and_ids_each_make_a_prompt():
    assert row({"messages": CHAT}).messages == CHAT
    assert row({"prompt": "2 + 2?"}).text == "2 + 2?"
    assert row({"prompt_token_ids": [1, 2**31 - 1]}).token_ids == array("i", [1, 2**31 - 1])


def test_only_one_form_of_a_prompt_is_set():
    for fields in ({"messages": CHAT}, {"prompt": "x"}, {"prompt_token_ids": [1]}, {"prompt": CHAT}):
        prompt = row(fields)
        assert [prompt.messages, prompt.text, prompt.token_ids].count(None) == 2


def test_a_conversational_prompt_is_taken_as_messages():
    assert row({"prompt": CHAT}).messages == CHAT


def test_what_a_row_does_not_say_comes_from_the_defaults():
    prompt = row({"prompt": "x"}, epoch=3)
    assert (prompt.prompt_id, prompt.num_generations, prompt.epoch, prompt.sampling) == ("train-6", 8, 3, {})


def test_every_other_field_is_a_column():
    prompt = row(
        {"prompt": "x", "prompt_id": "a", "num_generations": 4, "sampling": {"top_p": 0.5}, "answer": 4, "epoch": 9}
    )
    assert prompt.columns == {"answer": 4, "epoch": 9}
    assert (prompt.prompt_id, prompt.num_generations, prompt.sampling) == ("a", 4, {"top_p": 0.5})


def test_null_in_a_reserved_field_is_not_there():
    nulls = {"messages": None, "prompt_token_ids": None, "prompt_id": None, "num_generations": None, "sampling": None}
    prompt = row({"prompt": "x", **nulls})
    assert (prompt.text, prompt.prompt_id, prompt.columns) == ("x", "train-6", {})


def test_a_null_column_stays():
    assert row({"prompt": "x", "answer": None}).columns == {"answer": None}


def test_messages_keep_everything_in_them():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "näher"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "assistant", "tool_calls": []},
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ]
    assert row({"messages": messages}).messages == messages


def test_a_submitted_prompt_has_its_columns_under_columns():
    prompt = submitted(
        {"messages": CHAT, "columns": {"answer": [1]}, "epoch": 2, "num_generations": 2, "prompt_id": "q"}
    )
    assert (prompt.columns, prompt.epoch, prompt.num_generations, prompt.prompt_id) == ({"answer": [1]}, 2, 2, "q")


def test_a_submitted_prompt_needs_nothing_but_its_content():
    assert submitted({"prompt": "x"}) == Prompt(prompt_id="p-1", text="x", num_generations=8)
    assert submitted({"prompt": "x", "columns": None, "epoch": None}) == submitted({"prompt": "x"})


TOO_DEEP: Any = 1
for _ in range(70):
    TOO_DEEP = [TOO_DEEP]

BOTH = [
    ([], "", "expected an object, got a list"),
    ("x", "", 'expected an object, got "x"'),
    ({}, "", "expected exactly one of messages, prompt, prompt_token_ids; found none"),
    ({"prompt": None}, "", "found none"),
    ({"prompt": "x", "messages": CHAT}, "", "found messages and prompt"),
    ({"prompt": ""}, "prompt", "expected text, not empty, or a list of messages"),
    ({"prompt": 7}, "prompt", "expected text, not empty, or a list of messages, got 7"),
    ({"prompt": [1, 2]}, "prompt", "token ids belong under prompt_token_ids"),
    ({"prompt": []}, "prompt", "expected a list of messages, not empty, got an empty list"),
    ({"prompt": "\ud800"}, "prompt", "not valid Unicode"),
    ({"messages": []}, "messages", "not empty"),
    ({"messages": "hi"}, "messages", 'expected a list of messages, not empty, got "hi"'),
    ({"messages": {"role": "user"}}, "messages", "expected a list of messages"),
    ({"messages": ["hi"]}, "messages[0]", "expected an object with role and content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "expected text, not empty, got nothing"),
    ({"messages": [*CHAT, {"role": 1, "content": "x"}]}, "messages[1].role", "expected text, not empty, got 1"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role", "not empty"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "expected text, a list of parts or null, got nothing"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "got 3"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "expected an object"),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages[0].content", "not valid Unicode"),
    (
        {"messages": [{"role": "user", "content": "x", "n": float("inf")}]},
        "messages[0].n",
        "inf is not a finite number",
    ),
    ({"prompt": [{"content": "x"}]}, "prompt[0].role", "got nothing"),
    ({"prompt_token_ids": []}, "prompt_token_ids", "not empty"),
    ({"prompt_token_ids": "12"}, "prompt_token_ids", 'got "12"'),
    ({"prompt_token_ids": [1, True]}, "prompt_token_ids[1]", "expected an integer from 0 to 2^31 - 1, got true"),
    ({"prompt_token_ids": [1.0]}, "prompt_token_ids[0]", "got 1.0"),
    ({"prompt_token_ids": [-1]}, "prompt_token_ids[0]", "got -1"),
    ({"prompt_token_ids": [2**31]}, "prompt_token_ids[0]", "got 2147483648"),
    ({"prompt_token_ids": [None]}, "prompt_token_ids[0]", "got null"),
    ({"prompt": "x", "prompt_id": ""}, "prompt_id", "expected text of 1 to 512 characters"),
    ({"prompt": "x", "prompt_id": "a" * 513}, "prompt_id", "expected text of 1 to 512 characters"),
    ({"prompt": "x", "prompt_id": 7}, "prompt_id", "expected text of 1 to 512 characters, got 7"),
    ({"prompt": "x", "prompt_id": "a\nb"}, "prompt_id", "without control characters"),
    ({"prompt": "x", "prompt_id": "a\x00"}, "prompt_id", "without control characters"),
    ({"prompt": "x", "prompt_id": "\ud800"}, "prompt_id", "not valid Unicode"),
    ({"prompt": "x", "num_generations": "4"}, "num_generations", 'expected an integer from 1 to 1024, got "4"'),
    ({"prompt": "x", "num_generations": 4.0}, "num_generations", "got 4.0"),
    ({"prompt": "x", "num_generations": True}, "num_generations", "got true"),
    ({"prompt": "x", "num_generations": 0}, "num_generations", "got 0"),
    ({"prompt": "x", "num_generations": 1025}, "num_generations", "got 1025"),
    ({"prompt": "x", "num_generations": 1}, "num_generations", "1 is below groups.min_group_size (2)"),
    ({"prompt": "x", "sampling": "hot"}, "sampling", "expected an object"),
    ({"prompt": "x", "sampling": {"n": 2}}, "sampling.n", "not taken: one request makes one rollout"),
    ({"prompt": "x", "sampling": {"temprature": 2}}, "sampling.temprature", "unknown key; did you mean temperature?"),
    ({"prompt": "x", "sampling": {"temperature": "1"}}, "sampling.temperature", "expected a number"),
    ({"prompt": "x", "sampling": {"max_tokens": 0}}, "sampling.max_tokens", "expected at least 1, got 0"),
    ({"prompt": "x", "sampling": {"top_p": float("nan")}}, "sampling.top_p", "nan is not a finite number"),
    ({"prompt": "x", "sampling": {"stop": [""]}}, "sampling.stop[0]", "expected text, not empty"),
]
"""(row, field, part of what is wrong): the same in a file and over HTTP."""

COLUMNS = [
    ({"score": float("nan")}, "score", "nan is not a finite number"),
    ({"meta": {"a": [0, float("-inf")]}}, "meta.a[1]", "-inf is not a finite number"),
    ({"answer": "\ud83d"}, "answer", "not valid Unicode (a lone surrogate)"),
    ({"meta": {"\ud83d": 1}}, "meta", "is not valid Unicode"),
    ({"meta": {1: 1}}, "meta", "the key 1 is not text"),
    ({"big": 2**64}, "big", "an integer of more than 64 bits"),
    ({"deep": TOO_DEEP}, "deep" + "[0]" * 63, "nested deeper than 64 levels"),
    ({"day": object()}, "day", "a object has no JSON form"),
    ({"pair": (1, 2)}, "pair", "a tuple has no JSON form"),
    ({"prompts": 1}, "prompts", "the name of an argument of every reward; rename the column"),
    ({"completions": 1}, "completions", "the name of an argument of every reward"),
    ({"completion_ids": None}, "completion_ids", "the name of an argument of every reward"),
    ({"": 1}, '""', "a column needs a name"),
]


def refused(parse, fields: Any, where: str, field: str, what: str) -> None:
    with pytest.raises(RowError) as caught:
        parse(fields)
    line = str(caught.value)
    assert line.startswith(f"{where}: {field}: " if field else f"{where}: expected")
    assert what in line
    assert line.isprintable()
    assert caught.value.facts == {"where": where, "field": field}
    assert caught.value.status == 422


@pytest.mark.parametrize(("fields", "field", "what"), BOTH)
def test_a_bad_row_names_its_place_its_field_and_what_is_wrong(fields: Any, field: str, what: str):
    refused(row, fields, "train.jsonl:7", field, what)
    refused(submitted, fields, "prompts[3]", field, what)


@pytest.mark.parametrize(("columns", "field", "what"), COLUMNS)
def test_a_column_that_cannot_reach_a_reward_is_refused(columns: dict[Any, Any], field: str, what: str):
    refused(row, {"prompt": "x", **columns}, "train.jsonl:7", field, what)


@pytest.mark.parametrize(("columns", "field", "what"), COLUMNS)
def test_a_submitted_column_is_held_to_the_same(columns: dict[Any, Any], field: str, what: str):
    place = f"columns.{field}".removesuffix("[0]") if "deep" in columns else f"columns.{field}"
    refused(submitted, {"prompt": "x", "columns": columns}, "prompts[3]", place, what)


@pytest.mark.parametrize(
    ("fields", "field", "what"),
    [
        ({"prompt": "x", "answer": 4}, "answer", "unknown field; columns belong under `columns`"),
        ({"prompt": "x", "columns": [1]}, "columns", "expected an object"),
        ({"prompt": "x", "epoch": -1}, "epoch", "expected an integer from 0 to 2147483647, got -1"),
        ({"prompt": "x", "epoch": 1.0}, "epoch", "got 1.0"),
        ({"prompt": "x", "epoch": False}, "epoch", "got false"),
    ],
)
def test_a_submitted_prompt_is_refused_by_name(fields: Any, field: str, what: str):
    refused(submitted, fields, "prompts[3]", field, what)


def test_a_bad_name_reaches_the_error_on_one_line_and_in_utf8():
    with pytest.raises(RowError) as caught:
        submitted({"prompt": "x", "a\nb" + "c" * 9999: 1})
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


def test_a_group_of_one_is_taken_where_the_configuration_says_so():
    assert row({"prompt": "x", "num_generations": 1}, min_group_size=1).num_generations == 1


texts = st.text(alphabet="ab é\n\x00\ud800", max_size=4)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
)
contents = st.sampled_from([{"prompt": "x"}, {"messages": CHAT}, {"prompt_token_ids": [1]}]) | st.dictionaries(
    st.sampled_from(["prompt", "messages", "prompt_token_ids"]),
    texts | json_values | st.lists(st.dictionaries(st.sampled_from(["role", "content"]), json_values), max_size=2),
    max_size=2,
)
plausible = st.fixed_dictionaries(
    {},
    optional={
        "prompt_id": st.just("a"),
        "num_generations": st.integers(2, 9),
        "sampling": st.sampled_from([{}, {"temperature": 1}, {"stop": "x"}]),
        "columns": st.dictionaries(st.sampled_from("yz"), st.booleans() | st.floats(), max_size=2),
    },
)
further = plausible | st.dictionaries(
    st.sampled_from(["prompt_id", "num_generations", "sampling", "columns", "x", "y"]),
    st.integers(2, 9) | texts | st.dictionaries(st.sampled_from(["temperature", "stop", "z"]), json_values, max_size=2),
    max_size=2,
)
rows = st.builds(dict.__or__, contents, further)


@given(fields=rows)
def test_any_row_is_either_a_prompt_of_strict_json_or_refused(fields: dict[str, Any]):
    for parse in (row, submitted):
        try:
            prompt = parse(fields)
        except RowError as error:
            line = str(error)
            event(f"{parse.__name__}: refused")
        else:
            line = content_digest(prompt).hex()
            event(f"{parse.__name__}: taken")
            for part in (prompt.columns, prompt.messages, prompt.sampling, prompt.prompt_id, prompt.text):
                json.dumps(part, allow_nan=False, ensure_ascii=False).encode()
        assert line.isprintable()


SAMPLE = Prompt(
    prompt_id="a",
    messages=[{"role": "user", "content": "é"}],
    columns={"b": [1, 2.5, None, True], "a": {"y": 1, "x": "z"}},
    num_generations=4,
    sampling={"temperature": 0.5},
)


def test_a_digest_is_the_same_in_every_version():
    # A change of these values makes every known prompt of every store look like another one.
    assert content_digest(SAMPLE).hex() == "b55a49517bc397f1145667c3190cb2132c0978dd5f69e0e2739412f3b26d7c83"
    ids = Prompt(prompt_id="a", token_ids=array("i", [0, 2**31 - 1]), num_generations=1)
    assert content_digest(ids).hex() == "cd2f5a29ee93259dfdf7f930e72b2114a8b00f744a0573c0b0fde9eefb2a6c93"


def test_a_digest_is_the_same_in_another_process():
    program = (
        "from rollout_service.prompts import content_digest, parse_row;"
        "print(content_digest(parse_row({'prompt': 'x', 'b': 1, 'a': {'d': 2, 'c': 3}}, where='', epoch=0,"
        " default_num_generations=8, default_prompt_id='', min_group_size=2)).hex())"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert there.stdout.strip() == content_digest(row({"a": {"c": 3, "d": 2}, "b": 1, "prompt": "x"})).hex()


def test_a_digest_leaves_the_identity_out():
    assert content_digest(replace(SAMPLE, prompt_id="b", epoch=7)) == content_digest(SAMPLE)


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "user", "content": "e"}]},
        {"messages": None, "text": "é"},
        {"columns": {}},
        {"num_generations": 5},
        {"sampling": {}},
    ],
)
def test_a_digest_tells_different_content_apart(change: dict[str, Any]):
    assert content_digest(replace(SAMPLE, **change)) != content_digest(SAMPLE)


def test_the_order_of_keys_is_no_content():
    first = row({"prompt": "x", "a": 1, "b": {"c": 1, "d": 2}})
    assert content_digest(first) == content_digest(row({"b": {"d": 2, "c": 1}, "a": 1, "prompt": "x"}))


def test_a_whole_number_for_a_temperature_is_the_same_temperature():
    whole, decimal = ({"prompt": "x", "sampling": {"temperature": value}} for value in (1, 1.0))
    assert content_digest(row(whole)) == content_digest(submitted(decimal))


ALMOST = MAX_PROMPT_BYTES - 100
IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * MAX_PROMPT_BYTES}}]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": [7] * MAX_PROMPT_IDS},
        {"prompt": "x" * MAX_PROMPT_BYTES},
        {"prompt": "\N{SNOWMAN}" * (MAX_PROMPT_BYTES // 3)},
        {"messages": [{"role": "user", "content": "x" * ALMOST}]},
        {"prompt": [{"role": "user", "content": "x" * ALMOST}]},
        {"messages": [{"role": "user", "content": ""}] * 500_000},
    ],
    ids=["ids", "text", "text of long characters", "messages", "conversational prompt", "many messages"],
)
def test_a_prompt_of_the_greatest_size_is_taken(fields: Any):
    assert submitted(fields)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"prompt_token_ids": [7] * (MAX_PROMPT_IDS + 1)}, "prompt_token_ids", "1048577 ids, more than the 1048576"),
        ({"prompt": "x" * (MAX_PROMPT_BYTES + 1)}, "prompt", "16777217 bytes, more than the 16777216"),
        ({"prompt": "\N{SNOWMAN}" * (MAX_PROMPT_BYTES // 3 + 1)}, "prompt", "bytes, more than the 16777216"),
        ({"messages": [{"role": "user", "content": "x" * MAX_PROMPT_BYTES}]}, "messages", "more than the 16777216"),
        ({"prompt": [{"role": "user", "content": "x" * MAX_PROMPT_BYTES}]}, "prompt", "more than the 16777216"),
        ({"messages": [{"role": "user", "content": IMAGE}]}, "messages", "more than the 16777216"),
        ({"messages": [{"role": "user", "content": ""}] * 600_000}, "messages", "more than the 16777216"),
    ],
    ids=["ids", "text", "text of long characters", "messages", "conversational prompt", "image", "many messages"],
)
def test_an_absurd_prompt_is_refused_and_its_size_told(fields: Any, field: str, words: str):
    with pytest.raises(RowError) as caught:
        submitted(fields)
    assert caught.value.facts["field"] == field
    assert words in str(caught.value)
    assert len(str(caught.value)) < 200
