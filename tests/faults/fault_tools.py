"""Tools of the fault tests."""

from __future__ import annotations

import asyncio


def add(a: int, b: int) -> int:
    """Adds two integers."""
    return a + b


async def cancels() -> str:
    """Raises what looks like a cancellation."""
    raise asyncio.CancelledError("not yours")
