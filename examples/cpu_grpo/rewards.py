"""The demo's reward: something a model of 120,000 random parameters learns within 40 steps."""

from __future__ import annotations

from typing import Any


def lowercase_share(completions: list[str], **columns: Any) -> list[float]:
    """The share of characters a-z in each completion, 0 to 1; an empty completion gets 0."""
    return [sum("a" <= letter <= "z" for letter in text) / len(text) if text else 0.0 for text in completions]
