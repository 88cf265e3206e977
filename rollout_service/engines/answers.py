"""The engine's answers, decoded straight off the bytes and checked (design 3.2.7).

A `Turn` leaves here only when all of it is what the engine sampled: ids and logprobs of equal length, ids that fit
int32 and the vocabulary, logprobs finite, the prompt the one that was sent. Nothing is padded, guessed or tokenized
again: whatever is wrong raises `BadAnswer`, and a generation that nobody ended on purpose raises `AbortedAnswer`.
No Python loop runs over the tokens of a completion; chat logprobs, which are objects, cost one comprehension.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from rollout_service.core.model import FinishReason, Turn
from rollout_service.engines.faults import MAX_MESSAGE, AbortedAnswer, BadAnswer

_FINISH_REASONS = {reason.value: reason for reason in FinishReason}

_LONE_SURROGATE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
    rb"|(\xed[\xa0-\xbf][\x80-\xbf])",
    re.DOTALL,
)
"""Every JSON escape: a surrogate pair, a lone surrogate (group 1), any other; or a surrogate as raw bytes (group 2)."""


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _TextLogprobs(msgspec.Struct):
    token_logprobs: list[float] | None = None


class _TextChoice(msgspec.Struct):
    finish_reason: Any = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _TextLogprobs | None = None
    text: str | None = None


class _TextAnswer(msgspec.Struct):
    choices: list[_TextChoice]
    usage: _Usage | None = None


class _ChatLogprob(msgspec.Struct, gc=False):
    logprob: float


class _ChatLogprobs(msgspec.Struct):
    content: list[_ChatLogprob] | None = None


class _Message(msgspec.Struct):
    role: str = "assistant"
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _ChatChoice(msgspec.Struct):
    message: _Message
    finish_reason: Any = None
    token_ids: list[int] | None = None
    logprobs: _ChatLogprobs | None = None


class _ChatAnswer(msgspec.Struct):
    choices: list[_ChatChoice]
    prompt_token_ids: list[int] | None = None
    usage: _Usage | None = None


class _AnyChoice(msgspec.Struct):
    finish_reason: Any = None


class _AnyAnswer(msgspec.Struct):
    choices: list[_AnyChoice] = []
    usage: _Usage | None = None


_TEXT = msgspec.json.Decoder(_TextAnswer)
_CHAT = msgspec.json.Decoder(_ChatAnswer)
_ANY = msgspec.json.Decoder(_AnyAnswer)

_A = TypeVar("_A", _TextAnswer, _ChatAnswer)
_C = TypeVar("_C", _TextChoice, _ChatChoice)


def text_turn(raw: bytes, *, sent_ids: array[int] | None, vocab_size: int | None, engine: str) -> Turn:
    """The turn in an answer of `/v1/completions`; `sent_ids` are the prompt's ids where it was sent as ids."""
    answer = _decode(raw, _TEXT)
    choice = _only_choice(answer.choices, answer.usage)
    reason = _finish_reason(choice.finish_reason, choice.token_ids, answer.usage)
    output = _ids(choice.token_ids, "token_ids", vocab_size)
    logprobs = _logprobs(choice.logprobs.token_logprobs if choice.logprobs else None, output)
    _check_usage(answer.usage, output)
    prompt = _prompt_ids(choice.prompt_token_ids, sent_ids, output)
    return Turn(
        prompt_ids=prompt,
        output_ids=output,
        logprobs=logprobs,
        finish_reason=reason,
        text=choice.text or "",
        engine=engine,
    )


def chat_turn(raw: bytes, *, vocab_size: int | None, engine: str) -> Turn:
    """The turn in an answer of `/v1/chat/completions`; its message has tool_calls only where there are some."""
    answer = _decode(raw, _CHAT)
    choice = _only_choice(answer.choices, answer.usage)
    reason = _finish_reason(choice.finish_reason, choice.token_ids, answer.usage)
    output = _ids(choice.token_ids, "token_ids", vocab_size)
    content = choice.logprobs.content if choice.logprobs else None
    logprobs = _logprobs(None if content is None else [entry.logprob for entry in content], output)
    _check_usage(answer.usage, output)
    message: dict[str, Any] = {"role": choice.message.role, "content": choice.message.content}
    if choice.message.tool_calls:
        message["tool_calls"] = choice.message.tool_calls
    return Turn(
        prompt_ids=_prompt_ids(answer.prompt_token_ids, None, output),
        output_ids=output,
        logprobs=logprobs,
        finish_reason=reason,
        text=choice.message.content or "",
        message=message,
        engine=engine,
    )


