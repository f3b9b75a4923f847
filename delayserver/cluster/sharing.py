"""Gives other nodes copies of this replica, over its own HTTP port.

    GET    /internal/shards/{shard}/snapshot                     one is taken: its manifest
    GET    /internal/shards/{shard}/snapshot/{id}/{path}         a file of it
           ?have=BYTES&checksum=CRC32C                           … from there, if that is the same
    DELETE /internal/shards/{shard}/snapshot/{id}                it is not needed any more

Served by owners and by replicas on standby, in front of the access of users: a proof of the cluster
(`proofs`) is all that counts here, and without one these addresses are not there (404). They are no
part of the API, and in no document of it.

An answer is sent in pieces, each read and sealed by a thread, so the event loop has nothing to do
with disk or cipher; and no faster than BYTES_PER_S, all copies of this process together, so that
messages leave in time meanwhile. The next piece waits until the last one was taken.

Cost: 0.1 ms of the event loop a piece of 256 KiB; so much memory for each copy under way. Threads:
belongs to the event loop.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import Final, cast
from urllib.parse import parse_qs

import structlog

from delayserver.api.hot.answers import Answer, header, problem_answer
from delayserver.api.hot.asgi import Asgi, Receive, Scope, Send, send_answer
from delayserver.api.hot.consume import WHEN_GONE
from delayserver.cluster.proofs import HEADER, NONCE_HEADER, Guard, Proofs
from delayserver.errors import NotFoundError, OverloadedError
from delayserver.recovery.incoming import prefix_checksum
from delayserver.recovery.snapshots import HeldSnapshot, Snapshots
from delayserver.recovery.store import Store
from delayserver.shards.sealed import NONCE_BYTES, Sealer
from storage.errors import StorageError
from storage.files import File

PREFIX: Final = "/internal/"
FROM_HEADER: Final = b"delay-from"
PIECE_BYTES: Final = 256 * 1024
BYTES_PER_S: Final = 128 * 1024 * 1024
COPIES_MAX: Final = 2
"""Files that are sent at one time."""

log = structlog.get_logger()
TakeSnapshot = Callable[[Store], object]
SnapshotCallback = Callable[[object, StorageError | None], None]


class Sharing:
    """An ASGI application: these calls, and all others as before."""

    def __init__(
        self,
        app: Asgi,
        shard: int,
        proofs: Proofs,
        snapshots: Snapshots,
        want: Callable[[TakeSnapshot, SnapshotCallback], None],
        clock: Callable[[], int],
    ) -> None:
        """`want` has the thread that files take a snapshot; it calls back in any thread."""
        self._app = app
        self._root = f"{PREFIX}shards/{shard}/snapshot"
        self._proofs = proofs
        self._guard = Guard(proofs, clock)
        self._snapshots = snapshots
        self._want = want
        self._copies = 0
        self._free_s = 0.0
        """When the next piece may be sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        nonce = self._nonce_of(scope)
        answer: Answer | None = problem_answer(NotFoundError("there is nothing at this address"))
        if nonce is not None:
            try:
                answer = await self._answer(scope, nonce, send)
            except StorageError as error:
                log.error("a copy of the shard is refused", error=str(error))
                answer = problem_answer(error)
            except OverloadedError as error:
                answer = problem_answer(error)
        if answer is not None:
            await send_answer(send, answer)

    def _nonce_of(self, scope: Scope) -> bytes | None:
        target = scope.get("raw_path") or scope["path"].encode()
        if scope["query_string"]:
            target = b"%b?%b" % (target, scope["query_string"])
        shown = header(scope["headers"], HEADER)
        return self._guard.nonce_of(scope["method"].encode(), target, shown)

    async def _answer(self, scope: Scope, nonce: bytes, send: Send) -> Answer | None:
        """None: it was answered. Raises StorageError, OverloadedError."""
        method, path = scope["method"], scope["path"]
        if path == self._root and method == "GET":
            await self._send(scope, send, nonce, 0, _ShortAnswer(await self._take()))
            return None
        if not path.startswith(self._root + "/"):
            return problem_answer(NotFoundError("another shard is here"))
        snapshot_id, _, name = path.removeprefix(self._root + "/").partition("/")
        if method == "DELETE":
            await asyncio.to_thread(self._snapshots.release, snapshot_id)
            return Answer(204, b"")
        opened = await asyncio.to_thread(self._snapshots.open, snapshot_id, name)
        if opened is None:
            return problem_answer(NotFoundError("that snapshot, or that file of it, is gone"))
        file, length = opened
        with contextlib.closing(file):
            if self._copies >= COPIES_MAX:
                raise OverloadedError(f"{COPIES_MAX} files are being copied already")
            self._copies += 1
            try:
                start = await asyncio.to_thread(_start, scope["query_string"], file)
                await self._send(scope, send, nonce, start, _Part(file, length))
            finally:
                self._copies -= 1
        return None

    async def _take(self) -> bytes:
        loop = asyncio.get_running_loop()
        asked: asyncio.Future[HeldSnapshot] = loop.create_future()

        def resolve(held: object, error: StorageError | None) -> None:
            if asked.done():
                return
            if error is None:
                asked.set_result(cast(HeldSnapshot, held))
            else:
                asked.set_exception(error)

        def told(held: object, error: StorageError | None) -> None:
            with contextlib.suppress(RuntimeError):  # The loop is closed already.
                loop.call_soon_threadsafe(resolve, held, error)

        self._want(self._snapshots.take, told)
        held = await asked
        manifest = await asyncio.to_thread(self._snapshots.complete, held)
        log.info("a copy of the shard is given", files=len(manifest.files), id=manifest.id)
        return manifest.encode()

    async def _send(
        self, scope: Scope, send: Send, nonce: bytes, start: int, source: "_ShortAnswer | _Part"
    ) -> None:
        own_nonce = secrets.token_bytes(NONCE_BYTES)
        sealer = self._proofs.sealer(nonce, own_nonce)
        headers = [
            (b"content-type", b"application/octet-stream"),
            (NONCE_HEADER, own_nonce.hex().encode()),
            (FROM_HEADER, b"%d" % start),
        ]
        gone = asyncio.Event()
        scope[WHEN_GONE](gone.set)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for at in range(start, source.length, PIECE_BYTES):
                await self._wait()
                piece = await asyncio.to_thread(source.sealed, at, sealer)
                if gone.is_set():
                    return
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            scope[WHEN_GONE](None)

    async def _wait(self) -> None:
        """Until a piece may be sent."""
        now_s = asyncio.get_running_loop().time()
        begin_s = max(self._free_s, now_s)
        self._free_s = begin_s + PIECE_BYTES / BYTES_PER_S
        if begin_s > now_s:
            await asyncio.sleep(begin_s - now_s)


class _ShortAnswer:
    """Something short."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.length = len(data)

    def sealed(self, at: int, sealer: Sealer) -> bytes:
        """The piece there."""
        return sealer.seal(self._data[at : at + PIECE_BYTES])


class _Part:
    """As much of a file as counts."""

    def __init__(self, file: File, length: int) -> None:
        self._file = file
        self.length = length

    def sealed(self, at: int, sealer: Sealer) -> bytes:
        """The piece there. Raises DiskError, UnreadableError."""
        return sealer.seal(self._file.pread(min(PIECE_BYTES, self.length - at), at))


def _start(query: bytes, file: File) -> int:
    """From where a file is sent, if the other has the beginning of it already."""
    fields = parse_qs(query.decode("latin-1"))
    try:
        have, checksum = int(fields["have"][0]), int(fields["checksum"][0])
    except (KeyError, ValueError):
        return 0
    return have if have > 0 and prefix_checksum(file, have) == checksum else 0
