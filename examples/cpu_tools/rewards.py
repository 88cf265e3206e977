"""The demo's reward: whether the last thing the policy said is the right number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def right(completions: Sequence[Sequence[Mapping[str, Any]]], answer: Sequence[int], **columns: Any) -> list[float]:
    """1.0 where the last message is the policy's and says exactly the column `answer`, else 0.0.

    A completion is all the messages of a rollout: the policy's, and what the tool answered between them.
    """
    return [
        float(messages[-1]["role"] == "assistant" and messages[-1]["content"] == str(number))
        for messages, number in zip(completions, answer, strict=True)
    ]
