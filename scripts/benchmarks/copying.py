"""PostgreSQL's COPY of the rows that a bulk load reads: what a load is measured beside.

The table has a primary key and an index by due time, and the server its defaults (`fsync`,
`synchronous_commit`): when COPY answers, all rows are durable and can be found by key and by time.
The server reads a file of its own form, on its own machine, so that nothing else takes part. What
is left out flatters it: bodies are text that it does not look into.

Cost: a copy of the rows on the disk. Threads: the caller's.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peers.postgresql import Database

from delayserver.cli.demo.process import free_port

TABLE = """
DROP TABLE IF EXISTS messages;
CREATE TABLE messages (key text PRIMARY KEY, due_ms bigint NOT NULL, body text NOT NULL);
CREATE INDEX ON messages (due_ms);
"""


class Copying:
    """A database server, and a file that it copies."""

    def __init__(self, cluster: Database, path: Path) -> None:
        self._cluster = cluster
        self._path = path

    def copy(self) -> float:
        """Copy the file into a new table; how many seconds that took, until it was durable."""
        self._cluster.run(TABLE, "CHECKPOINT")
        began = time.monotonic()
        self._cluster.run(f"COPY messages FROM '{self._path}'")
        return time.monotonic() - began


@contextmanager
def copying(directory: Path, rows: Sequence[dict[str, Any]]) -> Iterator[Copying]:
    """A server of its own, with a file of these rows (`key`, `due` in ms, `body`)."""
    directory.mkdir()
    cluster = Database(directory, free_port())
    cluster.start()
    try:
        asyncio.run(cluster.wait_until_ready())
        path = directory / "rows.copy"
        with path.open("w", encoding="utf-8") as file:
            file.writelines(f"{row['key']}\t{row['due']}\t{row['body']}\n" for row in rows)
        path.chmod(0o644)
        yield Copying(cluster, path)
    finally:
        cluster.kill()
