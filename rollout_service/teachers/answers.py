"""A teacher's answer to the table of one sample.

What always holds: row t is about the t-th trained token and comes from the very position of that token; it holds the
`top_k` most likely tokens and the sampled one, most likely first, and nothing that the teacher did not say. An answer
with another number of positions, without the sampled token, with ids or logprobs that cannot be such raises
`BadAnswer`; nothing of it is used.

An answer is large (about 80 bytes a candidate, 3 MB for 4,096 tokens of 9) and is decoded in pieces of a millisecond,
so that a thread that decodes lets the event loop have its turn in between. Only finding where positions begin is one
call: 1 ms for each MB.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from itertools import compress
from math import inf

import msgspec

from rollout_service.core.model import TeacherTokens
from rollout_service.core.sequences import TokenSequence
from rollout_service.engines.faults import BadAnswer

PIECE_POSITIONS = 128
LEAST_LOGPROB = -3.4e38
"""Below it a float32 is -inf. vLLM writes -9999.0 where the logprob is -inf."""
MOST_LOGPROB = 1e-3
"""Above it, by more than rounding, it is no logprob: a server with `--logprobs-mode raw_logits`."""
MAX_TOKEN_ID = 2**31 - 1


class _Candidate(msgspec.Struct, gc=False):
    logprob: float


class _Choice(msgspec.Struct):
    prompt_logprobs: list[msgspec.Raw] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_Position = dict[int, _Candidate]

_ANSWER = msgspec.json.Decoder(_Answer)
_POSITIONS = msgspec.json.Decoder(list[_Position | None])


def teacher_tokens(raw: bytes, sequence: TokenSequence, *, teacher_id: str, top_k: int) -> TeacherTokens:
    """The table of `sequence` in an answer of `/v1/completions` to its `input_ids`. Raises BadAnswer."""
    positions = _positions(raw)
    if len(positions) != len(sequence.input_ids):
        raise BadAnswer(f"prompt_logprobs has {len(positions)} positions for {len(sequence.input_ids)} tokens")
    trained = list(compress(positions, sequence.completion_mask))
    sampled = list(compress(sequence.input_ids, sequence.completion_mask))
    columns = top_k + 1
    ids: array[int] = array("i")
    logprobs: array[float] = array("f")
    for start in range(0, len(trained), PIECE_POSITIONS):
        stop = start + PIECE_POSITIONS
        for token, candidates in zip(sampled[start:stop], _decoded(trained[start:stop]), strict=True):
            row = _ranked(candidates, token, top_k)
            filler = columns - len(row)
            ids.extend([candidate for candidate, _ in row] + [-1] * filler)
            logprobs.extend([logprob for _, logprob in row] + [-inf] * filler)
    return TeacherTokens(teacher_id=teacher_id, ids=ids, logprobs=logprobs, columns=columns)


def _positions(raw: bytes) -> list[msgspec.Raw]:
    try:
        choices = _ANSWER.decode(raw).choices
    except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
        raise BadAnswer(f"the answer is no completion: {wrong}") from None
    if len(choices) != 1:
        raise BadAnswer(f"{len(choices)} choices where one was asked for")
    if choices[0].prompt_logprobs is None:
        raise BadAnswer("without prompt_logprobs")
    return choices[0].prompt_logprobs


def _decoded(pieces: list[msgspec.Raw]) -> list[_Position | None]:
    try:
        return _POSITIONS.decode(b"[" + b",".join(pieces) + b"]")
    except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
        raise BadAnswer(f"prompt_logprobs is no list of token ids and logprobs: {wrong}") from None


def _ranked(candidates: Mapping[int, _Candidate] | None, sampled: int, top_k: int) -> list[tuple[int, float]]:
    """(id, logprob) of the candidates, most likely first, the sampled one among them; `top_k` + 1 at most."""
    if candidates is None or sampled not in candidates:
        raise BadAnswer(f"prompt_logprobs lacks the sampled token {sampled}")
    row = [(token, candidate.logprob) for token, candidate in candidates.items()]
    row.sort(key=lambda pair: pair[1], reverse=True)  # equal ones stay in the teacher's own order
    if len(row) > top_k:
        likely, others = row[:top_k], row[top_k:]
        row = likely + [pair for pair in others if pair[0] == sampled]
    if not LEAST_LOGPROB < row[-1][1] <= row[0][1] < MOST_LOGPROB:
        wrong = row[-1][1] if row[0][1] < MOST_LOGPROB else row[0][1]
        raise BadAnswer(f"{wrong:g} is no logprob (a server with --logprobs-mode raw_logits or processed_logits?)")
    if min(candidates) < 0 or max(candidates) > MAX_TOKEN_ID:
        raise BadAnswer(f"{min(candidates)} or {max(candidates)} is no token id")
    return row
