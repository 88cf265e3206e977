"""The built-in program: the policy answers, its tool calls are made, it reads what came of them, and so on.

What always holds: a rollout ends with an answer of the policy's, after `max_turns` of them at most; nothing a tool does
ends a rollout; every call of a turn is made at the same time, and answered in the order the policy asked.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rollout_service.core.model import FailureReason
from rollout_service.engines import GenerationFailed
from rollout_service.rollouts.context import Context
from rollout_service.rollouts.faults import ProgramFault
from rollout_service.rollouts.program import AsyncProgram, Row
from rollout_service.rollouts.tools import ToolBox


def tool_program(tools: ToolBox, *, max_turns: int) -> AsyncProgram:
    """For ProgramRunner. Samples get the metrics `tool_calls`, `tool_failures` and, where it was so, `context_full`."""

    async def program(ctx: Context, row: Row) -> list[dict[str, Any]]:
        asked = _messages(row)
        history = list(asked)
        calls = failures = 0
        for turn in range(1, max_turns + 1):
            try:
                reply = await ctx.chat(history, tools=tools.schemas)
            except GenerationFailed as failed:
                if failed.reason is not FailureReason.PROMPT_TOO_LONG or turn == 1:
                    raise
                # What the tools said fills the context: the rollout ends here, with all it has sampled.
                ctx.metric("context_full", 1)
                break
            history.append(reply.message)
            if not reply.tool_calls or reply.truncated or turn == max_turns:
                break
            answers = await asyncio.gather(*(tools.answer(call) for call in reply.tool_calls))
            history += [answer.message for answer in answers]
            calls += len(answers)
            failures += sum(answer.failed for answer in answers)
        ctx.metric("tool_calls", calls)
        ctx.metric("tool_failures", failures)
        return history[len(asked) :]

    return program


def _messages(row: Row) -> list[dict[str, Any]]:
    if "messages" in row:
        return list(row["messages"])
    if "prompt" in row:
        return [{"role": "user", "content": row["prompt"]}]
    raise ProgramFault("tools are for prompts given as messages or as text, not as token ids")
