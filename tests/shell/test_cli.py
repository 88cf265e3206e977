"""The command line as a process: what it says, how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from rollout_service import __version__
from rollout_service.keys import hash_of, read_keys
from rollout_service.simulator import Simulator, SimulatorSettings
from tests import warm

COMMAND = (sys.executable, "-m", "rollout_service")
REWARDS = "def accuracy(prompts, completions, completion_ids, **columns):\n    return [1.0] * len(completions)\n"


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return warm.run(*arguments, cwd=cwd or Path.cwd(), environ={**os.environ, "NO_COLOR": "1"})


def write(folder: Path, *, engine: str = "http://127.0.0.1:9", port: int = 0, reward: str = "rewards:accuracy") -> str:
    (folder / "my").mkdir(exist_ok=True)
    (folder / "my" / "rewards.py").write_text(REWARDS)
    (folder / "my" / "rollout.toml").write_text(
        f'[[engines]]\nurl = "{engine}"\n[groups]\nnum_generations = 2\n[[rewards]]\nname = "accuracy"\n'
        f'function = "{reward}"\n[server]\nport = {port}\n'
    )
    return "my/rollout.toml"


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line it said."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("rollout-service: error: ")]
    return line


def test_version_and_help():
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"rollout-service {__version__}\n"
    said = run("--help").stdout
    for command in ("serve", "check", "simulate-engine"):
        assert command in said


def test_help_needs_none_of_the_heavy_libraries():
    heavy = "fastapi pydantic uvicorn aiohttp httpx prometheus_client structlog msgspec"
    code = f"import sys, rollout_service.cli; print(*[name for name in '{heavy}'.split() if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


def test_an_unknown_key_a_missing_file_and_a_wrong_option_are_one_line_and_exit_2(tmp_path: Path):
    config = write(tmp_path)
    (tmp_path / config).write_text((tmp_path / config).read_text() + "prot = 1\n")
    line = refused(run("serve", "--config", config, cwd=tmp_path))
    assert "server.prot" in line
    assert config in line
    assert "nowhere.toml" in refused(run("serve", "--config", "nowhere.toml", cwd=tmp_path))
    assert "--log-level" in refused(run("serve", "--config", config, "--log-level", "loud", cwd=tmp_path))
    assert "--host" in refused(run("serve", "--config", write(tmp_path), "--host", "0.0.0.0", cwd=tmp_path))  # noqa: S104 - refused


def test_a_missing_reward_module_is_one_line_and_exit_2_in_serve_and_check(tmp_path: Path):
    config = write(tmp_path, reward="nowhere:accuracy")
    for command in ("check", "serve"):
        line = refused(run(command, "--config", config, cwd=tmp_path))
        assert "nowhere" in line
        assert "accuracy" in line


def test_an_unreadable_prompts_file_is_one_line_that_names_file_line_and_field(tmp_path: Path):
    config = write(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": 7}\n')
    text = (tmp_path / config).read_text()
    (tmp_path / config).write_text(f'{text}[prompts]\npath = "rows.jsonl"\n')
    for command in ("check", "serve"):
        line = refused(run(command, "--config", config, cwd=tmp_path))
        assert "rows.jsonl:2" in line
        assert "prompt" in line


def test_check_finds_a_good_configuration_good_without_any_engine(tmp_path: Path):
    done = run("check", "--config", write(tmp_path), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "my/rollout.toml: good\n"), done.stderr
    assert not (tmp_path / "rollout.db").exists()


def test_a_port_in_use_is_one_line_and_exit_2(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused(run("serve", "--config", write(tmp_path, port=port), cwd=tmp_path))
    assert str(port) in line


def test_a_wrong_simulator_option_is_one_line_and_exit_2():
    assert "tokens_per_s" in refused(run("simulate-engine", "--tokens-per-s", "0"))
    assert "endless" in refused(run("simulate-engine", "--lengths", "endless"))


async def test_simulate_engine_serves_until_sigterm(tmp_path: Path):
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "simulate-engine", "--port", "0", "--model", "tiny", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
        (url,) = re.findall(r"http://\S+", line)
        async with httpx.AsyncClient(base_url=url) as http:
            assert (await http.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def served(
    folder: Path, engine: str, server: str = ""
) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    """The service as a process, ready; its log is in `service.log`. `server`: more lines of that table."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = write(folder, engine=engine, port=port)
    with (folder / config).open("a") as file:
        file.write(server)
    with (folder / "service.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "serve", "--config", config, "--log-format", "json", cwd=folder, stderr=log,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            async with asyncio.timeout(60):
                while not await _ready(http):
                    assert process.returncode is None, (folder / "service.log").read_text()
                    await asyncio.sleep(0.05)
            yield process, http
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _ready(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/readyz")).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_answers_waiting_calls_aborts_what_is_in_flight_and_exits_0(tmp_path: Path, signum: int):
    async with Simulator(SimulatorSettings(latency=600.0)) as engine, served(tmp_path, engine.url) as (process, http):
        await http.post("/prompts", json={"prompts": [{"prompt": "hello"}]})
        async with asyncio.timeout(10):
            while (await http.get("/status")).json()["slots"]["used"] != 2:
                await asyncio.sleep(0.01)
            call = asyncio.create_task(http.post("/leases", json={"max_groups": 1, "wait_s": 60}))
            while (await http.get("/status")).json()["leases"]["waiting_calls"] != 1:
                await asyncio.sleep(0.01)
        started = asyncio.get_running_loop().time()
        process.send_signal(signum)
        assert (await call).json()["status"] == "empty"
        assert await asyncio.wait_for(process.wait(), 30) == 0
        assert asyncio.get_running_loop().time() - started < 10
        async with httpx.AsyncClient(base_url=engine.url) as simulator, asyncio.timeout(5):
            while await _running(simulator):
                await asyncio.sleep(0.01)
        log = [json.loads(line) for line in (tmp_path / "service.log").read_text().splitlines()]
    assert [entry["event"] for entry in log if "rollout_service.server" in entry["logger"]] == [
        "listening",
        "stopping",
        "stopped",
    ]
    assert not [entry for entry in log if entry["level"] in ("error", "critical")]


async def _running(simulator: httpx.AsyncClient) -> float:
    page = (await simulator.get("/metrics")).text
    (value,) = re.findall(r"^vllm:num_requests_running(?:\{.*\})? (\S+)$", page, re.MULTILINE)
    return float(value)


async def test_a_restart_goes_on_where_the_last_one_stopped(tmp_path: Path):
    async with Simulator(SimulatorSettings(latency=0.01)) as engine:
        async with served(tmp_path, engine.url) as (process, http):
            await http.post("/policy_version", json={"version": 3})
            await http.post("/prompts", json={"prompts": [{"prompt": "hello", "prompt_id": "a"}]})
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 30) == 0
        async with served(tmp_path, engine.url) as (process, http):
            assert (await http.get("/policy_version")).json()["version"] == 3
            lease = (await http.post("/leases", json={"max_groups": 1, "wait_s": 30})).json()
            assert [group["prompt_id"] for group in lease["groups"]] == ["a"]
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 30) == 0


