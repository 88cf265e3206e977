"""Turns to training rows: every trained token is one the engine sampled, with the engine's own logprob beside it.

What always holds: `input_ids`, `completion_mask` and `old_log_probs` of a sequence have equal lengths; the mask is 1
exactly on sampled tokens; the logprob is 0.0 wherever the mask is 0; nothing is padded or re-tokenized.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_service.core.model import Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSequence:
    """One training row of L tokens."""

    input_ids: array[int]
    """int32 (L,)."""
    completion_mask: bytes
    """uint8 (L,): 1 on tokens to train, 0 on context."""
    old_log_probs: array[float]
    """float32 (L,): the engine's logprob where the mask is 1, 0.0 elsewhere."""


def token_sequences(turns: Sequence[Turn]) -> tuple[TokenSequence, ...]:
    """One sequence while each turn's prompt starts with all that stands before it; a new one where it does not.

    A turn whose prompt rewrites history starts a sequence of its own, with the rewritten history as context, so that no
    sampled token is trained twice and none is trained in a context it was not sampled in.
    """
    built: list[TokenSequence] = []
    for turn in turns:
        last = built[-1] if built else None
        if last is not None and turn.prompt_ids[: len(last.input_ids)] == last.input_ids:
            built[-1] = _extended(last, turn)
        else:
            built.append(_extended(_EMPTY, turn))
    return tuple(built)


_EMPTY = TokenSequence(input_ids=array("i"), completion_mask=b"", old_log_probs=array("f"))


def _extended(before: TokenSequence, turn: Turn) -> TokenSequence:
    context = turn.prompt_ids[len(before.input_ids) :]
    return TokenSequence(
        input_ids=before.input_ids + context + turn.output_ids,
        completion_mask=before.completion_mask + bytes(len(context)) + b"\x01" * len(turn.output_ids),
        old_log_probs=before.old_log_probs + array("f", bytes(4 * len(context))) + turn.logprobs,
    )
