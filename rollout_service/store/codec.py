"""Payloads as bytes: prompts, settled rollouts and scores, exactly as they were.

What always holds: `decode_x(encode_x(value)) == value`, float32 logprobs bit for bit, and any JSON value in columns and
messages (integers of any size included). Token arrays travel as raw little-endian bytes, so no work is done per token.
The first byte names the format; bytes of an unknown format or a broken payload raise `CodecError`. Decoding makes plain
values only and never executes anything.

Sequences of turns and weight versions come back as tuples, messages as lists of dicts.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from rollout_service.core.model import (
    FORK_THRESHOLD_TOKENS,
    FailedRollout,
    FailureReason,
    FinishedRollout,
    FinishReason,
    Prompt,
    TeacherTokens,
    Turn,
)
from rollout_service.core.records import GroupScore, RowScore

FORMAT = 1
"""First byte of every payload. A new layout gets a new number; old numbers stay readable."""

_JSON_EXT = 1
"""msgpack extension code of a value kept as JSON text, because msgpack itself cannot hold it."""

_BIG_ENDIAN = sys.byteorder == "big"

T = TypeVar("T")


class CodecError(ValueError):
    """These bytes are no payload this version can read."""


class _Turn(msgspec.Struct, array_like=True, frozen=True, gc=False):
    prompt_ids: memoryview
    output_ids: memoryview
    logprobs: memoryview
    finish_reason: FinishReason
    text: str
    message: Any
    weight_versions: Any
    engine: str
    version: int | None = None


class _Finished(msgspec.Struct, array_like=True, frozen=True, gc=False):
    prompt: Any
    completion: Any
    turns: list[_Turn]
    metrics: dict[str, float]
    logprobs_mode: str | None
    sampling: Any = None
    reward: float | None = None
    fork_threshold: int = FORK_THRESHOLD_TOKENS


class _Failed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    reason: FailureReason
    error: str
    engine: str | None
    attempts: int
    wasted_tokens: int


class _Prompt(msgspec.Struct, array_like=True, frozen=True, gc=False):
    prompt_id: str
    epoch: int
    messages: Any
    text: Any
    token_ids: memoryview | None
    columns: Any
    num_generations: int
    sampling: Any


class _Teacher(msgspec.Struct, array_like=True, frozen=True, gc=False):
    teacher_id: str
    ids: memoryview
    logprobs: memoryview
    columns: int


class _RowScore(msgspec.Struct, array_like=True, frozen=True, gc=False):
    reward: float | None
    rewards: dict[str, float | None]
    advantage: float
    teacher: list[_Teacher] = []


class _Score(msgspec.Struct, array_like=True, frozen=True, gc=False):
    rows: dict[int, _RowScore]
    mean: float | None
    std: float | None
    zero_variance: bool
    errors: dict[str, str]


def _plain(value: Any) -> Any:
    """Mappings and sequences msgspec does not know by type."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _from_ext(code: int, data: memoryview) -> Any:
    if code != _JSON_EXT:
        raise CodecError(f"unknown extension {code}")
    return json.loads(bytes(data))


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_FINISHED = msgspec.msgpack.Decoder(_Finished, ext_hook=_from_ext)
_FAILED = msgspec.msgpack.Decoder(_Failed)
_PROMPT = msgspec.msgpack.Decoder(_Prompt, ext_hook=_from_ext)
_SCORE = msgspec.msgpack.Decoder(_Score)


def encode_finished(rollout: FinishedRollout) -> bytearray:
    """All but the index, which is the key the payload is stored under."""
    try:
        return _pack(_finished(rollout, _same))
    except (OverflowError, UnicodeEncodeError):  # a JSON value msgpack cannot hold: rare, so tried second
        return _pack(_finished(rollout, _as_json))


def decode_finished(data: bytes, index: int) -> FinishedRollout:
    shape = _unpack(_FINISHED, data)
    return FinishedRollout(
        index=index,
        prompt=shape.prompt,
        completion=shape.completion,
        turns=tuple(
            Turn(
                prompt_ids=_ints(turn.prompt_ids),
                output_ids=_ints(turn.output_ids),
                logprobs=_floats(turn.logprobs),
                finish_reason=turn.finish_reason,
                text=turn.text,
                message=turn.message,
                weight_versions=tuple(turn.weight_versions),
                engine=turn.engine,
                version=turn.version,
            )
            for turn in shape.turns
        ),
        metrics=shape.metrics,
        logprobs_mode=shape.logprobs_mode,
        sampling=shape.sampling or {},
        reward=shape.reward,
        fork_threshold=shape.fork_threshold,
    )


def encode_failed(rollout: FailedRollout) -> bytearray:
    """All but the index. The error is for people: what is no valid Unicode in it is replaced."""
    return _pack(
        _Failed(
            reason=rollout.reason,
            error=printable(rollout.error),
            engine=rollout.engine,
            attempts=rollout.attempts,
            wasted_tokens=rollout.wasted_tokens,
        )
    )


