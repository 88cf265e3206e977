"""A group's samples token by token, for people. Pure but for the texts, which come in as an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollout_service.api.live_schemas import GroupTokensAnswer, TokensAnswer
from rollout_service.api.wire import sequences_of
from rollout_service.core.model import FinishedRollout
from rollout_service.core.records import GroupPayload
from rollout_service.core.sequences import TokenSequence


def sequences(payload: GroupPayload, index: int | None) -> list[tuple[FinishedRollout, TokenSequence]]:
    """The samples of every finished rollout, or of row `index`."""
    return [
        (rollout, sequence)
        for row, rollout in sorted(payload.rollouts.items())
        if isinstance(rollout, FinishedRollout) and index in (None, row)
        for sequence in sequences_of(rollout)
    ]


def tokens_answer(
    payload: GroupPayload, found: Sequence[tuple[FinishedRollout, TokenSequence]], texts: Mapping[int, str]
) -> GroupTokensAnswer:
    """`texts`: id → text, as far as an engine can tell."""
    group = payload.group
    return GroupTokensAnswer(
        group_id=group.group_id,
        attempt=group.attempt,
        samples=[_sample(payload, rollout, sequence, texts) for rollout, sequence in found],
    )


def _sample(
    payload: GroupPayload, rollout: FinishedRollout, sequence: TokenSequence, texts: Mapping[int, str]
) -> TokensAnswer:
    score = payload.score.rows.get(rollout.index) if payload.score else None
    return TokensAnswer(
        index=rollout.index,
        policy_version=payload.group.version or 0,
        reward=score.reward if score else None,
        rewards=dict(score.rewards) if score else {},
        advantage=score.advantage if score else None,
        scored=score is not None and (score.reward is not None or bool(score.teacher)),
        finish_reason=rollout.finish_reason.value,
        input_ids=list(sequence.input_ids),
        completion_mask=list(sequence.completion_mask),
        old_log_probs=list(sequence.old_log_probs),
        tokens=[texts.get(id_) for id_ in sequence.input_ids],
    )
