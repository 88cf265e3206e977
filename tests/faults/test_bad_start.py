"""A user's mistake is one line that says what and where, exit code 2, and never a traceback."""

from __future__ import annotations

import asyncio
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.faults.conftest import REWARDS
from tests.faults.scripted import Engine
from tests.listening import listening
from tests.service import free_port, tables, to_toml
from tests.warm import arun


async def refused(directory: Path, engine: str, extra: str = "", **changes: Any) -> str:
    """The one line that `serve` ends with."""
    shutil.copy(REWARDS, directory)
    port = changes.pop("port", None) or free_port()
    (directory / "rollout.toml").write_text(to_toml(tables(directory, [engine], **changes)) + extra)
    done = await arun("serve", "--config", "rollout.toml", "--port", str(port), cwd=directory)
    lines = [line for line in done.stderr.splitlines() if line.startswith("rollout-service: error: ")]
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("[groups_]\nx = 1\n", "groups_"),
        ("[groups]\nnum_generation = 4\n", "num_generation"),
        ("[dispatch]\nmax_attempts = 2.5\n", "dispatch.max_attempts"),
        ('[dispatch]\nadmission = "pace"\n', "groups_per_step"),
        ("not toml\n", "rollout.toml"),
    ],
)
async def test_what_the_configuration_may_not_say_is_named(tmp_path: Path, extra: str, words: str) -> None:
    changes: dict[str, Any] = {} if extra.startswith(("[groups_", "not")) else {extra[1 : extra.index("]")]: []}
    assert words in await refused(tmp_path, "http://127.0.0.1:1", extra, **changes)


async def test_a_reward_that_cannot_be_imported_is_named(tmp_path: Path, engine: Engine) -> None:
    for target, words in (
        ("no_such_module:f", "no_such_module"),
        ("fault_rewards:nothing", "nothing"),
    ):
        line = await refused(tmp_path, engine.url, rewards=[{"name": "mine", "function": target}])
        assert words in line
        assert '"mine"' in line


async def test_prompts_that_cannot_be_read_are_named_with_file_line_and_field(tmp_path: Path, engine: Engine) -> None:
    path = tmp_path / "prompts.jsonl"
    for content, words in (
        (None, ["prompts.jsonl"]),
        ('{"prompt": "a"}\n{"prompt": 7}\n', ["prompts.jsonl", "2", "prompt"]),
    ):
        if content is not None:
            path.write_text(content)
        line = await refused(tmp_path, engine.url, prompts={"path": str(path)})
        for word in words:
            assert word in line


async def test_what_answers_at_an_engines_address_but_is_none_is_refused(tmp_path: Path, engine: Engine) -> None:
    engine.models, engine.models_status = b"<html>hello</html>", 200
    assert engine.url in await refused(tmp_path, engine.url)
    engine.models_status = 404
    assert engine.url in await refused(tmp_path, engine.url)
    engine.models_status = 401
    assert "API key" in await refused(tmp_path, engine.url)

    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"-ERR unknown command\r\n\r\n")
        await reader.read()
        writer.close()

    async with listening(shout) as address:
        url = f"http://{address}"
        assert url in await refused(tmp_path, url)


async def test_a_model_the_engine_does_not_serve_and_raw_logprobs_at_a_temperature_are_refused(
    tmp_path: Path, engine: Engine
) -> None:
    line = await refused(tmp_path, engine.url, model="another")
    assert "'another'" in line
    assert "'tiny'" in line
    line = await refused(tmp_path, engine.url, sampling={"temperature": 0.7})
    assert "processed_logprobs" in line
    assert "allow_raw_logprobs" in line


async def test_a_port_in_use_and_a_store_in_use_or_broken_are_refused(tmp_path: Path, engine: Engine) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in await refused(tmp_path, engine.url, port=port)
    (tmp_path / "rollout.db").write_bytes(b"no database at all" * 1000)
    assert "rollout.db" in await refused(tmp_path, engine.url)
    missing = {"url": f"sqlite:///{tmp_path / 'nowhere' / 'rollout.db'}"}
    assert "nowhere" in await refused(tmp_path, engine.url, store=missing)


async def test_another_address_than_loopback_is_refused(tmp_path: Path, engine: Engine) -> None:
    """Public fault 60, until there are keys."""
    everywhere = "0.0.0.0"  # noqa: S104 - it is refused
    assert "server.host" in await refused(tmp_path, engine.url, server={"host": everywhere, "port": 1})


async def test_nothing_is_left_running_after_a_refusal(tmp_path: Path, engine: Engine) -> None:
    engine.detokenize = lambda ids: web.Response(status=404)
    await refused(tmp_path, engine.url, model="another")
    assert engine.connections == 0
