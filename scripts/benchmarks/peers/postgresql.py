"""PostgreSQL: a table with an index by due time, polled every 10 ms with SKIP LOCKED.

A row is inserted in a transaction of its own, so that its answer means that it is on the disk
(`synchronous_commit = on`); connections at the same moment share a sync. What is due is deleted as
it is taken, and the commit is the acknowledgement.
"""

import asyncio
import os
import pwd
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from peers.base import (
    POLL_S,
    ClosedLoop,
    ClosedLoopResult,
    Got,
    Peer,
    PeerError,
    Program,
    make_body,
    paced_tasks,
)

SCHEMA = """
CREATE TABLE IF NOT EXISTS messages (id bigserial PRIMARY KEY, due_ms bigint, body bytea);
CREATE INDEX IF NOT EXISTS messages_due ON messages (due_ms);
"""
TAKE = """
DELETE FROM messages WHERE id IN (
  SELECT id FROM messages WHERE due_ms <= $1 ORDER BY due_ms LIMIT 500 FOR UPDATE SKIP LOCKED)
RETURNING body
"""
CONNECTIONS_MAX = 80


def is_installed() -> bool:
    """Whether its programs are there."""
    return _programs() is not None


def _programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    initdb = shutil.which("initdb")
    return Path(initdb).parent if initdb else None


class Database(Program):
    """One database server, asked by its own client."""

    name = "PostgreSQL"

    def start(self) -> None:
        programs = _programs()
        assert programs is not None
        data, user = self.directory / "cluster", None
        if os.getuid() == 0:
            # It refuses to run as root.
            user = "postgres"
            self.directory.parent.chmod(0o755)
            os.chown(self.directory, pwd.getpwnam(user).pw_uid, -1)
        if not data.exists():
            made = subprocess.run(
                [programs / "initdb", "-D", data, "-A", "trust", "-U", "bench", "--no-sync"],
                user=user,
                cwd=self.directory,
                capture_output=True,
                text=True,
                check=False,
            )
            if made.returncode:
                raise PeerError(f"initdb failed: {made.stderr}")
        (data / "postmaster.pid").unlink(missing_ok=True)
        settings = ["max_connections=100", "shared_buffers=256MB", "synchronous_commit=on"]
        options = [part for setting in settings for part in ("-c", setting)]
        self.spawn(
            str(programs / "postgres"),
            *("-D", str(data), "-p", str(self.port), "-h", "127.0.0.1", "-k", ""),
            *options,
            user=user,
            cwd=self.directory,
        )

    async def is_ready(self) -> bool:
        return self._psql("SELECT 1").returncode == 0

    def run(self, *statements: str) -> None:
        """Run statements, each in a transaction of its own. Raises PeerError."""
        for statement in statements:
            done = self._psql(statement)
            if done.returncode:
                raise PeerError(f"psql failed: {done.stderr}")

    def _psql(self, statement: str) -> subprocess.CompletedProcess[str]:
        programs = _programs()
        assert programs is not None
        where = ("-h", "127.0.0.1", "-p", str(self.port), "-U", "bench", "-d", "postgres")
        return subprocess.run(
            [programs / "psql", "-X", "-q", *where, "-v", "ON_ERROR_STOP=1", "-c", statement],
            capture_output=True,
            text=True,
            check=False,
        )


class PostgreSQL(Database, Peer):
    """The same, asked by asyncpg."""

    name = "PostgreSQL SKIP LOCKED"
    packages = "Debian: postgresql; PyPI: asyncpg"
    durability = "synchronous_commit = on"
    in_flight_max = CONNECTIONS_MAX

    @classmethod
    def is_installed(cls) -> bool:
        try:
            import asyncpg  # noqa: F401
        except ImportError:
            return False
        return is_installed()

    async def _connect(self) -> Any:
        import asyncpg

        return await asyncpg.connect(
            host="127.0.0.1", port=self.port, user="bench", database="postgres"
        )

    async def is_ready(self) -> bool:
        import asyncpg

        try:
            connection = await self._connect()
        except asyncpg.PostgresError:
            return False
        await connection.execute(SCHEMA)
        await connection.close()
        return True

    async def publish(self, load: ClosedLoop) -> ClosedLoopResult:
        load.in_flight = min(load.in_flight, CONNECTIONS_MAX)
        connections = [await self._connect() for _ in range(load.in_flight)]
        inserts = [
            await connection.prepare("INSERT INTO messages (due_ms, body) VALUES ($1, $2)")
            for connection in connections
        ]

        async def publish(task: int, due_ms: int) -> None:
            await inserts[task].fetch(due_ms, make_body(due_ms))

        published = await paced_tasks(load, publish)
        for connection in connections:
            await connection.close()
        return published

    async def consume(self, count: int, idle_max_s: float) -> Got:
        got = Got()
        connection = await self._connect()
        take = await connection.prepare(TAKE)
        last_at = time.monotonic()
        while len(got.due_ms) < count and time.monotonic() - last_at < idle_max_s:
            rows = await take.fetch(time.time_ns() // 1_000_000)
            now_ns = time.time_ns()
            for row in rows:
                got.add(now_ns, row["body"])
            if rows:
                last_at = time.monotonic()
            if len(rows) < 500:
                await asyncio.sleep(POLL_S)
        await connection.close()
        return got
