"""What was acked leaves the store: the file stays as large as what is outstanding, and the command line says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollout_service.simulator import Simulator, SimulatorSettings
from tests.durability.forked import Forked
from tests.durability.lives import Lives
from tests.durability.tale import judge
from tests.service import prompt
from tests.warm import arun

GROUPS, AT_ONCE = 300, 30
PADDING = "x" * 20_000
"""Of each prompt: 300 of them are 6 MB, far above what one portion of them takes."""
MOST_BYTES = 4 * 2**20
"""Twice what a portion's prompts and the log's checkpoint interval leave at their worst."""


async def stats(service: Forked) -> dict[str, Any]:
    done = await arun("store", "stats", "--config", "rollout.toml", cwd=service.directory)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


async def test_three_hundred_groups_run_through_a_file_that_does_not_grow(lives: Lives, tmp_path: Path):
    async with Simulator(SimulatorSettings(latency=0.0, mean_tokens=8)) as engine, judge() as judge_url:
        service = await Forked(lives, tmp_path, engine.url, judge_url, groups={"num_generations": 2}).start()
        try:
            sizes = []
            for start in range(0, GROUPS, AT_ONCE):
                names = [f"a{number}" for number in range(start, start + AT_ONCE)]
                await service.submit(*(prompt(name, padding=PADDING) for name in names))
                await service.collect(AT_ONCE)
                sizes.append(service.store.stat().st_size)
            running = await stats(service)
            assert running["groups"] == {"acked": GROUPS}
            assert running["rows"]["prompts"] == running["rows"]["payloads"] == running["rows"]["scores"] == 0
            assert running["payload_bytes"] == 0
            assert running["outstanding"] == 0
            assert running["submitted"] == GROUPS
            assert max(sizes) < MOST_BYTES, sizes
            assert max(sizes[3:]) <= 1.25 * max(sizes[:3]) + 2**20, f"it goes on growing: {sizes}"

            compacting = await arun("store", "compact", "--config", "rollout.toml", cwd=tmp_path)
            assert compacting.returncode == 2
            assert "is in use by another service" in compacting.stderr
            assert await service.end() == 0

            compacting = await arun("store", "compact", "--config", "rollout.toml", cwd=tmp_path)
            assert compacting.returncode == 0, compacting.stderr
            assert "bytes before" in compacting.stdout
            after = await stats(service)
            assert after["free_bytes"] == 0
            assert after["file_bytes"] == service.store.stat().st_size < max(sizes)
            assert after["groups"] == running["groups"]
            await service.start()
            assert (await service.counts())["acked"] == GROUPS
        finally:
            await service.let_go()


async def test_a_store_that_is_not_there_is_one_line_and_exit_2(tmp_path: Path):
    (tmp_path / "rollout.toml").write_text(
        '[[engines]]\nurl = "http://127.0.0.1:9"\n[[rewards]]\nname = "a"\nurl = "http://127.0.0.1:9/"\n'
    )
    for command in ("stats", "compact"):
        done = await arun("store", command, "--config", "rollout.toml", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.splitlines() == ["rollout-service: error: store rollout.db does not exist"]
    assert not (tmp_path / "rollout.db").exists()
