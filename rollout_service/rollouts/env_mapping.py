"""Between an environment's dictionaries and the policy's messages: observation → messages, answer → actions.

What always holds: nothing here waits or keeps state; what cannot be mapped raises ProgramFault, never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_service.rollouts.context import Messages
from rollout_service.rollouts.faults import ProgramFault

TEXT_FIELDS = ("text", "prompt", "message", "content")
"""Fields of an observation that are read as its text, the first one first."""

ObservationMap = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
"""(observation, row) → a text, one message, or a list of messages; an empty one adds nothing to the history."""
ActionMap = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
"""(assistant message, last observation) → an action, or a list of actions that are taken one after the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One thing the policy does in answer to an observation."""

    action: Mapping[str, Any] | None
    """None: the call cannot be given to the environment; `refusal` is what the policy hears instead."""
    refusal: str = ""
    tool_call_id: str | None = None
    """Of the tool call it comes from: the next observation answers that call."""


def default_observation(observation: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
    """`messages` where it is a list of chat messages; else the first of TEXT_FIELDS that holds a text; else the fields
    but `metadata` as compact JSON in their own order, or nothing where there are none.
    """
    messages = observation.get("messages")
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        return messages
    for name in TEXT_FIELDS:
        if isinstance(text := observation.get(name), str) and text:
            return text
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")) if fields else ""


def default_moves(message: Mapping[str, Any]) -> list[Move]:
    """Each tool call is a move whose action is its arguments; an answer without any is `{"message": its text}`."""
    calls = message.get("tool_calls") or []
    if not calls:
        return [Move(action={"message": message.get("content") or ""})]
    return [_tool_move(call) for call in calls]


def moves_of(message: Mapping[str, Any], observation: Mapping[str, Any], action: ActionMap | None) -> list[Move]:
    """What the policy's answer does, by the user's `action` where there is one. At least one move."""
    if action is None:
        return default_moves(message)
    made = action(message, observation)
    actions = [made] if isinstance(made, Mapping) else made
    if not isinstance(actions, list | tuple) or not actions or not all(isinstance(a, Mapping) for a in actions):
        raise ProgramFault(f"program.openenv_action returned {type(made).__name__}, no action or list of actions")
    calls = message.get("tool_calls") or []
    # As many actions as calls: they answer each other. Otherwise nobody can say which observation answers which call.
    ids = [_call_id(call) for call in calls] if len(calls) == len(actions) else [None] * len(actions)
    return [Move(action=dict(one), tool_call_id=call_id) for one, call_id in zip(actions, ids, strict=True)]


def messages_of(
    observation: Mapping[str, Any],
    row: Mapping[str, Any],
    history: Messages,
    *,
    function: ObservationMap | None,
    tool_call_id: str | None,
) -> list[dict[str, Any]]:
    """What an observation adds to the history.

    A text becomes one message: `tool` where it answers a tool call, else `user`. Of messages that begin with the whole
    history so far (environments that keep the conversation themselves), only what follows it is added.
    """
    seen = (function or default_observation)(observation, row)
    if isinstance(seen, str):
        return text_messages(seen, tool_call_id)
    messages = [seen] if isinstance(seen, Mapping) else seen
    if not isinstance(messages, list | tuple) or not all(map(_is_message, messages)):
        name = "program.openenv_observation returned" if function else "the observation is"
        raise ProgramFault(f"{name} {type(seen).__name__}, no text, message or list of messages")
    known = [(message.get("role"), message.get("content")) for message in history]
    told = [(message.get("role"), message.get("content")) for message in messages]
    new = messages[len(known) :] if known and told[: len(known)] == known else messages
    return [dict(message) for message in new]


def text_messages(text: str, tool_call_id: str | None) -> list[dict[str, Any]]:
    """One message; none for an empty text, unless it answers a tool call, which has to be answered."""
    if tool_call_id is not None:
        return [{"role": "tool", "tool_call_id": tool_call_id, "content": text}]
    return [{"role": "user", "content": text}] if text else []


def opening(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The history before the first observation: the row's prompt."""
    if "messages" in row:
        return [dict(message) for message in row["messages"]]
    if "prompt" in row:
        return [{"role": "user", "content": row["prompt"]}]
    raise ProgramFault("an OpenEnv episode is a chat: give the prompt as messages or as a text, not as token ids")


def reset_arguments(row: Mapping[str, Any], *, seed: int, episode_id: str) -> dict[str, Any]:
    """What the environment's reset is given: a seed and an episode id, and over them the row's column `env`."""
    own = row.get("env") or {}
    if not isinstance(own, Mapping):
        raise ProgramFault(f"the column env holds {type(own).__name__}, not an object of arguments for reset")
    return {"seed": seed, "episode_id": episode_id, **own}


def offered_tools(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    """The row's column `tools`: schemas that the policy is offered, as the OpenAI API takes them."""
    tools = row.get("tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ProgramFault(f"the column tools holds {type(tools).__name__}, not a list of tool schemas")
    return tools


def _tool_move(call: Mapping[str, Any]) -> Move:
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError) as error:
        arguments = error
    if isinstance(arguments, dict):
        return Move(action=arguments, tool_call_id=_call_id(call))
    # The policy's mistake and no fault of the environment: it hears of it, and the episode goes on.
    why = "the arguments are not a JSON object"
    return Move(action=None, refusal=json.dumps({"error": why}), tool_call_id=_call_id(call))


def _call_id(call: Mapping[str, Any]) -> str:
    return str(call.get("id") or "")


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)
