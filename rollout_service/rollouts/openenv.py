"""Rollouts that are episodes on an OpenEnv server: reset, then observation, answer and step in turns.

What always holds: one rollout is one session, closed when the rollout ends for whatever reason; the rewards are the
environment's own, never made up here; a full or absent server makes a rollout wait and not fail, until its deadline;
an episode whose connection was lost is never gone on with.

Rules that rows and environments can rely on:
- The history starts with the row's prompt; each observation adds messages (`env_mapping`), each answer is one turn.
- `reset` gets `seed`, `episode_id` and over them the fields of the row's column `env`.
- The reward is the sum of what the steps gave ("sum"), or the last they gave ("last"). `null` is no reward: where no
  step gave any, the rollout is unscored. What the reset gave does not count: the policy had no part in it.
- An episode ends with `done`, after `max_turns` answers, or where its history fills the engine's context; the metrics
  `env_done` and `context_full` tell them apart, and all keep their reward.
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from rollout_service.core.model import FailureReason
from rollout_service.engines import GenerationFailed
from rollout_service.errors import ConfigError
from rollout_service.rollouts.context import Context
from rollout_service.rollouts.env_mapping import (
    ActionMap,
    Move,
    ObservationMap,
    messages_of,
    moves_of,
    offered_tools,
    opening,
    reset_arguments,
    text_messages,
)
from rollout_service.rollouts.env_session import Client, EnvironmentFault, Session, Unavailable, make_clients

BACKOFF_BASE_S = 0.1
BACKOFF_CAP_S = 5.0
"""Between two attempts at a session; each rollout takes off up to a half, so that they do not come all at once."""
SEEDS = 2_147_483_648
"""Seeds are below this: they fit a signed 32-bit integer, the narrowest that environments' random generators take."""

Row = Mapping[str, Any]
SeedBy = Literal["rollout", "group"]
RewardRule = Literal["sum", "last"]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rules:
    """How episodes are made."""

    url: str
    max_turns: int
    step_timeout_s: float
    action: ActionMap | None
    observation: ObservationMap | None
    reward: RewardRule
    seed_by: SeedBy
    client: Callable[[], Client]


def openenv_program(
    url: str,
    *,
    max_turns: int,
    step_timeout_s: float,
    action: ActionMap | None = None,
    observation: ObservationMap | None = None,
    reward: RewardRule = "sum",
    seed_by: SeedBy = "rollout",
    client: Callable[[], Client] | None = None,
) -> Callable[[Context, Row], Awaitable[None]]:
    """An `async def program(ctx, row)` for ProgramRunner that plays an episode on the server at `url`.

    `step_timeout_s` bounds each connect, reset and step. `action` and `observation` replace the default mapping; they
    are plain functions and run on the event loop, so they must be quick. `client` makes a session's client; the
    default is openenv's. Raises ConfigError where openenv cannot be imported or a mapping is `async def`.
    """
    for name, function in (("openenv_action", action), ("openenv_observation", observation)):
        if function is not None and inspect.iscoroutinefunction(function):
            raise ConfigError(f"program.{name}: a plain function is expected, not async def")
    rules = _Rules(
        url=url,
        max_turns=max_turns,
        step_timeout_s=step_timeout_s,
        action=action,
        observation=observation,
        reward=reward,
        seed_by=seed_by,
        client=client or make_clients(url, step_timeout_s=step_timeout_s),
    )
    reach = _Reach(url)

    async def program(ctx: Context, row: Row) -> None:
        await _Episode(ctx, row, rules, reach).play()

    return program


def seed_of(ctx: Context, seed_by: SeedBy) -> int:
    """The seed of a rollout, in [0, SEEDS): the same for the same group, attempt and, by "rollout", index."""
    name = f"{ctx.group_id}.{ctx.attempt}"
    if seed_by == "rollout":
        name += f".{ctx.index}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) % SEEDS