def error_message(raw: bytes) -> tuple[str, str | None]:
    """(message, param) of an error body, in any of the shapes engines and the proxies before them have."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return raw[: 4 * MAX_MESSAGE].decode("utf-8", "replace").strip()[:MAX_MESSAGE] or "(empty body)", None
    param = None
    said: Any = body
    if isinstance(body, Mapping):
        said = body.get("error") or body.get("detail") or body.get("message") or body
        if isinstance(said, Mapping):
            param = said.get("param")
            said = said.get("message") or said
    if not isinstance(said, str):
        said = msgspec.json.encode(said).decode()
    return said[:MAX_MESSAGE], param if isinstance(param, str) else None


def _decode(raw: bytes, decoder: msgspec.json.Decoder[_A]) -> _A:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as wrong:
        raise _told_apart(raw, wrong) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as broken:
        # Half a character is not half a body: the ids are whole, so the text gets U+FFFD and the tokens are kept.
        mended = _LONE_SURROGATE.sub(_replacement, raw)
        if mended == raw:
            raise BadAnswer(f"the answer is not JSON: {broken}") from None
    try:
        return decoder.decode(mended)
    except msgspec.ValidationError as wrong:
        raise _told_apart(mended, wrong) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as broken:
        raise BadAnswer(f"the answer is not JSON: {broken}") from None


def _replacement(escape: re.Match[bytes]) -> bytes:
    if escape[1]:
        return rb"\ufffd"
    return b"\xef\xbf\xbd" if escape[2] else escape[0]


def _told_apart(raw: bytes, wrong: msgspec.ValidationError) -> BadAnswer | AbortedAnswer:
    """The fault of an answer with wrong types: an abort may well lack what a completion has."""
    try:
        loose = _ANY.decode(raw)
    except msgspec.DecodeError:
        return BadAnswer(f"the answer has another shape than a completion: {wrong}")
    tokens = _reported(loose.usage)
    if loose.choices and loose.choices[0].finish_reason in ("abort", "error"):
        return AbortedAnswer(f"the engine ended it: finish_reason {loose.choices[0].finish_reason!r}", tokens=tokens)
    return BadAnswer(f"the answer has another shape than a completion: {wrong}", tokens=tokens)


def _reported(usage: _Usage | None) -> int:
    return max(0, usage.completion_tokens or 0) if usage else 0


def _only_choice(choices: Sequence[_C], usage: _Usage | None) -> _C:
    if len(choices) != 1:
        raise BadAnswer(f"{len(choices)} choices where one was asked for", tokens=_reported(usage))
    return choices[0]


def _finish_reason(given: Any, ids: list[int] | None, usage: _Usage | None) -> FinishReason:
    reason = _FINISH_REASONS.get(given) if isinstance(given, str) else None
    if reason is None:
        tokens = len(ids) if ids else _reported(usage)
        raise AbortedAnswer(f"the engine ended it: finish_reason {given!r}"[:200], tokens=tokens)
    return reason


def _ids(given: list[int] | None, name: str, vocab_size: int | None, tokens: int | None = None) -> array[int]:
    if not given:
        raise BadAnswer(f"without {name}", tokens=tokens or 0)
    try:
        ids = array("i", given)
    except OverflowError:
        ids = None
    if ids is None or min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size):
        limit = vocab_size or 2**31
        wrong = next(i for i in given if not 0 <= i < limit)
        raise BadAnswer(f"{name} has {wrong}, outside 0 to {limit - 1}", tokens=tokens or len(given))
    return ids


def _logprobs(given: list[float] | None, output: array[int]) -> array[float]:
    if given is None:
        raise BadAnswer("without logprobs", tokens=len(output))
    if len(given) != len(output):
        raise BadAnswer(f"{len(output)} token_ids but {len(given)} logprobs", tokens=len(output))
    logprobs = array("f", given)
    # float32 overflows to inf, and a sum of float32 in double is finite only where every term is.
    if not math.isfinite(sum(logprobs)):
        raise BadAnswer("a logprob is not finite", tokens=len(output))
    return logprobs


def _check_usage(usage: _Usage | None, output: array[int]) -> None:
    if usage and usage.completion_tokens is not None and usage.completion_tokens != len(output):
        detail = f"usage.completion_tokens is {usage.completion_tokens}, but there are {len(output)} token_ids"
        raise BadAnswer(detail, tokens=max(len(output), usage.completion_tokens))


def _prompt_ids(given: list[int] | None, sent: array[int] | None, output: array[int]) -> array[int]:
    # The vocabulary bounds what is sampled; a prompt may hold placeholders (images) beyond it.
    if sent is None:
        return _ids(given, "prompt_token_ids", None, tokens=len(output))
    if given is not None and _ids(given, "prompt_token_ids", None, tokens=len(output)) != sent:
        raise BadAnswer("prompt_token_ids are not those that were sent", tokens=len(output))
    return sent
