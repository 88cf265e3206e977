"""Episodes on a real OpenEnv server: turns, rewards, failures, a full server, and connections that are cut."""

from __future__ import annotations

import asyncio
import random
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollout_service.core.model import (
    FailedRollout,
    FailureReason,
    FinishedRollout,
    FinishReason,
    Prompt,
    RolloutJob,
    Turn,
)
from rollout_service.engines import Answer, GenerateRequest, GenerationFailed
from rollout_service.errors import ConfigError
from rollout_service.rollouts import Program, ProgramRunner, ProgramSettings, Threads
from rollout_service.rollouts.env_mapping import default_observation, messages_of
from rollout_service.rollouts.openenv import SEEDS, openenv_program, seed_of
from tests.engine_fleets import OpenGate, until
from tests.openenv_world import World, world
from tests.tcp_proxy import Faults, Proxy

pytest.importorskip("openenv", reason="openenv is not installed (extra `openenv`)")

PLACES = 3
WITHIN_S = 8.0
"""For what happens at once, on a loaded machine; a step may take 10 s."""
MESSAGES = [{"role": "system", "content": "count"}]
CALM = Faults(drop=0, cut=0, delay=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("openenv"), PLACES) as running:
        yield running


@pytest.fixture
async def env(server: World) -> Any:
    """The server; every session of a test is closed by its end."""
    server.clear()
    yield server
    server.let_go()
    await until(lambda: server.open_sessions() == 0)


@dataclass
class Engines:
    """Answers with `replies`, one after the other and then the last again: a text, or the arguments of tool calls."""

    replies: list[Any] = field(default_factory=lambda: ["go"])
    asked: list[GenerateRequest] = field(default_factory=list)

    async def generate(self, request: GenerateRequest, *, gate: Any, deadline: Any) -> Answer:
        await gate.passed()
        self.asked.append(request)
        reply = self.replies[min(len(self.asked), len(self.replies)) - 1]
        message: dict[str, Any] = {"role": "assistant", "content": reply if isinstance(reply, str) else None}
        if not isinstance(reply, str):
            functions = [{"name": "add", "arguments": arguments} for arguments in reply]
            message["tool_calls"] = [{"id": f"call-{i}", "function": f} for i, f in enumerate(functions)]
        text = reply if isinstance(reply, str) else "a call"
        turn = Turn(
            prompt_ids=array("i", range(len(self.asked))),
            output_ids=array("i", list(text.encode())),
            logprobs=array("f", [-0.5] * len(text.encode())),
            finish_reason=FinishReason.STOP,
            text=text,
            message=message,
            engine="http://engine",
        )
        return Answer(
            turn=turn, engine="http://engine", attempts=1, wasted_tokens=0, logprobs_mode=None, policy_version=0
        )

    async def prompt_text(self, ids: array[int]) -> str | None:
        return None


def job(index: int = 0, **fields: Any) -> RolloutJob:
    fields = {"messages": MESSAGES} | fields
    prompt = Prompt(prompt_id="p", num_generations=4, **fields)
    return RolloutJob(group_id="g-1", attempt=1, index=index, policy_version=0, prompt=prompt)


