"""A reward worker: a process that runs user code and may be killed at any moment without loss to anybody else.

User code runs in the main thread (some graders use signal.alarm) and cannot disturb the protocol, which has its own
socket; what it prints goes to the service's stderr. Whatever it raises becomes an answer, so the worker lives on. The
worker and the children of user code end with the service, even after kill -9 and while C code holds the interpreter.
"""

from __future__ import annotations

import faulthandler
import fcntl
import inspect
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Sequence
from typing import Any, BinaryIO

from rollout_service.errors import ConfigError
from rollout_service.loading import LoadedFunction, load
from rollout_service.rewards.fields import unpack
from rollout_service.rewards.outcome import Outcome, outcome_of_error, outcome_of_values
from rollout_service.rewards.wire import LENGTH, Ready, Refused, frame, read_call, read_setup


def main(protocol_fd: int, lifeline_fd: int) -> None:
    """Serves until the service closes the protocol's socket. Runs in a session, hence a process group, of its own."""
    for fd in (protocol_fd, lifeline_fd):
        os.set_inheritable(fd, False)
    _end_with_the_service(lifeline_fd)
    _outlive_sigterm()
    faulthandler.enable()  # a segmentation fault in user code names the line, on stderr
    with socket.socket(fileno=protocol_fd) as service, service.makefile("rb") as frames:
        first = _read(frames)
        if first is None:
            return
        setup = read_setup(first)
        sys.path[:0] = setup.path
        try:
            functions = [load(f'reward "{name}"', target, setup.path) for name, target in setup.functions]
        except ConfigError as error:
            service.sendall(frame(Refused(error=str(error))))
            return
        service.sendall(frame(Ready(is_async=[function.is_async for function in functions])))
        while (body := _read(frames)) is not None:
            service.sendall(frame(_score(functions, body)))


def _score(functions: Sequence[LoadedFunction], body: bytes) -> Outcome:
    number, packed = read_call(body)
    function = functions[number]
    try:
        n, arguments = unpack(packed, function.accepts)
        values = function.call(**arguments)
        if inspect.isawaitable(values):  # a plain function around an async one: still killable here
            import asyncio  # a fifth of a worker's start, and few functions need it

            values = asyncio.run(_awaited(values))
        return outcome_of_values(values, n)
    except BaseException as error:  # user code raises what it likes, SystemExit and CancelledError included
        return outcome_of_error(error)


async def _awaited(values: Awaitable[Any]) -> Any:
    return await values


def _read(frames: BinaryIO) -> bytes | None:
    head = frames.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    size = LENGTH.unpack(head)[0]
    body = frames.read(size)
    return body if len(body) == size else None


def _end_with_the_service(lifeline_fd: int) -> None:
    """Kills this process group when the other end of the lifeline closes.

    On Linux the kernel does it (O_ASYNC with SIGKILL as the signal): no thread, so a regular expression that holds the
    interpreter for hours does not keep the worker alive. Elsewhere a thread waits for the end.
    """
    if sys.platform == "linux":
        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
        # It closed before the signal was set: the socket closed with it, and the first read ends this process.
        return
    threading.Thread(target=_wait_for_the_end, args=(lifeline_fd,), daemon=True).start()


def _wait_for_the_end(lifeline_fd: int) -> None:
    os.read(lifeline_fd, 1)  # nothing is ever written to it
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _outlive_sigterm() -> None:
    """SIGTERM and SIGINT to a whole service (systemd, a terminal) are for the service, which ends its workers itself.

    A worker that fell to them would turn a shutdown into failed rewards. Handlers, not SIG_IGN, which children would
    inherit; and forked children of user code get the defaults back, so that they can be terminated.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda *_: None)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    os.register_at_fork(after_in_child=restore)