def decode_failed(data: bytes, index: int) -> FailedRollout:
    shape = _unpack(_FAILED, data)
    return FailedRollout(
        index=index,
        reason=shape.reason,
        error=shape.error,
        engine=shape.engine,
        attempts=shape.attempts,
        wasted_tokens=shape.wasted_tokens,
    )


def encode_prompt(prompt: Prompt) -> bytearray:
    try:
        return _pack(_prompt(prompt, _same))
    except (OverflowError, UnicodeEncodeError):
        return _pack(_prompt(prompt, _as_json))


def decode_prompt(data: bytes) -> Prompt:
    shape = _unpack(_PROMPT, data)
    return Prompt(
        prompt_id=shape.prompt_id,
        epoch=shape.epoch,
        messages=shape.messages,
        text=shape.text,
        token_ids=None if shape.token_ids is None else _ints(shape.token_ids),
        columns=shape.columns,
        num_generations=shape.num_generations,
        sampling=shape.sampling,
    )


def encode_score(score: GroupScore) -> bytearray:
    rows = {
        index: _RowScore(
            reward=row.reward,
            rewards=dict(row.rewards),
            advantage=row.advantage,
            teacher=[
                _Teacher(teacher_id=t.teacher_id, ids=_raw(t.ids), logprobs=_raw(t.logprobs), columns=t.columns)
                for t in row.teacher
            ],
        )
        for index, row in score.rows.items()
    }
    errors = {name: printable(error) for name, error in score.errors.items()}
    return _pack(_Score(rows=rows, mean=score.mean, std=score.std, zero_variance=score.zero_variance, errors=errors))


def decode_score(data: bytes) -> GroupScore:
    shape = _unpack(_SCORE, data)
    return GroupScore(
        rows={
            index: RowScore(
                reward=row.reward,
                rewards=row.rewards,
                advantage=row.advantage,
                teacher=tuple(
                    TeacherTokens(
                        teacher_id=t.teacher_id, ids=_ints(t.ids), logprobs=_floats(t.logprobs), columns=t.columns
                    )
                    for t in row.teacher
                ),
            )
            for index, row in shape.rows.items()
        },
        mean=shape.mean,
        std=shape.std,
        zero_variance=shape.zero_variance,
        errors=shape.errors,
    )


def printable(text: str) -> str:
    """`text` itself, or with its lone surrogates replaced where it has any (no store can hold those)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


def _finished(rollout: FinishedRollout, json_value: Any) -> _Finished:
    return _Finished(
        prompt=json_value(rollout.prompt),
        completion=json_value(rollout.completion),
        turns=[
            _Turn(
                prompt_ids=_raw(turn.prompt_ids),
                output_ids=_raw(turn.output_ids),
                logprobs=_raw(turn.logprobs),
                finish_reason=turn.finish_reason,
                text=turn.text,
                message=json_value(turn.message),
                weight_versions=json_value(turn.weight_versions),
                engine=turn.engine,
                version=turn.version,
            )
            for turn in rollout.turns
        ],
        metrics=rollout.metrics,  # type: ignore[arg-type]  # only encoded: any mapping will do
        logprobs_mode=rollout.logprobs_mode,
        sampling=json_value(rollout.sampling),
        reward=rollout.reward,
        fork_threshold=rollout.fork_threshold,
    )


def _prompt(prompt: Prompt, json_value: Any) -> _Prompt:
    return _Prompt(
        prompt_id=prompt.prompt_id,
        epoch=prompt.epoch,
        messages=json_value(prompt.messages),
        text=json_value(prompt.text),
        token_ids=None if prompt.token_ids is None else _raw(prompt.token_ids),
        columns=json_value(prompt.columns),
        num_generations=prompt.num_generations,
        sampling=json_value(prompt.sampling),
    )


def _same(value: Any) -> Any:
    return value


def _as_json(value: Any) -> Any:
    return msgspec.msgpack.Ext(_JSON_EXT, json.dumps(value, default=_plain).encode("ascii"))


def _pack(shape: msgspec.Struct) -> bytearray:
    data = bytearray((FORMAT,))
    _ENCODER.encode_into(shape, data, 1)
    return data


def _unpack(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    if not data or data[0] != FORMAT:
        raise CodecError(f"payload format {data[0] if data else 'none'}; this version reads {FORMAT}")
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise CodecError(f"broken payload: {exc}") from exc


def _raw(values: array[int] | array[float]) -> memoryview:
    if _BIG_ENDIAN:
        values = values[:]
        values.byteswap()
    return memoryview(values)


def _ints(raw: memoryview) -> array[int]:
    values = array("i")
    _fill(values, raw)
    return values


def _floats(raw: memoryview) -> array[float]:
    values = array("f")
    _fill(values, raw)
    return values


def _fill(values: array[int] | array[float], raw: memoryview) -> None:
    if raw.nbytes % values.itemsize:
        raise CodecError("broken payload: half a token")
    values.frombytes(raw)
    if _BIG_ENDIAN:
        values.byteswap()
