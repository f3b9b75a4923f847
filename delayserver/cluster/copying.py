"""Asks another node for a copy of its replica: the other end of `sharing`.

All calls wait: a copy is made by a thread that has nothing else to do. Bytes that were changed on
their way are not believed (`proofs`).

Cost: 0.3 ms a piece of 256 KiB. Threads: any, one at a time.
"""

import contextlib
import http.client
import ssl
from collections.abc import Callable, Iterator
from typing import Final
from urllib.parse import urlsplit

import msgspec

from delayserver.cluster.proofs import HEADER, NONCE_HEADER, Proofs
from delayserver.cluster.sharing import FROM_HEADER, PREFIX
from delayserver.errors import LinkError
from delayserver.recovery.snapshots import SnapshotManifest, decode_manifest
from storage.errors import CopySourceError

SILENCE_S: Final = 60.0
"""A node that says nothing for so long is given up. A snapshot takes a checkpoint and the copy of a
catalog."""
_READ_BYTES: Final = 256 * 1024


class HttpPeer:
    """See `delayserver.recovery.incoming.CopySource`."""

    def __init__(
        self, url: str, shard: int, proofs: Proofs, tls: ssl.SSLContext, clock: Callable[[], int]
    ) -> None:
        """`url`: of the very process that has the shard; `tls`: how it is verified by HTTPS."""
        self.name = url
        self._root = f"{PREFIX}shards/{shard}/snapshot"
        self._proofs = proofs
        self._tls = tls
        self._clock = clock

    def snapshot(self) -> SnapshotManifest:
        """Raises CopySourceError, OSError."""
        with self._asked("GET", self._root) as (_, pieces):
            try:
                return decode_manifest(b"".join(pieces))
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise CopySourceError(
                    self.name, f"its manifest cannot be read ({error})"
                ) from error

    @contextlib.contextmanager
    def read(
        self, snapshot_id: str, path: str, have: int, checksum: int
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Raises CopySourceError, OSError."""
        target = f"{self._root}/{snapshot_id}/{path}?have={have}&checksum={checksum}"
        with self._asked("GET", target) as asked:
            yield asked

    def release(self, snapshot_id: str) -> None:
        """Raises CopySourceError, OSError."""
        with self._asked("DELETE", f"{self._root}/{snapshot_id}"):
            pass

    @contextlib.contextmanager
    def _asked(self, method: str, target: str) -> Iterator[tuple[int, Iterator[bytes]]]:
        connection = self._connection()
        try:
            nonce = self._begin(connection, method, target)
            answer = connection.getresponse()
            if answer.status >= 300:
                text = answer.read(2000).decode(errors="replace")
                if answer.status == http.HTTPStatus.SERVICE_UNAVAILABLE:
                    raise ConnectionError(f"{answer.status}: {text}")  # later, perhaps
                raise CopySourceError(self.name, f"it answers {answer.status}: {text}")
            start = int(answer.headers.get(FROM_HEADER.decode(), "0"))
            own_nonce = bytes.fromhex(answer.headers.get(NONCE_HEADER.decode(), ""))
            yield start, self._pieces(answer, nonce, own_nonce)
        except http.client.HTTPException as error:
            raise ConnectionError(f"its answer broke off ({error!r})") from error
        except LinkError as error:
            raise CopySourceError(
                self.name, f"what came is not what it has sent: {error}"
            ) from error
        except ValueError as error:
            raise CopySourceError(self.name, f"it is no node of this cluster ({error})") from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.name)
        if parts.hostname is None or parts.scheme not in ("http", "https"):
            raise CopySourceError(self.name, "that is no address")
        if parts.scheme == "https":
            return http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=SILENCE_S, context=self._tls
            )
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=SILENCE_S)

    def _begin(self, connection: http.client.HTTPConnection, method: str, target: str) -> bytes:
        shown = self._proofs.show(method, target, self._clock())
        connection.request(method, target, headers={HEADER.decode(): shown.header.decode()})
        return shown.nonce

    def _pieces(
        self, answer: http.client.HTTPResponse, nonce: bytes, own_nonce: bytes
    ) -> Iterator[bytes]:
        opener = self._proofs.opener(nonce, own_nonce)
        while data := answer.read1(_READ_BYTES):
            yield from opener.open(data)