async def played(
    url: str,
    engines: Engines | None = None,
    *,
    env: Any = None,
    columns: dict[str, Any] | None = None,
    rollout_timeout_s: float = 30.0,
    index: int = 0,
    fields: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """One rollout; `env` is the row's column of that name."""
    settings = {"max_turns": 8, "step_timeout_s": 10.0} | options
    runner = ProgramRunner(
        Program(call=openenv_program(url, **settings), in_thread=False),
        engines=engines or Engines(),
        threads=Threads(1, grace_s=0.05),
        settings=ProgramSettings(rollout_timeout_s=rollout_timeout_s),
    )
    row = (columns or {}) | ({} if env is None else {"env": env})
    return await runner.run(job(index, columns=row, **(fields or {})), OpenGate())


# -- an episode


async def test_an_episode_is_observations_and_answers_in_turn_and_its_reward_the_sum_of_the_steps(env: World) -> None:
    engines = Engines(["go", "go on", "stop"])
    rollout = await played(env.url, engines, env={"start": 5})
    assert isinstance(rollout, FinishedRollout)
    assert rollout.completion == [
        {"role": "user", "content": "total 5"},
        {"role": "assistant", "content": "go"},
        {"role": "user", "content": "total 7"},
        {"role": "assistant", "content": "go on"},
        {"role": "user", "content": "total 12"},
        {"role": "assistant", "content": "stop"},
    ]
    assert rollout.reward == 1 + 2 + 3  # and not the 100 of the reset
    told = {name: rollout.metrics[name] for name in ("turns", "env_steps", "env_done", "env_reward")}
    assert told == {"turns": 3, "env_steps": 3, "env_done": 1, "env_reward": 6}
    assert rollout.metrics["env_wait_s"] >= 0
    (reset,) = env.events("reset")
    assert reset["episode_id"] == "g-1.1.0"
    assert 0 <= reset["seed"] < SEEDS
    assert reset["arguments"] == {"start": 5}
    await until(lambda: len(env.events("close")) == 1)


async def test_the_row_may_set_the_seed_of_the_reset(env: World) -> None:
    await played(env.url, env={"seed": 11, "episode_id": "mine"})
    (reset,) = env.events("reset")
    assert (reset["seed"], reset["episode_id"]) == (11, "mine")


def test_a_seed_follows_from_group_attempt_and_index_or_from_group_and_attempt() -> None:
    def at(group: str, attempt: int, index: int, by: Any) -> int:
        return seed_of(SimpleNamespace(group_id=group, attempt=attempt, index=index), by)  # type: ignore[arg-type]  # who it is, is all that a seed reads

    places = [("g-1", 1, 0), ("g-1", 1, 1), ("g-1", 2, 0), ("g-2", 1, 0)]
    assert [at(*place, "rollout") for place in places] == [at(*place, "rollout") for place in places]
    assert len({at(*place, "rollout") for place in places}) == 4
    assert at("g-1", 1, 0, "group") == at("g-1", 1, 1, "group")
    assert len({at(*place, "group") for place in places}) == 3
    assert at("g-1", 1, 0, "rollout") == 318711353  # for ever: it makes a run repeatable


async def test_an_episode_that_is_not_done_ends_after_max_turns_and_keeps_its_rewards(env: World) -> None:
    rollout = await played(env.url, max_turns=2)
    assert (rollout.reward, rollout.metrics["env_done"], rollout.metrics["turns"]) == (3.0, 0.0, 2.0)
    await until(lambda: len(env.events("close")) == 1)


async def test_an_episode_that_fills_the_context_ends_there_and_keeps_its_rewards(env: World) -> None:
    class Fills(Engines):
        async def generate(self, request: GenerateRequest, *, gate: Any, deadline: Any) -> Answer:
            if len(self.asked) == self.room:
                raise GenerationFailed(FailureReason.PROMPT_TOO_LONG, "too long")
            return await super().generate(request, gate=gate, deadline=deadline)

        room = 2

    rollout = await played(env.url, Fills())
    assert (rollout.reward, rollout.metrics["context_full"], rollout.metrics["env_done"]) == (3.0, 1.0, 0.0)
    first = Fills()
    first.room = 0
    assert (await played(env.url, first)).reason is FailureReason.PROMPT_TOO_LONG


async def test_the_last_reward_counts_alone_where_the_configuration_says_so(env: World) -> None:
    rollout = await played(env.url, reward="last")
    assert (rollout.reward, rollout.metrics["env_reward"]) == (3.0, 3.0)


async def test_an_episode_without_any_reward_is_unscored(env: World) -> None:
    rollout = await played(env.url, env={"unscored": True})
    assert isinstance(rollout, FinishedRollout)
    assert rollout.reward is None
    assert "env_reward" not in rollout.metrics


async def test_a_prompt_that_is_a_text_opens_the_history(env: World) -> None:
    engines = Engines()
    rollout = await played(env.url, engines, fields={"messages": None, "text": "count!"})
    assert isinstance(rollout, FinishedRollout)
    assert engines.asked[0].messages == [
        {"role": "user", "content": "count!"},
        {"role": "user", "content": "total 0"},
    ]
    assert (rollout.prompt, rollout.completion) == ("count!", "gogogo")


async def test_tool_calls_are_steps_whose_observations_answer_them(env: World) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    engines = Engines([['{"add": 3}', "[1]", '{"add": 4}'], "end"])
    rollout = await played(env.url, engines, columns={"tools": tools})
    assert isinstance(rollout, FinishedRollout)
    assert engines.asked[0].extra == {"tools": tools}
    assert list(engines.asked[1].messages or ())[-3:] == [
        {"role": "tool", "tool_call_id": "call-0", "content": "total 3"},
        {"role": "tool", "tool_call_id": "call-1", "content": '{"error": "the arguments are not a JSON object"}'},
        {"role": "tool", "tool_call_id": "call-2", "content": "total 7"},
    ]
    assert [event["action"]["add"] for event in env.events("step")] == [3, 4, None]


# -- mapping


@pytest.mark.parametrize(
    ("observation", "seen"),
    [
        ({"text": "a", "prompt": "b"}, "a"),
        ({"prompt": "b", "score": 1}, "b"),
        ({"text": "", "message": "c"}, "c"),
        ({"text": 7, "metadata": {"x": 1}}, '{"text":7}'),
        ({"board": [0, 1], "müde": None}, '{"board":[0,1],"müde":null}'),
        ({"metadata": {"x": 1}}, ""),
        ({"messages": [{"role": "user", "content": "m"}], "text": "t"}, [{"role": "user", "content": "m"}]),
        ({"messages": [{"sender_id": 0}], "prompt": "p"}, "p"),
    ],
)
def test_an_observation_is_its_messages_its_text_or_compact_json(observation: Any, seen: Any) -> None:
    assert default_observation(observation, {}) == seen


def test_messages_that_begin_with_the_history_add_only_what_follows_it() -> None:
    new = {"role": "user", "content": "next"}
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": None}]
    told = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, new]
    assert messages_of({"messages": told}, {}, history, function=None, tool_call_id=None) == [new]
    assert messages_of({"messages": [new]}, {}, history, function=None, tool_call_id=None) == [new]


