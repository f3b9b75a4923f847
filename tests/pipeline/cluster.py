"""Servers of the shards of a directory, each a process, and an address that hands calls on.

The calls of a load and of an archive name their shard; that is all that is handed on here.
"""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx

from storage.files import OsFiles
from storage.shards import read_shard_count, shard_directory
from tests.integration.api_support import ApiServer


class Cluster:
    """Servers of the shards of one directory, and an address that hands calls on."""

    def __init__(self, root: Path, **settings: object) -> None:
        """On the directory `data` in `root`, which was made before."""
        self.data_dir = root / "data"
        count = read_shard_count(OsFiles(str(self.data_dir)))
        assert count is not None
        self.shards: list[ApiServer] = []
        for shard in range(count):
            (root / f"log{shard}").mkdir()
            server = ApiServer(root / f"log{shard}", **settings)
            server.data_dir = server.process.data_dir = self.data_dir / shard_directory(shard)
            server.start()
            self.shards.append(server)
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                address = urlsplit(self.path)
                shard = int(parse_qs(address.query)["shard"][0])
                if self.command == "POST":
                    # The shard knows its own directory alone.
                    below = f'"{shard_directory(shard)}/'.encode()
                    assert below in body
                    body = body.replace(below, b'"')
                answer = httpx.request(
                    self.command,
                    f"{cluster.shards[shard].base_url}".rstrip("/") + self.path,
                    content=body,
                    headers={"content-type": "application/json"},
                    timeout=30,
                )
                self.send_response(answer.status_code)
                self.send_header("content-type", answer.headers["content-type"])
                self.send_header("content-length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

            do_GET = do_PUT = do_POST = handle_any

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for server in self.shards:
            server.shut_down()
