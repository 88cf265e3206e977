"""What need not be tried on every store."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """PostgreSQL is tried with the hardest way to come back to a store only: it has its state elsewhere."""
    twice = [item for item in items if _is_twice(item)]
    if twice:
        config.hook.pytest_deselected(items=twice)
        items[:] = [item for item in items if item not in set(twice)]


def _is_twice(item: pytest.Item) -> bool:
    chosen = getattr(getattr(item, "callspec", None), "params", {})
    return chosen.get("medium") == "postgres" and chosen.get("again") in ("as it is", "reopened")