async def test_two_functions_replace_the_mapping(env: World) -> None:
    def action(message: Any, observation: Any) -> Any:
        return [{"add": len(message["content"])}, {"add": observation["total"] or 100}]

    def observation(seen: Any, row: Any) -> Any:
        return {"role": "user", "content": f"{row['unit']}: {seen['total']}"}

    engines = Engines()
    rollout = await played(env.url, engines, columns={"unit": "m"}, action=action, observation=observation)
    assert [event["action"]["add"] for event in env.events("step")] == [2, 100, 2]
    contents = [message["content"] for message in rollout.completion if message["role"] == "user"]
    assert contents == ["m: None", "m: 2", "m: 102"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"action": lambda message, seen: "go"}, "openenv_action returned str"),
        ({"action": lambda message, seen: []}, "openenv_action returned list"),
        ({"action": lambda message, seen: 1 / 0}, "ZeroDivisionError"),
        ({"observation": lambda seen, row: 7}, "openenv_observation returned int"),
        ({"env": [1]}, "column env holds list"),
        ({"columns": {"tools": "add"}}, "column tools holds str"),
        ({"fields": {"messages": None, "token_ids": array("i", [1])}}, "not as token ids"),
    ],
)
async def test_what_rows_and_functions_get_wrong_is_no_fault_of_the_environment(
    env: World, options: dict[str, Any], words: str
) -> None:
    rollout = await played(env.url, **options)
    assert isinstance(rollout, FailedRollout)
    assert rollout.reason is FailureReason.PROGRAM
    assert words in rollout.error


async def test_a_mapping_that_is_async_is_refused_at_the_start() -> None:
    async def action(message: Any, observation: Any) -> Any:
        return {}

    with pytest.raises(ConfigError, match=r"program\.openenv_action: a plain function"):
        openenv_program("http://e", max_turns=1, step_timeout_s=1, action=action)


@pytest.mark.parametrize("missing", ["openenv", "openenv.core.generic_client"])
def test_without_openenv_the_configuration_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    class Hides:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == missing:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == "openenv"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hides(), *sys.meta_path])
    words = "pip install 'rollout-service\\[openenv\\]'" if missing == "openenv" else "openenv is incomplete"
    with pytest.raises(ConfigError, match=words):
        openenv_program("http://e", max_turns=1, step_timeout_s=1)


# -- failures


