"""The reward of the compose file's example; put your own functions here. TRL's signature."""

from __future__ import annotations

from typing import Any


def brevity(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """1 for an empty completion, falling to 0 at 512 tokens."""
    return [max(0.0, 1.0 - len(ids) / 512) for ids in completion_ids]
