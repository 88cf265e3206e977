"""The terminal commands against the real service: what they read is what it answers."""

from __future__ import annotations

import json
from pathlib import Path

from rollout_service.simulator import Simulator, SimulatorSettings
from tests.service import LiveService, prompt
from tests.shell.test_console import run

REWARDS = (
    "def accuracy(prompts, completions, completion_ids, **columns):\n    return [float(len(c)) for c in completions]\n"
)


async def test_the_commands_show_what_the_service_says_of_a_run(tmp_path: Path):
    (tmp_path / "fault_rewards.py").write_text(REWARDS)
    async with Simulator(SimulatorSettings(latency=0.01)) as engine:
        service = await LiveService(tmp_path, [engine.url]).start()
        url = ("--url", f"http://127.0.0.1:{service.port}")
        try:
            await service.bump(3)
            await service.submit(prompt("a"), prompt("b"))
            await service.collect(1)
            await service.wait_state("g-2", "ready")

            top = await run("top", *url)
            assert top.code == 0, top.err
            for part in ("version 3", "OUTSTANDING 1", "ENDED 1", "at version 3", engine.url, "policy version 0"):
                assert part in top.out

            status = await run("status", "--check", "--json", *url)
            assert status.code == 0
            assert json.loads(status.out)["groups"] == (await service.status())["groups"]
            assert "lease 1 ready group." in (await run("status", *url)).out

            groups = await run("groups", "--state", "ready", "--json", *url)
            assert [row["group_id"] for row in json.loads(groups.out)["groups"]] == ["g-2"]
            assert "ready" in (await run("groups", *url)).out
            shown = (await run("groups", "g-2", *url)).out
            for rollout in (await service.group("g-2"))["rollouts"]:
                assert f"{rollout['finish_reason']} " in shown
                assert f" {rollout['reward']:.3g} " in shown
            unknown = await run("groups", "g-99", *url)
            assert unknown.code == 1
            assert "g-99" in unknown.err

            engines = await run("engines", "--json", *url)
            assert [found["url"] for found in json.loads(engines.out)["engines"]] == [engine.url]
            assert engine.url in (await run("engines", *url)).out

            await service.submit(prompt("c"))
            assert (await service.http.post("/pause")).status_code == 200
            assert "Paused" in (await run("status", *url)).out
        finally:
            await service.checked_stop()