async def test_a_step_that_raises_fails_the_rollout_with_the_environments_own_words(env: World) -> None:
    rollout = await played(env.url, env={"fails_at": 2})
    assert isinstance(rollout, FailedRollout)
    assert rollout.reason is FailureReason.ENVIRONMENT
    assert rollout.error == "Server error: the board is on fire (code: EXECUTION_ERROR)"
    assert rollout.wasted_tokens == len("gogo")
    await until(lambda: len(env.events("close")) == 1)


async def test_a_reset_that_raises_fails_the_rollout_and_is_not_repeated(env: World) -> None:
    rollout = await played(env.url, env={"fails_at": 0})
    assert (rollout.reason, "on fire" in rollout.error) == (FailureReason.ENVIRONMENT, True)
    assert len(env.events("reset")) == 1


async def test_an_action_the_environment_does_not_know_is_shown(env: World) -> None:
    rollout = await played(env.url, action=lambda message, seen: {"code": message["content"]})
    assert rollout.reason is FailureReason.ENVIRONMENT
    assert 'VALIDATION_ERROR); the action was {"code": "go"}' in rollout.error


async def test_an_episode_that_is_over_at_its_reset_is_a_fault_of_the_environment(env: World) -> None:
    rollout = await played(env.url, env={"over": True})
    assert (rollout.reason, "done at its reset" in rollout.error) == (FailureReason.ENVIRONMENT, True)


async def test_a_full_server_makes_rollouts_wait_and_not_fail(env: World) -> None:
    env.hold()
    with capture_logs() as logs:
        playing = [asyncio.create_task(played(env.url, index=i)) for i in range(PLACES + 2)]
        await until(lambda: len(env.events("step")) == PLACES)
        await until(lambda: any(entry["event"] == "openenv_full" for entry in logs))
        env.let_go()
        rollouts = await asyncio.gather(*playing)
    assert [type(rollout) for rollout in rollouts] == [FinishedRollout] * (PLACES + 2)
    assert len({event["episode_id"] for event in env.events("reset")}) == PLACES + 2
    waits = sorted(rollout.metrics["env_wait_s"] for rollout in rollouts)
    assert waits[-1] > waits[0]


async def test_a_server_that_stays_full_costs_the_rollout_at_its_deadline(env: World) -> None:
    env.hold()
    playing = [asyncio.create_task(played(env.url, index=i)) for i in range(PLACES)]
    await until(lambda: len(env.events("step")) == PLACES)
    rollout = await played(env.url, index=9, rollout_timeout_s=0.5)
    assert rollout.reason is FailureReason.DEADLINE
    env.let_go()
    await asyncio.gather(*playing)


async def test_a_server_that_is_not_there_yet_is_waited_for(env: World) -> None:
    proxy = Proxy(env.url, random.Random(1), CALM)
    async with proxy:
        proxy.faults = Faults(drop=1, cut=0, delay=0)
        playing = asyncio.create_task(played(proxy.url))
        await until(lambda: proxy.counts["connections"] > 2)
        proxy.faults = CALM
        assert isinstance(await playing, FinishedRollout)


async def test_a_connection_lost_in_the_middle_fails_the_rollout_and_no_other_environment_is_stepped(
    env: World,
) -> None:
    async with Proxy(env.url, random.Random(1), CALM) as proxy:
        env.hold()
        playing = asyncio.create_task(played(proxy.url))
        await until(lambda: len(env.events("step")) == 1)
        proxy.faults = Faults(drop=1, cut=0, delay=0)
        env.let_go()
        rollout = await playing
    assert (rollout.reason, "was lost" in rollout.error) == (FailureReason.ENVIRONMENT, True)
    assert len(env.events("step")) == 1


async def test_a_connection_lost_while_the_policy_answers_fails_the_rollout(env: World) -> None:
    class Slow(Engines):
        async def generate(self, request: GenerateRequest, *, gate: Any, deadline: Any) -> Answer:
            answer = await super().generate(request, gate=gate, deadline=deadline)
            if len(self.asked) == 2:
                proxy.cut_all()
                await until(lambda: len(env.events("close")) == 1)
            return answer

    async with Proxy(env.url, random.Random(1), CALM) as proxy:
        rollout = await played(proxy.url, Slow())
    assert (rollout.reason, "was lost" in rollout.error) == (FailureReason.ENVIRONMENT, True)
    assert [event["event"] for event in env.events()] == ["made", "reset", "step", "stepped", "close"]


