"""Programs of the fault tests."""

from __future__ import annotations

import threading
from typing import Any

from rollout_service.rollouts import Context, ThreadContext

LET_GO = threading.Event()


async def two_turns(ctx: Context, row: dict[str, Any]) -> None:
    """Asks twice; the reward is what the second answer says, a tenth of it a metric."""
    first = await ctx.generate(row["prompt_token_ids"])
    second = await ctx.generate([*first.prompt_ids, *first.ids, *b";p:again;"])
    value = float(second.text.partition("=")[2].partition(";")[0])
    ctx.reward(value)
    ctx.metric("tenth", value / 10)


def blocks(ctx: ThreadContext, row: dict[str, Any]) -> None:
    ctx.generate(row["prompt_token_ids"])
    ctx.reward(1.0)


def ignores_its_end(ctx: ThreadContext, row: dict[str, Any]) -> None:
    ctx.generate(row["prompt_token_ids"])
    LET_GO.wait()


async def fails_on_row_one(ctx: Context, row: dict[str, Any]) -> None:
    await ctx.generate(row["prompt_token_ids"])
    if ctx.index == 1:
        raise RuntimeError("unlucky row")
    ctx.reward(float(ctx.index))