# keys


def test_a_key_is_shown_once_with_its_table_and_kept_nowhere(tmp_path: Path):
    done = run("key", "create", "--role", "trainer", "--name", "big-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    key, _, table = done.stdout.partition("\n\n")
    assert tomllib.loads(table)["server"]["keys"] == [{"name": "big-run", "role": "trainer", "hash": hash_of(key)}]
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "keys.toml"
    for name in ("one", "two"):
        key = run("key", "create", "--role", "read", "--name", name, "--file", str(file)).stdout.strip()
        assert hash_of(key) in file.read_text()
    assert "there is a key called 'one' already" in refused(
        run("key", "create", "--role", "read", "--name", "one", "--file", str(file))
    )
    assert run("key", "revoke", "one", "--file", str(file)).returncode == 0
    assert [found.name for found in read_keys(file)] == ["two"]
    assert "there are: two" in refused(run("key", "revoke", "one", "--file", str(file)))
    assert "--role" in refused(run("key", "create", "--role", "root"))
    assert "--name" in refused(run("key", "create", "--role", "read", "--name", "a b"))


def test_a_public_address_needs_keys_or_somebody_who_says_insecure(tmp_path: Path):
    config = write(tmp_path)
    everywhere = "0.0.0.0"  # noqa: S104 - refused, or with keys
    line = refused(run("serve", "--config", config, "--host", everywhere, cwd=tmp_path))
    assert "needs API keys" in line
    assert "--insecure" in line
    assert run("key", "init", "keys", cwd=tmp_path).stdout.count("made") == 5
    assert "there already" in run("key", "init", "keys", cwd=tmp_path).stdout
    with (tmp_path / config).open("a") as file:
        file.write('keys_file = "keys/nothing.toml"\n')
    assert "No such file" in refused(run("serve", "--config", config, "--host", everywhere, cwd=tmp_path))
    (tmp_path / "keys" / "nothing.toml").write_text("")
    assert "has no key" in refused(run("serve", "--config", config, "--host", everywhere, cwd=tmp_path))


async def test_a_service_with_keys_asks_for_them_on_every_address_and_logs_none(tmp_path: Path):
    everywhere = "0.0.0.0"  # noqa: S104 - with keys
    run("key", "init", "keys", cwd=tmp_path)
    key = (tmp_path / "keys" / "read.key").read_text().strip()
    keys = f'host = "{everywhere}"\nkeys_file = "keys/keys.toml"\n'
    async with Simulator(SimulatorSettings()) as engine, served(tmp_path, engine.url, keys) as (_, http):
        assert (await http.get("/status")).status_code == 401
        assert (await http.get("/status", headers={"Authorization": f"Bearer {key}"})).status_code == 200
        assert (await http.get("/livez")).status_code == 200
    assert key not in (tmp_path / "service.log").read_text()
