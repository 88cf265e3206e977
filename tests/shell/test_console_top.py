"""`rollout-service top` on a terminal of its own."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tests.shell.console_service import ConsoleService, halt, live, status
from tests.shell.test_console import COMMAND, KEY, NOTHING_THERE, environment

ALTERNATE, BACK = "\x1b[?1049h", "\x1b[?1049l"
SEQUENCE = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]")


class Terminal:
    """The other end of a terminal on which `top` runs."""

    def __init__(self, end: int, process: asyncio.subprocess.Process) -> None:
        self._end, self.process = end, process
        self.raw = ""
        self._came = asyncio.Event()
        asyncio.get_running_loop().add_reader(end, self._read)

    def _read(self) -> None:
        try:
            piece = os.read(self._end, 65536)
        except OSError:  # the process has ended
            piece = b""
        if not piece:
            asyncio.get_running_loop().remove_reader(self._end)
        self.raw += piece.decode("utf-8", "replace")
        self._came.set()

    @property
    def text(self) -> str:
        """All that was shown so far, as text."""
        return SEQUENCE.sub("", self.raw)

    async def shows(self, *parts: str, after: int = 0) -> int:
        """Wait until all `parts` were shown after place `after` of the text; the place behind them."""
        await self.until(lambda: all(part in self.text[after:] for part in parts))
        return len(self.text)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self._came.clear()
                await self._came.wait()

    async def ends(self) -> int:
        async with asyncio.timeout(30):
            code = await self.process.wait()
        await self.until(lambda: BACK in self.raw or ALTERNATE not in self.raw)
        return code


@asynccontextmanager
async def top(url: str, *, rows: int = 40, columns: int = 120, **variables: str) -> AsyncIterator[Terminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    named = environment(TERM="xterm-256color", **variables)
    named = {name: value for name, value in named.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "top", "--url", url, "--interval", "0.1", stdin=theirs, stdout=theirs, stderr=theirs, env=named
    )
    os.close(theirs)
    terminal = Terminal(ours, process)
    try:
        yield terminal
    finally:
        asyncio.get_running_loop().remove_reader(ours)
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)


async def test_it_follows_the_run_and_ends_with_0_on_ctrl_c_with_the_screen_given_back():
    async with ConsoleService() as service, top(service.url) as terminal:
        at = await terminal.shows("version 7", "Generating")
        service.show(live(status(policy_version=8, halted=halt())))
        await terminal.shows("version 8", "HALTED", "the prompt is cursed", after=at)
        terminal.process.send_signal(signal.SIGINT)
        assert await terminal.ends() == 0
        assert "Traceback" not in terminal.text
        assert terminal.raw.count(ALTERNATE) == terminal.raw.count(BACK) == 1


async def test_sigterm_gives_the_screen_back_too():
    async with ConsoleService() as service, top(service.url) as terminal:
        await terminal.shows("version 7")
        terminal.process.terminate()
        assert await terminal.ends() == 128 + signal.SIGTERM
        assert BACK in terminal.raw
        assert "Traceback" not in terminal.text


async def test_a_lost_connection_is_shown_and_taken_up_again():
    async with ConsoleService() as service, top(service.url) as terminal:
        at = await terminal.shows("version 7")
        await service.stop()
        at = await terminal.shows("Connection lost", "What follows is how things were then", after=at)
        service.live = live(status(policy_version=9))
        await service.start()
        await terminal.shows("version 9", after=at)
        assert terminal.process.returncode is None


async def test_a_key_that_is_taken_away_ends_it_with_1_and_one_line():
    async with ConsoleService() as service:
        service.key = KEY
        async with top(service.url, ROLLOUT_SERVICE_KEY=KEY) as terminal:
            await terminal.shows("version 7")
            await service.stop()
            service.key = "another"
            await service.start()
            assert await terminal.ends() == 1
            assert "refuses this key" in terminal.text.split("RECENT")[-1]
            assert KEY not in terminal.raw


async def test_a_service_that_was_never_there_ends_it_with_1():
    async with top(NOTHING_THERE) as terminal:
        assert await terminal.ends() == 1
        assert "nothing answers" in terminal.text


async def test_hostile_texts_reach_no_terminal():
    text = "\x1b]0;owned\x07\x1b[2J\x9b31m[red]x[/red]"
    events = [{"at": "2026-11-30T01:02:03Z", "kind": "halted", "text": text, "group_id": None, "engine": None}]
    async with ConsoleService() as service:
        service.live = live(status(halted=halt(error=text)), recent=events)
        async with top(service.url) as terminal:
            await terminal.shows("\\x1b]0;owned\\x07\\x1b[2J\\x9b31m[red]x[/red]")
            assert not {"\x07", "\x9b", "\x1b"} & set(terminal.text)


async def test_on_a_low_terminal_the_sentence_is_still_there():
    async with ConsoleService() as service:
        service.live = live(status(halted=halt()))
        async with top(service.url, rows=8, columns=60) as terminal:
            await terminal.shows("HALTED", "the prompt is cursed")