# -- clients that block, and cancellation


async def test_a_step_that_takes_too_long_is_cut_off_and_its_session_closed(env: World) -> None:
    env.hold()
    rollout = await played(env.url, step_timeout_s=0.5)
    assert rollout.reason is FailureReason.ENVIRONMENT
    assert rollout.error == "the environment did not answer a step within 0.5 s"
    env.let_go()
    await until(lambda: len(env.events("close")) == 1)


async def test_cancelling_in_a_step_ends_at_once_and_closes_the_session(env: World) -> None:
    env.hold()
    playing = asyncio.create_task(played(env.url))
    await until(lambda: len(env.events("step")) == 1)
    playing.cancel()
    async with asyncio.timeout(WITHIN_S):  # the step still runs
        with pytest.raises(asyncio.CancelledError):
            await playing
    assert not env.events("stepped")
    env.let_go()
    await until(lambda: len(env.events("close")) == 1)
    assert len(env.events("step")) == 1


async def test_cancelling_in_a_generation_closes_the_session(env: World) -> None:
    class Never(Engines):
        async def generate(self, request: GenerateRequest, *, gate: Any, deadline: Any) -> Answer:
            self.asked.append(request)
            await asyncio.Event().wait()
            raise AssertionError

    engines = Never()
    playing = asyncio.create_task(played(env.url, engines))
    await until(lambda: engines.asked)
    playing.cancel()
    await asyncio.wait({playing})
    await until(lambda: len(env.events("close")) == 1)


STUBBORN: list[Stubborn] = []


@pytest.fixture(autouse=True)
async def _ends() -> Any:
    """A loop does not close while a task of its own ignores its end."""
    yield
    while STUBBORN:
        STUBBORN.pop().end.set()


class Transport:
    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


class Stubborn:
    """A client that never ends what it does, whatever it is told: in `connect`, `reset`, `step` or `close`."""

    def __init__(self, blocks_in: str) -> None:
        self.blocks_in, self.blocked, self.cancels = blocks_in, asyncio.Event(), 0
        self.end = asyncio.Event()
        STUBBORN.append(self)
        self._ws = SimpleNamespace(transport=Transport(), state=SimpleNamespace(name="OPEN"))

    async def _does(self, what: str) -> Any:
        while what == self.blocks_in and not self.end.is_set():
            self.blocked.set()
            try:
                await self.end.wait()
            except asyncio.CancelledError:
                self.cancels += 1
        return SimpleNamespace(observation={"text": "x"}, reward=1.0, done=what == "step")

    async def connect(self) -> Any:
        return await self._does("connect")

    async def reset(self, **arguments: Any) -> Any:
        return await self._does("reset")

    async def step(self, action: Any) -> Any:
        return await self._does("step")

    async def close(self) -> None:
        await self._does("close")


@pytest.mark.parametrize("call", ["connect", "reset", "step"])
async def test_a_client_that_ignores_its_end_is_cut_off_when_the_rollout_is_cancelled(call: str) -> None:
    client = Stubborn(call)
    playing = asyncio.create_task(played("http://e", client=lambda: client))
    await client.blocked.wait()
    playing.cancel()
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(asyncio.CancelledError):
            await playing
        await until(lambda: client._ws.transport.aborted and client.cancels)


@pytest.mark.parametrize("call", ["reset", "step"])
async def test_a_client_that_ignores_its_end_is_cut_off_after_the_limit(call: str) -> None:
    client = Stubborn(call)
    rollout = await played("http://e", client=lambda: client, step_timeout_s=0.05)
    assert (rollout.reason, rollout.error) == (
        FailureReason.ENVIRONMENT,
        f"the environment did not answer a {call} within 0.05 s",
    )
    assert client._ws.transport.aborted


async def test_a_close_that_blocks_holds_no_rollout_and_ends_with_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout_service.rollouts.env_session.CLOSE_S", 0.05)
    client = Stubborn("close")
    rollout = await played("http://e", client=lambda: client)
    assert rollout.reward == 1.0
    assert not client.cancels  # the close goes on, and nobody waits for it
    await until(lambda: client._ws.transport.aborted)
