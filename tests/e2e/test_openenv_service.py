"""The real service, the engine simulator and a real OpenEnv server: rewards of episodes, and a bump in the middle."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from examples.processes import Process, free_port
from tests.openenv_world import READY_S, REPOSITORY, World, world
from tests.service import LiveService, until

pytest.importorskip("openenv", reason="openenv is not installed (extra `openenv`)")

GROUP = 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path / "openenv", places=4 * GROUP) as running:
        yield running


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "rollout_service", "simulate-engine", "--port", str(port), "--mean-tokens", "8"]
    with Process("engine", command, tmp_path / "engine.log", cwd=REPOSITORY) as process:
        process.wait_ready(f"http://127.0.0.1:{port}/health", READY_S)
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
async def service(server: World, engine: str, tmp_path: Path) -> AsyncIterator[LiveService]:
    live = LiveService(
        tmp_path,
        [engine],
        groups={"num_generations": GROUP, "max_staleness": 0},
        program={"openenv": server.url, "max_turns": 5, "tool_timeout_s": 20.0},
        sampling={"allow_raw_logprobs": True},
        rewards=[],
    )
    await live.start()
    yield live
    server.let_go()
    await live.checked_stop()


def row(key: str, **env: int) -> dict[str, object]:
    return {"prompt_id": key, "messages": [{"role": "system", "content": "count"}], "columns": {"env": env}}


async def test_episodes_are_leased_with_their_rewards_and_a_bump_in_the_middle_closes_their_sessions(
    server: World, service: LiveService
) -> None:
    await service.submit(row("a", start=5), row("b", steps=2))
    groups = {group["prompt_id"]: group for group in await service.collect(2)}
    for key, steps, reward in (("a", 3, 6.0), ("b", 2, 3.0)):
        samples = groups[key]["samples"]
        assert {sample["index"] for sample in samples} == set(range(GROUP))
        assert {sample["reward"] for sample in samples} == {reward}
        assert {sample["metrics"]["env_steps"] for sample in samples} == {steps}
        assert {sample["metrics"]["turns"] for sample in samples} == {steps}
    assert {event["arguments"].get("start") for event in server.events("reset")} == {5, None}
    await until(lambda: server.open_sessions() == 0)
    assert len(server.events("close")) == 2 * GROUP

    server.clear()
    server.hold()
    old = await service.submit(row("c"), row("d"))
    await until(lambda: len(server.events("step")) == 2 * GROUP)  # every episode is in its first step
    answer = await service.bump(1)
    assert answer["stale_groups"] == 2
    for group_id in old:
        assert (await service.group(group_id))["state"] == "stale"

    async def all_slots_free() -> bool:
        return await service.slots_used() == 0

    await until(all_slots_free)  # while the steps still run at the server
    assert not server.events("stepped")
    assert server.open_sessions() == 2 * GROUP

    fresh = await service.submit(row("e"))
    await until(lambda: len(server.events("step")) == 3 * GROUP)  # and the next group has its slots already
    server.let_go()
    (group,) = await service.collect(1)
    assert (group["group_id"], group["policy_version"]) == (fresh[0], 1)
    await until(lambda: server.open_sessions() == 0)
    assert {event["env"] for event in server.events("made")} == {event["env"] for event in server.events("close")}
    assert len(server.events("step")) == 2 * GROUP + 3 * GROUP  # the cancelled ones took no other step
    assert (await service.counts())["failed"] == 0
