"""The shards of a directory as processes, each with an address of its own.

    python -m tests.pipeline.cluster SHARD COUNT DIR SOCKETS serve …     one of them

A supervisor gives all of them one address; here a test says which one it comes in at. What belongs
to another shard goes there over the links, as it does behind a supervisor.
"""

import os
import sys
import tempfile
from functools import partial
from pathlib import Path

from delayserver.cli import main
from delayserver.serve import process
from delayserver.shards.place import ShardPlace
from storage.files import OsFiles
from storage.shards import read_shard_count, shard_directory
from tests.integration.api_support import ApiServer
from tests.waiting import wait_until


class Cluster:
    """Servers of the shards of one directory."""

    def __init__(self, root: Path, **settings: object) -> None:
        """On the directory `data` in `root`, which was made before."""
        self.data_dir = root / "data"
        count = read_shard_count(OsFiles(str(self.data_dir)))
        assert count is not None
        # Not below `root`: the path of a Unix socket is short.
        self._sockets = tempfile.TemporaryDirectory()
        self.shards: list[ApiServer] = []
        for shard in range(count):
            (root / f"log{shard}").mkdir()
            server = ApiServer(root / f"log{shard}", **settings)
            server.data_dir = server.process.data_dir = self.data_dir / shard_directory(shard)
            place = (str(shard), str(count), str(self.data_dir), self._sockets.name)
            server.process.program = ("-m", __spec__.name, *place)
            self.shards.append(server)
        try:
            for server in self.shards:
                server.launch()
            for server in self.shards:
                server.process.wait_ready()
                wait_until(partial(_is_linked, server))
        except BaseException:
            self.close()
            raise
        self.url = self.shards[0].process.url

    def close(self) -> None:
        for server in self.shards:
            server.shut_down()
        self._sockets.cleanup()


def _is_linked(server: ApiServer) -> bool:
    """Whether all others can be asked through it."""
    return server.get("/v1/stats").status_code == 200


def serve_shard() -> None:
    """What the command `serve` does, as one shard of several."""
    shard, count, data_dir, sockets = sys.argv[1:5]
    del sys.argv[1:5]
    place = ShardPlace(int(shard), int(count), Path(data_dir), Path(sockets))
    # The end of standard input would be that of the supervisor.
    read, _ = os.pipe()
    os.dup2(read, sys.stdin.fileno())
    serve = process.serve
    process.serve = lambda settings: serve(settings, place)  # type: ignore[assignment,misc]
    main()


if __name__ == "__main__":
    serve_shard()
