"""A streaming standby of a PostgreSQL server of the tests.

What always holds: what the primary said is committed is at the standby, too; a promoted standby takes writes.
"""

from __future__ import annotations

import shutil
import subprocess

import asyncpg

from tests.postgres_cluster import USER, Cluster, program
from tests.service import until

FOLLOWS_WITHIN_S = 30.0
PROMOTED_WITHIN_S = 60
SYNCHRONOUS = "SELECT true FROM pg_stat_replication WHERE sync_state = 'sync'"


class Standby(Cluster):
    """Of `primary`, which runs; `start` it, then `follows`."""

    def __init__(self, primary: Cluster) -> None:
        super().__init__(primary.settings)
        self.primary = primary
        data = self.folder / "data"
        shutil.rmtree(data)
        command = [program("pg_basebackup"), "-h", "127.0.0.1", "-p", str(primary.port), "-U", USER, "-D", str(data)]
        command += ["--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder, **self.whom)
        if done.returncode != 0:
            self.close()
        assert done.returncode == 0, done.stderr

    async def follows(self) -> None:
        """From now on every commit of the primary waits for this one."""
        await self.primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        await self.primary.execute("SELECT pg_reload_conf()")

        connection = await asyncpg.connect(self.primary.url())
        try:
            await until(lambda: connection.fetchval(SYNCHRONOUS), FOLLOWS_WITHIN_S, "the standby is a synchronous one")
        finally:
            await connection.close()

    async def promote(self) -> None:
        """Returns when it takes writes."""
        await self.execute(f"SELECT pg_promote(true, {PROMOTED_WITHIN_S})")

    def _takes_connections(self) -> bool:
        try:
            lines = (self.folder / "data" / "postmaster.pid").read_text().split("\n")
        except OSError:
            return False
        return len(lines) > 7 and lines[7].strip() in ("ready", "standby")
