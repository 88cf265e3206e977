"""Processes that an example or a test starts: each leads a process group of its own and is ended by that group's id.

A terminal's Ctrl-C therefore does not reach them; whoever started them ends them. Their output goes to a log file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

TERM_GRACE_S = 10.0
POLL_S = 0.1


class ProcessEnded(RuntimeError):
    """A process ended, or did not become ready; the message has the end of its log."""


class Process:
    """One started process. Leaving the `with` block ends it, unless `keep` was set."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdout: int | None = None,
    ) -> None:
        """`env` adds to this process's environment; `stdout=subprocess.PIPE` keeps standard output out of the log."""
        self.name, self.log, self.keep = name, log, False
        with log.open("ab") as sink:
            self.popen = subprocess.Popen(
                command,
                env={**os.environ, **(env or {})},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=sink if stdout is None else stdout,
                stderr=sink,
                start_new_session=True,
            )

    def wait_ready(self, url: str, within_s: float) -> float:
        """Wait until GET `url` answers 200; returns the seconds it took. ProcessEnded if it never does."""
        started = time.monotonic()
        with httpx.Client(timeout=5) as http:
            while (waited := time.monotonic() - started) < within_s:
                if self.popen.poll() is not None:
                    raise ProcessEnded(f"{self.name} ended with {self.popen.returncode}; its log:\n{self.tail()}")
                try:
                    if http.get(url).status_code == 200:
                        return waited
                except httpx.TransportError:
                    pass  # not listening yet
                time.sleep(POLL_S)
        raise ProcessEnded(f"{self.name} did not answer {url} within {within_s:.0f} s; its log:\n{self.tail()}")

    def tail(self, size: int = 3000) -> str:
        return self.log.read_text(errors="replace")[-size:] if self.log.exists() else ""

    def stop(self) -> None:
        """End the process, then whatever is left of its group."""
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(TERM_GRACE_S)
            except subprocess.TimeoutExpired:
                self._kill_group()
                self.popen.wait()
        self._kill_group()
        if self.popen.stdout:
            self.popen.stdout.close()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # nobody of the group is left
            os.killpg(self.popen.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.keep:
            self.stop()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
