"""What counts as a completion, and what does not (design 3.2.7)."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from rollout_service.core.model import FinishReason, Turn
from rollout_service.engines.answers import chat_turn, error_message, text_turn
from rollout_service.engines.faults import AbortedAnswer, BadAnswer
from tests.engine_script import Reply, completion

SENT = array("i", [1, 2, 3])


def raw(change: Callable[[dict[str, Any]], Any] = lambda answer: None, **reply: Any) -> bytes:
    answer = completion({"prompt": list(SENT)}, Reply(**reply))
    change(answer)
    return json.dumps(answer).encode()


def turn_of(body: bytes, *, sent: array[int] | None = SENT, vocab_size: int | None = None) -> Turn:
    return text_turn(body, sent_ids=sent, vocab_size=vocab_size, engine="e0")


def set_in_choice(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda answer: answer["choices"][0].update({name: value})


def drop_from_choice(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda answer: answer["choices"][0].pop(name)


def test_a_completion_becomes_a_turn_with_the_engines_ids_and_logprobs() -> None:
    turn = turn_of(raw(ids=[104, 105], logprobs=[-0.5, -1.25]))
    assert (turn.prompt_ids, turn.output_ids) == (SENT, array("i", [104, 105]))
    assert turn.logprobs == array("f", [-0.5, -1.25])
    assert (turn.finish_reason, turn.text, turn.message, turn.engine) == (FinishReason.STOP, "hi", None, "e0")


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls"])
def test_stop_length_and_tool_calls_are_completions(reason: str) -> None:
    assert turn_of(raw(finish_reason=reason)).finish_reason == reason


@pytest.mark.parametrize("reason", ["abort", "error", None, "", "content_filter", 7, ["stop"], {"a": 1}])
def test_any_other_finish_reason_is_an_aborted_answer_with_its_tokens_counted(reason: Any) -> None:
    with pytest.raises(AbortedAnswer) as caught:
        turn_of(raw(ids=[1, 2, 3], finish_reason=reason))
    assert caught.value.tokens == 3


def test_a_missing_finish_reason_is_an_aborted_answer() -> None:
    with pytest.raises(AbortedAnswer):
        turn_of(raw(drop_from_choice("finish_reason")))


def test_an_abort_that_lacks_all_the_rest_is_still_an_abort() -> None:
    with pytest.raises(AbortedAnswer):
        turn_of(b'{"choices": [{"finish_reason": "abort", "token_ids": null, "logprobs": null}]}')
    with pytest.raises(AbortedAnswer) as caught:
        turn_of(b'{"choices": [{"finish_reason": "abort", "logprobs": "?"}], "usage": {"completion_tokens": 9}}')
    assert caught.value.tokens == 9


@pytest.mark.parametrize(
    "ids",
    [[1, 7.0], [1, 7.5], [1, True], [1, "7"], [1, None], [1, -1], [1, 2**31], [1, 2**70], [1, -(2**70)], [1, [2]]],
)
def test_ids_that_are_no_int32_are_refused_never_coerced(ids: list[Any]) -> None:
    with pytest.raises(BadAnswer):
        turn_of(raw(ids=ids, logprobs=[-1.0, -1.0]))


def test_ids_are_bounded_by_the_vocabulary_where_it_is_known() -> None:
    assert turn_of(raw(ids=[9]), vocab_size=10).output_ids == array("i", [9])
    with pytest.raises(BadAnswer, match="10, outside 0 to 9"):
        turn_of(raw(ids=[10]), vocab_size=10)


@pytest.mark.parametrize("change", [drop_from_choice("token_ids"), set_in_choice("token_ids", None)])
def test_an_answer_without_ids_is_bad(change: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(BadAnswer, match="without token_ids"):
        turn_of(raw(change))


def test_an_answer_with_an_empty_list_of_ids_is_bad() -> None:
    with pytest.raises(BadAnswer, match="without token_ids"):
        turn_of(raw(ids=[], logprobs=[]))


@pytest.mark.parametrize("logprobs", [[-1.0], [-1.0] * 3, []])
def test_logprobs_of_another_length_are_bad_never_padded(logprobs: list[float]) -> None:
    with pytest.raises(BadAnswer, match="logprobs") as caught:
        turn_of(raw(ids=[1, 2], logprobs=logprobs))
    assert caught.value.tokens == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300, -1e300, None, "1", True])
def test_logprobs_that_are_not_finite_float32_are_bad(value: Any) -> None:
    with pytest.raises(BadAnswer):
        turn_of(raw(ids=[1, 2], logprobs=[-1.0, value]))
    with pytest.raises(BadAnswer):
        turn_of(raw(ids=[1, 2], logprobs=[-1.0, 7777]).replace(b"7777", b"-1e999"))


def test_infinities_that_cancel_each_other_are_bad() -> None:
    with pytest.raises(BadAnswer, match="finite"):
        turn_of(raw(ids=[1, 2], logprobs=[1e300, -1e300]))


@pytest.mark.parametrize("change", [drop_from_choice("logprobs"), set_in_choice("logprobs", {"token_logprobs": None})])
def test_an_answer_without_logprobs_is_bad(change: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(BadAnswer, match="without logprobs"):
        turn_of(raw(change))


def test_usage_that_counts_other_tokens_is_bad_and_absent_usage_is_not() -> None:
    with pytest.raises(BadAnswer, match="completion_tokens is 12") as caught:
        turn_of(raw(lambda answer: answer["usage"].update(completion_tokens=12)))
    assert caught.value.tokens == 12
    assert turn_of(raw(lambda answer: answer.pop("usage"))).output_ids
    assert turn_of(raw(lambda answer: answer.update(usage=None))).output_ids


@pytest.mark.parametrize("choices", [[], [1, 2], None, "x"])
def test_anything_but_one_choice_is_bad(choices: Any) -> None:
    def change(answer: dict[str, Any]) -> None:
        answer["choices"] = answer["choices"] * len(choices) if choices == [1, 2] else choices

    with pytest.raises(BadAnswer):
        turn_of(raw(change))


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"<html>", b"{}", raw()[: len(raw()) // 2], raw() + b"x"])
def test_a_body_that_is_no_whole_completion_is_bad(body: bytes) -> None:
    with pytest.raises(BadAnswer):
        turn_of(body)


def test_prompt_ids_must_be_those_that_were_sent_and_may_be_absent() -> None:
    assert turn_of(raw(drop_from_choice("prompt_token_ids"))).prompt_ids is SENT
    for other in ([1, 2], [1, 2, 4], [1, 2, 3, 4], []):
        with pytest.raises(BadAnswer):
            turn_of(raw(set_in_choice("prompt_token_ids", other)))


def test_a_text_prompt_needs_the_engines_prompt_ids() -> None:
    assert turn_of(raw(), sent=None).prompt_ids == SENT
    for change in (drop_from_choice("prompt_token_ids"), set_in_choice("prompt_token_ids", [])):
        with pytest.raises(BadAnswer, match="without prompt_token_ids"):
            turn_of(raw(change), sent=None)


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (rb"a\ud83d", "a\ufffd"),
        (rb"\udc00b", "\ufffdb"),
        (rb"\ud800\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\ud83d\ude00\\ud800", "\U0001f600\\ud800"),
        (rb"\\\ud800\"", '\\\ufffd"'),
        (b"a\xed\xa0\x80b", "a\ufffdb"),
    ],
)
def test_half_a_character_in_the_text_costs_neither_the_tokens_nor_valid_unicode(escaped: bytes, text: str) -> None:
    # The escaped backslash before `ud800` in one case keeps a decoder honest that only looks for the letters.
    body = raw(set_in_choice("text", "HERE")).replace(b"HERE", escaped)
    if text.endswith("\\ud800"):
        body = body.replace(b'"index"', rb'"x": "\ud800", "index"')
    turn = turn_of(body)
    assert turn.text == text
    turn.text.encode()
    assert turn.output_ids == array("i", [104, 105])


def test_a_body_that_is_no_utf8_is_bad() -> None:
    with pytest.raises(BadAnswer):
        turn_of(raw(set_in_choice("text", "HERE")).replace(b"HERE", b"\xff\xfe"))


def chat(change: Callable[[dict[str, Any]], Any] = lambda answer: None, **reply: Any) -> bytes:
    answer = completion({"messages": [{"role": "user", "content": "abc"}]}, Reply(**reply), chat=True)
    change(answer)
    return json.dumps(answer).encode()


def test_a_chat_completion_becomes_a_turn_with_its_message() -> None:
    turn = chat_turn(chat(ids=[104, 105], logprobs=[-0.5, -1.25]), vocab_size=None, engine="e0")
    assert turn.prompt_ids == array("i", list(b"abc"))
    assert turn.logprobs == array("f", [-0.5, -1.25])
    assert (turn.message, turn.text) == ({"role": "assistant", "content": "hi"}, "hi")


def test_tool_calls_stay_on_the_message() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}

    def change(answer: dict[str, Any]) -> None:
        answer["choices"][0]["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}

    turn = chat_turn(chat(change, finish_reason="tool_calls"), vocab_size=None, engine="e0")
    assert turn.message == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert turn.text == ""


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: answer.pop("prompt_token_ids"),
        lambda answer: answer["choices"][0].pop("token_ids"),
        lambda answer: answer["choices"][0].pop("logprobs"),
        lambda answer: answer["choices"][0].pop("message"),
        lambda answer: answer["choices"][0]["logprobs"]["content"].pop(),
        lambda answer: answer["choices"][0]["logprobs"]["content"][0].update(logprob=None),
        lambda answer: answer["choices"].clear(),
    ],
)
def test_a_chat_completion_that_lacks_something_is_bad(change: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(BadAnswer):
        chat_turn(chat(change), vocab_size=None, engine="e0")


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b'{"error": {"message": "too long", "param": "input_tokens"}}', "too long", "input_tokens"),
        (b'{"error": "Unauthorized"}', "Unauthorized", None),
        (b'{"detail": "Not Found"}', "Not Found", None),
        (b'{"detail": [{"loc": ["body"], "msg": "m"}]}', '[{"loc":["body"],"msg":"m"}]', None),
        (b'{"object": "error", "message": "old shape"}', "old shape", None),
        (b"<h1>Bad Gateway</h1>", "<h1>Bad Gateway</h1>", None),
        (b"\xff", "\ufffd", None),
        (b"", "(empty body)", None),
        (b"7", "7", None),
    ],
)
def test_the_engines_own_words_are_found_in_every_shape_of_error(body: bytes, message: str, param: str | None) -> None:
    assert error_message(body) == (message, param)


def test_the_engines_own_words_are_kept_up_to_2000_characters() -> None:
    assert len(error_message(b"x" * 10_000)[0]) == 2_000
    assert len(error_message(json.dumps({"error": {"message": "y" * 10_000}}).encode())[0]) == 2_000
