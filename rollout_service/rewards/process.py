"""One worker process as the service sees it.

Nothing here blocks the event loop: a thread a worker starts the process, waits for its end and reports it. A worker
that is killed is gone with all its children: they are one process group.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import cast

import msgspec

from rollout_service.errors import ConfigError
from rollout_service.rewards.outcome import Outcome
from rollout_service.rewards.wire import LENGTH, Ready, Refused, Setup, frame, read_from_worker

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rollout_service.rewards.worker import main; "
    "fds = map(int, sys.argv[2:4]); sys.argv[:] = ['rollout-service reward worker']; main(*fds)"
)
"""Instead of -m: the worker finds exactly what the service finds, and nothing in the working directory comes first."""

_MAX_FRAME = 1 << 28
"""Bytes of an answer; more is not one."""


class Worker(asyncio.Protocol):
    """Start it once; then send a frame, wait for `on_outcome`, and so on. `on_end` comes once, whatever ends it."""

    def __init__(self, *, on_outcome: Callable[[Worker, Outcome], None], on_end: Callable[[Worker, str], None]) -> None:
        self._on_outcome = on_outcome
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._lifeline: int | None = None
        self._pid: int | None = None
        self._killed = False
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """Done when there is no process (any more): how it ended."""

    async def start(self, setup: Setup) -> Ready:
        """Starts the process and waits for its hand-shake. Raises ConfigError if that cannot be."""
        try:
            ours, theirs = socket.socketpair()
            lifeline, self._lifeline = os.pipe()
        except OSError as error:
            self._finish(f"could not be started: {error}")
            raise ConfigError(f"a reward worker could not be started: {error}") from error
        thread = threading.Thread(target=self._keep, args=(theirs, lifeline), name="reward-worker", daemon=True)
        thread.start()
        await self._loop.create_unix_connection(lambda: self, sock=ours)
        self.send(frame(setup))
        return await self._ready

    def send(self, data: bytes) -> None:
        """To a worker that waits for it; to one that has died it is lost, and `on_end` is on its way."""
        if self._transport is not None:
            self._transport.write(data)

    def kill(self) -> None:
        """Ends the process and its children now; no answer comes any more."""
        self._killed = True
        if self._transport is not None:
            self._transport.abort()
        self._kill_group()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._killed:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while not self._killed and len(self._buffer) >= LENGTH.size:
            size = LENGTH.unpack_from(self._buffer)[0]
            end = LENGTH.size + size
            if size > _MAX_FRAME:
                self.kill()
                return
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[LENGTH.size : end])
            del self._buffer[:end]
            self._received(body)

    def connection_lost(self, exc: Exception | None) -> None:
        # It is ending (its exit status is already fixed), or user code closed our socket: either way it is of no use.
        self._transport = None
        self._kill_group()

    def _received(self, body: bytes) -> None:
        try:
            message = read_from_worker(body)
        except msgspec.MsgspecError:
            self.kill()
            return
        if isinstance(message, Outcome):
            self._on_outcome(self, message)
        elif self._ready.done():
            self.kill()
        elif isinstance(message, Refused):
            self._ready.set_exception(ConfigError(message.error))
        else:
            self._ready.set_result(message)

    def _keep(self, theirs: socket.socket, lifeline: int) -> None:
        """The worker's thread: starts the process and waits for its end."""
        path = json.dumps(sys.path)
        try:
            with theirs:
                process = subprocess.Popen(  # noqa: S603 - our own interpreter and code; nothing comes from outside
                    [sys.executable, "-u", "-P", "-c", _BOOT, path, str(theirs.fileno()), str(lifeline)],
                    pass_fds=(theirs.fileno(), lifeline),
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what user code prints is for the log, not for a protocol on the service's stdout
                    start_new_session=True,
                )
        except OSError as error:
            self._report(f"could not be started: {error}")
            return
        finally:
            os.close(lifeline)
        self._pid = process.pid
        if self._killed:  # killed between the two lines above, when the loop did not know the number yet
            self._kill_group()
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            self._kill_group()  # what it left behind; as long as it is a zombie its number is nobody else's
        code = process.wait()
        self._pid = None
        self._report(f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")

    def _report(self, how: str) -> None:
        try:
            self._loop.call_soon_threadsafe(self._finish, how)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            return

    def _finish(self, how: str) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self._transport is not None:
            self._transport.abort()
        if not self._ready.done():
            self._ready.set_exception(ConfigError(f"a reward worker ended while it started: {how}"))
            self._ready.exception()  # the one who waited may be gone; that is no warning
        self.ended.set_result(how)
        self._on_end(self, how)

    def _kill_group(self) -> None:
        pid = self._pid
        if pid is None:
            return
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:  # it ended by itself in this moment
            return
