"""Turns to training rows: every trained token is one the engine sampled, with the engine's own logprob beside it.

What always holds: `input_ids`, `completion_mask` and `old_log_probs` of a sequence have equal lengths; the mask is 1 on
sampled tokens only, and on each of them in one sequence at most; a token is trained in the very context it was sampled
in; the logprob is 0.0 wherever the mask is 0; nothing is padded or re-tokenized.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_service.core.model import FORK_THRESHOLD_TOKENS, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSequence:
    """One training row of L tokens."""

    input_ids: array[int]
    """int32 (L,)."""
    completion_mask: bytes
    """uint8 (L,): 1 on tokens to train, 0 on context."""
    old_log_probs: array[float]
    """float32 (L,): the engine's logprob where the mask is 1, 0.0 elsewhere."""

    @property
    def trained(self) -> int:
        """T: tokens to train."""
        return self.completion_mask.count(1)


def token_sequences(turns: Sequence[Turn], *, fork_threshold: int = FORK_THRESHOLD_TOKENS) -> tuple[TokenSequence, ...]:
    """One sequence while each turn's prompt goes on with what stands before it; a new one where history was rewritten.

    Where a turn's prompt differs from what is held only within the last answer and by fewer than `fork_threshold`
    tokens (a template that renders an answer in another way than it was sampled), the answer's tail is replaced by what
    the prompt has, as context, and the sequence goes on: those sampled tokens are trained nowhere. Any other difference
    starts a sequence of its own with the rewritten history as context. The rule is that of TRL 1.16's async worker.
    """
    built: list[_Builder] = []
    for turn in turns:
        if not built or not built[-1].takes(turn, fork_threshold):
            built.append(_Builder())
        built[-1].add(turn)
    # A sequence whose answers were all replaced before it was left has nothing to train.
    return tuple(builder.made() for builder in built if 1 in builder.mask or builder is built[-1])


class _Builder:
    __slots__ = ("answer_at", "ids", "logprobs", "mask")

    def __init__(self) -> None:
        self.ids: array[int] = array("i")
        self.mask = bytearray()
        self.logprobs: array[float] = array("f")
        self.answer_at = 0
        """Where the last answer begins."""

    def takes(self, turn: Turn, fork_threshold: int) -> bool:
        kept = _common_prefix(self.ids, turn.prompt_ids)
        drift = len(self.ids) - kept
        return drift == 0 or (kept >= self.answer_at and drift < fork_threshold)

    def add(self, turn: Turn) -> None:
        kept = _common_prefix(self.ids, turn.prompt_ids)
        context = turn.prompt_ids[kept:]
        del self.ids[kept:], self.mask[kept:], self.logprobs[kept:]
        self.ids += context
        self.mask += bytes(len(context))
        self.logprobs += array("f", bytes(4 * len(context)))
        self.answer_at = len(self.ids)
        self.ids += turn.output_ids
        self.mask += b"\x01" * len(turn.output_ids)
        self.logprobs += turn.logprobs

    def made(self) -> TokenSequence:
        return TokenSequence(input_ids=self.ids, completion_mask=bytes(self.mask), old_log_probs=self.logprobs)


def _common_prefix(a: array[int], b: array[int]) -> int:
    """How many ids at the beginning are the same; compares slices, which costs no Python step a token."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # the first difference is in [low, high)
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