class _Reach:
    """Says once when the server is not to be had, and once when it is again, not once for every rollout."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._trouble = ""

    def lost(self, error: Unavailable) -> None:
        kind = "openenv_full" if error.full else "openenv_unreachable"
        if kind != self._trouble:
            self._trouble = kind
            log.warning(kind, url=self._url, error=str(error)[:200])

    def found(self) -> None:
        if self._trouble:
            self._trouble = ""
            log.info("openenv_back", url=self._url)


class _Episode:
    """One rollout's."""

    def __init__(self, ctx: Context, row: Row, rules: _Rules, reach: _Reach) -> None:
        self._ctx, self._row, self._rules, self._reach = ctx, row, rules, reach
        self._history = opening(row)
        self._tools = offered_tools(row)
        self._steps = 0
        self._rewards: list[float] = []
        self._seen: Mapping[str, Any] = {}
        """The last observation."""

    async def play(self) -> None:
        """Until `done` or max_turns. Raises EnvironmentFault, ProgramFault and what `ctx` raises."""
        session, first = await self._opened()
        try:
            if first.done:
                raise EnvironmentFault("the environment was done at its reset: there is no turn to make")
            self._observe(first, None)
            done = False
            for turn in range(self._rules.max_turns):
                try:
                    reply = await self._ctx.chat(self._history, tools=self._tools)
                except GenerationFailed as failed:
                    if failed.reason is not FailureReason.PROMPT_TOO_LONG or turn == 0:
                        raise
                    # What the environment showed fills the context: the episode ends here, with all it has.
                    self._ctx.metric("context_full", 1)
                    break
                self._history.append(reply.message)
                done = await self._answered(session, moves_of(reply.message, self._seen, self._rules.action))
                if done:
                    break
        except BaseException:
            session.cut()
            raise
        session.leave()
        self._score(done)

    async def _opened(self) -> tuple[Session, Any]:
        """A session that was reset, and its first result. Waits while there is none to be had."""
        ctx, seed = self._ctx, seed_of(self._ctx, self._rules.seed_by)
        episode = f"{ctx.group_id}.{ctx.attempt}.{ctx.index}"
        arguments = reset_arguments(self._row, seed=seed, episode_id=episode)
        began, tries = time.monotonic(), 0
        while True:
            session = Session(self._rules.client(), step_timeout_s=self._rules.step_timeout_s)
            try:
                first = await session.reset(arguments)
            except Unavailable as error:
                session.leave()  # it has no episode; a server that refused it is closing it already
                self._reach.lost(error)
                tries += 1
                await ctx.sleep(_pause_s(tries, jitter=seed_of(ctx, "rollout") / SEEDS))
            except BaseException:
                session.cut()
                raise
            else:
                self._reach.found()
                ctx.metric("env_wait_s", time.monotonic() - began)
                return session, first

    async def _answered(self, session: Session, moves: list[Move]) -> bool:
        """Take the moves in order; whether the episode is done. Moves after that are not taken."""
        for move in moves:
            if move.action is None:
                self._history += text_messages(move.refusal, move.tool_call_id)
                continue
            result = await session.step(move.action)
            self._steps += 1
            if result.reward is not None:
                self._rewards.append(_number(result.reward))
            if result.done:
                return True
            self._observe(result, move.tool_call_id)
        return False

    def _observe(self, result: Any, tool_call_id: str | None) -> None:
        seen = result.observation
        self._seen = seen if isinstance(seen, Mapping) else {"observation": seen}
        function = self._rules.observation
        self._history += messages_of(self._seen, self._row, self._history, function=function, tool_call_id=tool_call_id)

    def _score(self, done: bool) -> None:
        ctx = self._ctx
        ctx.metric("env_steps", self._steps)
        ctx.metric("env_done", done)
        if not self._rewards:
            ctx.reward(None)
            return
        reward = sum(self._rewards) if self._rules.reward == "sum" else self._rewards[-1]
        ctx.reward(reward)
        ctx.metric("env_reward", reward)


def _number(reward: Any) -> float:
    if isinstance(reward, bool | int | float):
        return float(reward)
    raise EnvironmentFault(f"the environment's reward is {type(reward).__name__}, not a number")


def _pause_s(tries: int, *, jitter: float) -> float:
    return min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2.0 ** min(tries - 1, 16)) * (1 - jitter / 2)


__all__ = ["openenv_program", "seed_of"]
