"""A PgBouncer before a test's PostgreSQL.

What always holds: it belongs to the context that started it, listens on 127.0.0.1 alone and never runs as root.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.postgres_cluster import Cluster

START_S = 20.0


def pgbouncer() -> str:
    """Its path. Skips the test where it is missing, unless REQUIRE_TOOLS=1: then it fails."""
    found = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        reason = "pgbouncer is not installed (Debian: apt install pgbouncer)"
        if os.environ.get("REQUIRE_TOOLS") == "1":
            pytest.fail(f"REQUIRE_TOOLS=1, but {reason}")
        pytest.skip(reason)
    return found


class Pooler:
    """`stop` and `start` keep the port."""

    def __init__(self, cluster: Cluster, folder: Path, *, mode: str, size: int) -> None:
        self._cluster = cluster
        self._log = folder / "pgbouncer.log"
        self._config = folder / "pgbouncer.ini"
        self._process: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = int(server.getsockname()[1])
        login = urlsplit(cluster.url())
        self._config.write_text(
            f"""[databases]
* = host=127.0.0.1 port={cluster.port} user={login.username} password={login.password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self.port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {size}
max_client_conn = 100
server_login_retry = 0.1
query_wait_timeout = 5
"""
        )
        for path in (folder, self._config):
            path.chmod(0o755)

    def url(self, url: str) -> str:
        """The cluster's `url` through the pooler."""
        return url.replace(f":{self._cluster.port}/", f":{self.port}/")

    def start(self) -> None:
        """Returns when it takes connections."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [pgbouncer(), str(self._config)], stdout=log, stderr=log, cwd="/", **self._cluster.whom
            )
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
            except OSError:
                assert self._process.poll() is None, self._log.read_text(errors="replace")[-3000:]
                assert time.monotonic() < deadline, "PgBouncer does not listen"
                time.sleep(0.02)  # between two looks
            else:
                return

    def stop(self) -> None:
        """At once: every connection breaks."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(10)


@contextmanager
def running_pooler(cluster: Cluster, folder: Path, *, mode: str = "transaction", size: int = 2) -> Iterator[Pooler]:
    pooler = Pooler(cluster, folder, mode=mode, size=size)
    pooler.start()
    try:
        yield pooler
    finally:
        pooler.stop()
