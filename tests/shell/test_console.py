"""`status`, `groups` and `engines` as processes: what they print, how they end, what they never show."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from rollout_service.cli import app
from rollout_service.console import commands
from tests.shell.console_service import ConsoleService, engine, halt, live, status
from tests.warm import arun

KEY = "rsk_" + "k" * 43
COMMAND = (sys.executable, "-m", "rollout_service")
NOTHING_THERE = "http://127.0.0.1:9"


@dataclass
class Done:
    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROLLOUT_SERVICE_")}
    return inherited | {"PYTHONPATH": str(Path(__file__).parents[2]), "NO_COLOR": "1", "COLUMNS": "140"} | more


async def run(*arguments: str, **variables: str) -> Done:
    """A command in this process, in a thread: a process of its own takes a second to start."""
    named = {name: None for name in os.environ if name.startswith("ROLLOUT_SERVICE_")}
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments, env=named | environment(**variables))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


async def process(*arguments: str, **variables: str) -> Done:
    done = await arun(*arguments, cwd=Path.cwd(), environ=environment(**variables))
    return Done(done.returncode, done.stdout, done.stderr)


def one_line(done: Done, code: int) -> str:
    """The one line it said on stderr."""
    assert done.code == code, done
    assert done.out == ""
    (line,) = done.err.splitlines()
    assert line.startswith("rollout-service: error: ")
    return line


# what they print


async def test_json_is_what_the_service_answered_byte_for_byte():
    odd = (
        ' {"policy_version":7, "groups" :{},"slots":{"total":1,"used":0},"engines":[],"more":"\\u001b\x9b grün \x7f"}\n'
    )
    async with ConsoleService() as service:
        service.answers["/status"] = lambda _: web.Response(body=odd.encode(), content_type="application/json")
        done = await process("status", "--json", "--url", service.url)
        assert (done.code, done.out.rstrip("\n"), done.err) == (0, odd.rstrip("\n"), "")
        for command, path in (("engines", "/engines"), ("groups", "/groups")):
            done = await run(command, "--json", "--url", service.url)
            assert done.code == 0
            assert path.removeprefix("/") in json.loads(done.out)


async def test_json_on_a_terminal_has_the_same_value_and_nothing_a_terminal_obeys():
    values = status() | {"more": "\x1b[2J\x9b2J\x7f\u202e grün 🙂"}
    text = json.dumps(values, ensure_ascii=False)
    async with ConsoleService() as service:
        service.answers["/status"] = lambda _: web.Response(body=text.encode(), content_type="application/json")
        shown = await on_a_terminal("status", "--json", "--url", service.url)
    assert json.loads(shown) == values
    assert "🙂" in shown
    assert all(character.isprintable() for character in shown.strip().replace("\r\n", ""))


async def on_a_terminal(*arguments: str) -> str:
    """What a command writes to a terminal on which it is run."""
    ours, theirs = pty.openpty()
    try:
        started = await asyncio.create_subprocess_exec(
            *COMMAND, *arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment()
        )
        os.close(theirs)
        reading = asyncio.create_task(asyncio.to_thread(read_all, ours))
        async with asyncio.timeout(60):
            assert await started.wait() == 0
            return await reading
    finally:
        os.close(ours)


def read_all(terminal: int) -> str:
    pieces = []
    try:
        while piece := os.read(terminal, 65536):
            pieces.append(piece)
    except OSError:  # the other end was closed
        pass
    return b"".join(pieces).decode()


async def test_without_json_there_is_a_table_for_people():
    async with ConsoleService() as service:
        done = await run("status", "--url", service.url)
        assert done.code == 0
        assert "Generating: 12 of 16 slots busy" in done.out
        done = await run("engines", "--url", service.url)
        assert "http://10.0.0.0:8000" in done.out
        done = await run("groups", "--url", service.url)
        assert "dropped (unscorable)" in done.out
        done = await run("groups", "g-1", "--url", service.url)
        assert "the sea is blue" in done.out


async def test_groups_asks_for_states_limit_and_page():
    async with ConsoleService() as service:
        options = ("--state", "ready", "--state", "leased", "--limit", "7", "--after", "g-3", "--url", service.url)
        assert (await run("groups", *options)).code == 0
        assert service.asked == ["/groups?state=ready&state=leased&limit=7&after=g-3"]


async def test_a_group_id_cannot_name_another_path():
    async with ConsoleService() as service:
        assert "404" in one_line(await run("groups", "../status?x=1#y", "--url", service.url), 1)
        assert service.asked == ["/groups/..%2Fstatus%3Fx%3D1%23y"]


async def test_top_without_a_terminal_prints_one_frame_and_ends():
    async with ConsoleService() as service:
        done = await process("top", "--url", service.url)
        assert (done.code, done.err) == (0, "")
        assert "version 7" in done.out
        assert "\x1b" not in done.out
        assert service.asked == ["/live"]


async def test_a_reader_that_has_had_enough_is_no_error():
    async with ConsoleService() as service:
        service.answers["/groups"] = lambda _: web.json_response(
            {"groups": [{"group_id": f"g-{n}", "state": "pending"} for n in range(1000)], "next": None}
        )
        line = f"{' '.join(COMMAND)} groups --limit 1000 --url {service.url} | head -1"
        shell = await asyncio.create_subprocess_shell(
            line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment()
        )
        _, err = await shell.communicate()
        assert b"Traceback" not in err


# status --check


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"paused": True}, 0),
        ({"halted": halt()}, 3),
        ({"store": {"ok": False, "error": "disk full"}}, 3),
        ({"engines": [engine(healthy=False, error="refused")]}, 3),
    ],
)
async def test_check_ends_with_3_where_the_service_is_not_ready(changes: dict[str, Any], code: int):
    async with ConsoleService() as service:
        service.live = live(status(**changes))
        done = await run("status", "--check", "--json", "--url", service.url)
        assert done.code == code
        assert json.loads(done.out) == service.live["status"]
        assert done.err.startswith("rollout-service: not ready: ") is (code == 3)
        assert (await run("status", "--url", service.url)).code == 0


# what goes wrong


@pytest.mark.parametrize("command", ["status", "top"])
async def test_a_service_that_is_not_there_is_one_line_and_1(command: str):
    line = one_line(await process(command, "--url", NOTHING_THERE), 1)
    assert NOTHING_THERE in line
    assert "nothing answers" in line
    assert "is the service running?" in line


async def test_where_a_key_is_wanted_it_says_how_to_give_one():
    async with ConsoleService() as service:
        service.key = KEY
        line = one_line(await run("status", "--url", service.url), 1)
        assert "wants a key" in line
        assert "ROLLOUT_SERVICE_KEY" in line
        assert "--key-file" in line
        wrong = "rsk_wrong"
        line = one_line(await run("status", "--url", service.url, ROLLOUT_SERVICE_KEY=wrong), 1)
        assert "refuses this key" in line
        assert wrong not in line


async def test_a_key_comes_from_a_file_or_the_environment_and_the_file_goes_first(tmp_path: Path):
    file = tmp_path / "read.key"
    file.write_text(KEY + "\n")
    async with ConsoleService() as service:
        service.key = KEY
        assert (await run("status", ROLLOUT_SERVICE_URL=service.url, ROLLOUT_SERVICE_KEY=KEY)).code == 0
        done = await run("top", "--url", service.url, "--key-file", str(file), ROLLOUT_SERVICE_KEY="another")
        assert done.code == 0
        assert KEY not in done.out


async def test_a_redirect_is_not_followed_with_the_key():
    async with ConsoleService() as service, ConsoleService() as other:
        service.answers["/status"] = lambda _: web.Response(status=307, headers={"Location": f"{other.url}/status"})
        line = one_line(await run("status", "--url", service.url, ROLLOUT_SERVICE_KEY=KEY), 1)
        assert "redirect" in line
        assert other.asked == []


async def test_the_service_s_own_words_are_shown_without_what_a_terminal_obeys():
    hostile = "no \x1b[31mgroup\x9b [bold]"
    body = json.dumps({"detail": hostile}, ensure_ascii=False).encode()
    async with ConsoleService() as service:
        service.answers["/groups/g-5"] = lambda _: web.Response(status=404, body=body)
        line = one_line(await run("groups", "g-5", "--url", service.url), 1)
    assert "no \\x1b[31mgroup\\x9b [bold]" in line
    assert line.isprintable()


@pytest.mark.parametrize("body", [b"<html>", b'{"hello": 1}', b"[" * 100_000, b"\xff", b""])
async def test_something_else_that_answers_is_one_line_and_1(body: bytes):
    async with ConsoleService() as service:
        service.answers["/status"] = lambda _: web.Response(body=body)
        assert "no rollout-service" in one_line(await run("status", "--json", "--url", service.url), 1)


@pytest.mark.parametrize(
    "wrong",
    [
        ["status", "--url", "ftp://host"],
        ["status", "--url", "http://"],
        ["status", "--url", "http://host:99999"],
        ["status", "--url", "http://user:secret@host"],
        ["status", "--url", "http://host?x=1"],
        ["status", "--key-file", "/nowhere/at.all"],
        ["groups", "g-1", "--state", "ready"],
    ],
)
async def test_a_wrong_option_is_one_line_and_2(wrong: list[str]):
    assert "secret" not in one_line(await run(*wrong), 2)


async def test_a_file_that_holds_no_key_is_refused_without_being_shown(tmp_path: Path):
    file = tmp_path / "key"
    for content in ("", "one\ntwo", "not a key", "grün"):
        file.write_text(content)
        line = one_line(await run("status", "--url", NOTHING_THERE, "--key-file", str(file)), 2)
        assert not content or content not in line


async def test_no_command_takes_a_key_on_the_command_line():
    for command in ("top", "status", "groups", "engines"):
        assert (await run(command, "--key", KEY)).code == 2


def test_the_help_documents_the_exit_codes():
    for command in (commands.top, commands.status, commands.groups, commands.engines):
        assert "Exit code 1" in (command.__doc__ or "")
