"""The reward of this example: short completions are better."""

from __future__ import annotations

from typing import Any


def brevity(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """1 / number of tokens, for each completion."""
    return [1.0 / max(1, len(ids)) for ids in completion_ids]
