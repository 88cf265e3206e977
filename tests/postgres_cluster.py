"""Throw-away PostgreSQL servers for tests.

What always holds: a server belongs to the process that started it, listens on 127.0.0.1 and a socket in its own folder
alone, never runs as root, and ends with that process however that ends (its shell waits for the end of a pipe). The
shared one of a process is made when it is first asked for; every test gets a database of its own, copied from one that
has the schema. Several test processes do not meet.
"""

from __future__ import annotations

import atexit
import itertools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from rollout_service.store.postgres import PostgresStore

USER = "rollout"
PASSWORD = "not-to-be-shown"
START_S = 60.0
TEMPLATE = "with_schema"
SHM = Path("/dev/shm")  # noqa: S108  # mkdtemp makes a folder of its own there
SHM_BYTES = 2 << 30
UNSYNCED = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
"""Tests that crash no machine need no disk; `synchronous_commit` is set by the store itself where it matters."""

# Starts the server and ends it when told how (INT: in order, QUIT: at once). Where nobody tells any more, because the
# tests were killed, it ends it at once and removes the folder, which is the first parameter.
_SHELL = """
folder=$1; shift; "$@" </dev/null &
read how; kill -${how:-QUIT} $!; wait $!
[ "$how" ] || rm -rf "$folder"
"""


def program(name: str) -> str:
    """Its path. Skips the test where it is missing, unless REQUIRE_TOOLS=1: then it fails."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
    for folder in (os.environ.get("POSTGRES_BIN", ""), *map(str, reversed(versions)), *os.get_exec_path()):
        if folder and os.access(Path(folder) / name, os.X_OK):
            return str(Path(folder) / name)
    reason = f"{name} is not installed (Debian: apt install postgresql)"
    if os.environ.get("REQUIRE_TOOLS") == "1":
        pytest.fail(f"REQUIRE_TOOLS=1, but {reason}")
    pytest.skip(reason)


def _as_whom() -> dict[str, Any]:
    """For subprocess: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise AssertionError("no user to run PostgreSQL as")


def _folder(settings: Mapping[str, str]) -> Path:
    """In memory where nothing is synced and there is room."""
    in_memory = settings.get("fsync") == "off" and os.access(SHM, os.W_OK) and shutil.disk_usage(SHM).free > SHM_BYTES
    return Path(tempfile.mkdtemp(prefix="pg-", dir=SHM if in_memory else None))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Cluster:
    """A server with its data. `stop` and `start` keep the port; `close` removes everything."""

    def __init__(self, settings: Mapping[str, str] = UNSYNCED, *, auth: str = "trust") -> None:
        self.settings = dict(settings)
        self.port = _free_port()
        self.folder = _folder(self.settings)
        self.log = self.folder / "log"
        self._data = self.folder / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        self._template = False
        password = self.folder / "password"
        password.write_text(PASSWORD)
        self.whom = _as_whom()
        if self.whom:
            for path in (self.folder, password):
                os.chown(path, self.whom["user"], self.whom["group"])
        command = [program("initdb"), "-D", self._data, "-U", USER, "--no-sync", "--encoding=UTF8", "--locale=C"]
        command += [f"--auth-host={auth}", "--auth-local=trust", f"--pwfile={password}"]
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, check=False, cwd=self.folder, **self.whom
        )
        assert done.returncode == 0, done.stdout + done.stderr
        atexit.register(self.close)

    def url(self, database: str = "postgres", *, port: int | None = None) -> str:
        return f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{port or self.port}/{database}"

    def start(self) -> None:
        """Returns when it takes connections."""
        assert self._process is None, "it runs"
        deadline = time.monotonic() + START_S
        while not self._started(deadline):
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")[-3000:]
            self.port = _free_port()  # somebody else took it meanwhile

    def stop(self, *, at_once: bool = False) -> None:
        """Sessions are ended in order, or (`at_once`) as by a crash: the next start recovers from the log."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.write(b"QUIT\n" if at_once else b"INT\n")
        process.stdin.close()
        process.wait(START_S)

    def pid(self) -> int:
        """Of the server that runs."""
        return int((self._data / "postmaster.pid").read_text().split("\n")[0])

    def close(self) -> None:
        self.stop(at_once=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self.close)

    async def execute(self, statement: str, database: str = "postgres") -> None:
        """As the server's owner, outside of a transaction."""
        connection = await asyncpg.connect(self.url(database))
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    @asynccontextmanager
    async def database(self, *, schema: bool = True) -> AsyncIterator[str]:
        """The URL of a new database, with a store's schema unless said otherwise; it goes when the context ends."""
        if schema and not self._template:
            await self.execute(f"CREATE DATABASE {TEMPLATE}")
            store = PostgresStore(self.url(TEMPLATE), max_staleness=1, pool_size=1)
            await store.open()
            await store.close()
            self._template = True
        name = f"test_{next(self._numbers)}"
        await self.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE if schema else 'template0'}")
        try:
            yield self.url(name)
        finally:
            await self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def _started(self, deadline: float) -> bool:
        command = [program("postgres"), "-D", str(self._data), "-p", str(self.port)]
        options = {"listen_addresses": "127.0.0.1", "unix_socket_directories": str(self.folder), **self.settings}
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        (self._data / "postmaster.pid").unlink(missing_ok=True)  # of one that was ended at once
        with self.log.open("ab") as log:
            said = log.tell()
            process = subprocess.Popen(
                ["/bin/sh", "-c", _SHELL, "sh", str(self.folder), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,  # an interrupt at the keyboard is for the tests
                **self.whom,
            )
        while not self._takes_connections():
            if "could not create any TCP/IP sockets" in self.log.read_bytes()[said:].decode(errors="replace"):
                process.communicate(b"QUIT\n")
                return False
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")[-3000:]
            time.sleep(0.02)  # between two looks
        self._process = process
        return True

    def _takes_connections(self) -> bool:
        try:
            lines = (self._data / "postmaster.pid").read_text().split("\n")
        except OSError:
            return False
        return len(lines) > 7 and lines[7].strip() == "ready"


@cache
def cluster() -> Cluster:
    """The one of this process."""
    made = Cluster()
    made.start()
    return made
