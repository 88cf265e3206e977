"""One service process after the other, forked from a process that has imported everything: a start takes milliseconds.

What always holds: each life is `rollout-service serve` in a process of its own, which ends by itself, by a signal, or
when the test process does; the next one begins after the end of the one before.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

CAPABILITY_VERSION = 0x20080522
DAC_OVERRIDE, DAC_READ_SEARCH = 1 << 1, 1 << 2
REPOSITORY = Path(__file__).absolute().parents[2]


class Lives:
    """Use as a context manager; one life at a time."""

    def __init__(self, *around: str) -> None:
        """`around`: a command that runs the one which follows it, somewhere else."""
        self._around = around

    def __enter__(self) -> Lives:
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        environ = os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [*self._around, sys.executable, "-m", "tests.durability.lives"],
            cwd=REPOSITORY,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid: int | None = None
        self._answers: SimpleQueue[Future[dict[str, int]]] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._reader.join(10)
        self._process.stdout.close()

    async def begin(
        self,
        directory: Path,
        *arguments: str,
        before: tuple[str, Any] | None = None,
        obedient: bool = False,
    ) -> None:
        """Run the command line with `arguments` in `directory`; its output is added to `service.log` there.

        `before`: `module:function` and what it is called with, in the new process, before anything of the service is.
        `obedient`: permissions of files hold for it even where it runs as root.
        """
        begun = self._order(directory, arguments, before=before, obedient=obedient)
        self.pid = (await asyncio.wrap_future(begun))["pid"]

    def run(
        self, *arguments: str, cwd: Path, environ: Mapping[str, str] | None = None, within_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """A life from its begin to its end; `environ`: all of it. Killed, and TimeoutError, where it takes too long."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            begun = self._order(cwd, arguments, outputs=(str(out), str(err)), environ=dict(environ or {}))
            self.pid = begun.result()["pid"]
            try:
                code = self._end.result(within_s)["code"]
            finally:
                if not self._end.done():
                    self.signal(signal.SIGKILL)
                self._end.result()
                self.pid = None
            return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())

    def _order(
        self,
        directory: Path,
        arguments: Sequence[str],
        *,
        outputs: tuple[str, str] = ("service.log", "service.log"),
        **more: Any,
    ) -> Future[dict[str, int]]:
        """Done with the new one's `pid`."""
        assert self.pid is None, "one life at a time"
        order = {"directory": str(directory), "arguments": list(arguments), "outputs": outputs, **more}
        begun: Future[dict[str, int]] = Future()
        self._end: Future[dict[str, int]] = Future()
        self._answers.put(begun)
        self._answers.put(self._end)
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps(order) + "\n")
        stdin.flush()
        return begun

    def signal(self, number: int) -> None:
        """To the life there is, if there is one."""
        if self.pid is not None:
            with suppress(ProcessLookupError):  # it has ended by itself, and `ended` has not been asked yet
                os.kill(self.pid, number)

    @property
    def over(self) -> bool:
        """Whether the last one has ended."""
        return self._end.done()

    async def ended(self) -> int:
        """Wait for the end; the exit code, or minus the signal. May be cancelled and asked again."""
        code = (await asyncio.shield(asyncio.wrap_future(self._end)))["code"]
        self.pid = None
        return code

    def _read(self) -> None:
        """In a thread: each line on stdout answers the next thing asked for."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.get().set_result(json.loads(line))


def main() -> None:
    """Orders in by lines on stdin, `{"pid"}` and `{"code"}` out."""
    import uvloop

    from rollout_service import app, checks, cli, server, settings
    from rollout_service.store import copying, postgres

    del app, checks, copying, postgres, server, settings, uvloop  # imported to be there in every life
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _live(order, cli)
        _say(sys.stdout, pid=pid)
        _, status = os.waitpid(pid, 0)
        _say(sys.stdout, code=os.waitstatus_to_exitcode(status))


def _live(order: dict[str, Any], cli: Any) -> None:
    code = 70
    try:
        os.chdir(order["directory"])
        sys.path[0] = order["directory"]  # as `python -m` has it
        if environ := order.get("environ"):
            os.environ.clear()
            os.environ.update(environ)
        for number, name in enumerate(order["outputs"], 1):
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(file, number)
            os.close(file)
        threading.Thread(target=_end_with_the_test, daemon=True).start()
        if order.get("obedient"):
            _obey_permissions()
        if before := order.get("before"):
            target, given = before
            module, _, function = target.partition(":")
            getattr(importlib.import_module(module), function)(given)
        sys.argv = ["rollout-service", *order["arguments"]]
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _obey_permissions() -> None:
    """Give up the capabilities by which root reads and writes whatever it likes."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()
    if libc.capget(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    for number in range(3):  # effective, permitted, inheritable
        sets[number] &= ~(DAC_OVERRIDE | DAC_READ_SEARCH)
    if libc.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _end_with_the_test() -> None:
    # No order comes while a life lives, so that what this reads can only be the end of the test process.
    os.read(0, 1)
    os._exit(1)


def _say(out: IO[str], **what: int) -> None:
    out.write(json.dumps(what) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
