"""Lease answers as the orchestrator gives them to the API: built by hand, and at random."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from rollout_service.core.group import Group, Lease
from rollout_service.core.model import (
    FailedRollout,
    FailureReason,
    FinishedRollout,
    FinishReason,
    GroupState,
    Prompt,
    TeacherTokens,
    Turn,
)
from rollout_service.core.records import GroupPayload, GroupScore, RowScore
from rollout_service.orchestrator.views import LeaseAnswer, LeaseStatus

VERSION = 7
SAMPLING = {"temperature": 1.0, "max_tokens": 64}


def turn(prompt_ids: Sequence[int], output_ids: Sequence[int], **more: Any) -> Turn:
    facts = {
        "logprobs": array("f", [-(token % 8) / 8 for token in output_ids]),
        "finish_reason": FinishReason.STOP,
        "text": "t",
        "engine": "http://engine",
    }
    return Turn(prompt_ids=array("i", prompt_ids), output_ids=array("i", output_ids), **(facts | more))


def rollout(index: int, *turns: Turn, **more: Any) -> FinishedRollout:
    return FinishedRollout(index=index, **({"prompt": "p", "completion": "c", "turns": turns} | more))


def payload(
    seq: int, rollouts: Sequence[FinishedRollout | FailedRollout], rows: dict[int, RowScore] | None = None, **more: Any
) -> GroupPayload:
    """A scored group; without `rows`, survivor i has reward i."""
    rows = rows if rows is not None else {r.index: row_score(float(r.index)) for r in rollouts}
    group = Group(
        seq=seq,
        prompt_id=f"p{seq}",
        epoch=0,
        num_generations=len(rollouts),
        state=GroupState.LEASED,
        version=VERSION - 1,
        waiting=(),
        submitted_at=0.0,
        changed_at=0.0,
    )
    return GroupPayload(
        group=group,
        prompt=Prompt(prompt_id=f"p{seq}", text="p", num_generations=len(rollouts), **more),
        rollouts={r.index: r for r in rollouts},
        score=GroupScore(rows=rows, mean=0.5, std=None, zero_variance=False),
    )


def row_score(reward: float | None, advantage: float = 0.25) -> RowScore:
    return RowScore(reward=reward, rewards={"accuracy": reward}, advantage=advantage)


def taught(sampled: Sequence[int], columns: int, *further: Sequence[int], teacher_id: str = "t") -> RowScore:
    """A score by a teacher: candidate i of token x is x + 100 * i, logprob -i / 8; `further` samples' tokens too."""
    tables = [
        TeacherTokens(
            teacher_id=teacher_id,
            ids=array("i", [token + 100 * i for token in tokens for i in range(columns)]),
            logprobs=array("f", [-i / 8 for _ in tokens for i in range(columns)]),
            columns=columns,
        )
        for tokens in (sampled, *further)
    ]
    return RowScore(reward=None, rewards={}, advantage=0.0, teacher=tables)


def answer(*payloads: GroupPayload, status: LeaseStatus = LeaseStatus.OK) -> LeaseAnswer:
    """`ok` with payloads; `status` says which other one without."""
    if not payloads:
        return LeaseAnswer(status=status, policy_version=VERSION, outstanding=0)
    lease = Lease(
        lease_id="lease-1",
        max_groups=len(payloads),
        min_groups=1,
        lease_s=600,
        policy_version=VERSION,
        created_at=0.0,
        expires_at=600.25,
        groups=tuple((p.group.seq, p.group.attempt) for p in payloads),
    )
    return LeaseAnswer(status=LeaseStatus.OK, policy_version=VERSION, outstanding=9, lease=lease, payloads=payloads)


def even_answer(groups: int, rollouts: int, tokens: int, *, prompt_tokens: int = 16) -> LeaseAnswer:
    """`groups` groups of `rollouts` single-turn rollouts of `tokens` tokens each, with texts of four bytes a token."""
    ids = array("i", [(7919 * t) % 150_000 for t in range(tokens)])
    made = turn(ids[:prompt_tokens], ids[prompt_tokens:], text="word" * (tokens - prompt_tokens))
    return answer(
        *(
            payload(seq, [rollout(index, made, completion=made.text) for index in range(rollouts)])
            for seq in range(1, groups + 1)
        )
    )


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ['"\\', "\u0000\n", "🙂ü\u2028"]
)
reals = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | reals | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@st.composite
def turns(draw: st.DrawFn) -> list[Turn]:
    """One to three turns, each of which goes on with the history before it or rewrites it."""
    made: list[Turn] = []
    history: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        prompt_ids = draw(ids) if draw(st.booleans()) else history + draw(ids)
        output_ids = draw(ids)
        logprobs = [draw(st.floats(-(2.0**100), 0.0, width=32)) for _ in output_ids]
        spans = draw(st.lists(st.fixed_dictionaries({"version": texts, "start": st.integers(0, 9)}), max_size=1))
        reason = draw(st.sampled_from(FinishReason))
        made.append(
            turn(prompt_ids, output_ids, logprobs=array("f", logprobs), weight_versions=spans, finish_reason=reason)
        )
        history = prompt_ids + output_ids
    return made


@st.composite
def payloads(draw: st.DrawFn, seq: int) -> GroupPayload:
    """A scored group of one to four rows, some of them failed or unscored."""
    rollouts: list[FinishedRollout | FailedRollout] = []
    rows: dict[int, RowScore] = {}
    for index in range(draw(st.integers(1, 4))):
        if index and draw(st.integers(0, 3)) == 0:
            rollouts.append(FailedRollout(index=index, reason=FailureReason.TIMEOUT, error="late"))
            continue
        metrics = draw(st.dictionaries(texts, st.floats(), max_size=2))  # those that are no numbers are left out
        about = {"prompt": draw(json_values), "completion": draw(texts), "metrics": metrics}
        rollouts.append(rollout(index, *draw(turns()), **about))
        if draw(st.booleans()):
            rewards = draw(st.dictionaries(texts, st.none() | reals, max_size=2))
            rows[index] = RowScore(reward=draw(st.none() | reals), rewards=rewards, advantage=draw(reals))
    columns = draw(st.dictionaries(texts, json_values, max_size=2))
    return payload(seq, rollouts, rows, columns=columns, sampling=draw(st.sampled_from([{}, {"max_tokens": 9}])))


@st.composite
def answers(draw: st.DrawFn) -> LeaseAnswer:
    made = [draw(payloads(seq)) for seq in range(1, 1 + draw(st.integers(0, 3)))]
    return answer(*made, status=draw(st.sampled_from([LeaseStatus.EMPTY, LeaseStatus.EXHAUSTED])))
