"""The bytes between two machines: a proof that both know the secret, then sealed records.

    connector ── hello: magic, nonce, shard, epoch ──────────▶ acceptor
              ◀── nonce, shard, epoch, proof of acceptor ────
              ──── proof of connector ───────────────────────▶
              ◀══ records, each direction under its own key ═▶

A proof is HMAC-SHA256, keyed by the secret, of who proves (connector or acceptor), the name of the
cluster and all that both have said: nonces, shards, epochs. A proof of one side is none of the
other, so nothing can be sent back to whom it came from; nonces are new each time, so nothing can be
used again. The connector hears a proof before it gives one.

The key of each direction comes from the secret and the same words (HKDF). A record is its length
and AES-256-GCM; its number in its direction is the nonce, so a record that was changed, repeated,
left out or moved is refused, and with it the whole connection. Sizes and times can be seen. Keys
are not changed in the life of a connection: after a year at 100 MB/s a stranger has one chance in
2**30 to learn anything at all.

Rejected: TLS, since certificates have to be issued and renewed for each machine, and one secret is
all that a cluster has (keys shared beforehand came to Python's `ssl` with 3.13); ChaCha20-Poly1305,
28 µs for 100 KB where AES-GCM took 11; HMAC alone, 57 µs, and everybody can read; keys that a
secret which leaks later does not open (X25519), since who has the secret can join by then.

Cost: 0.6 µs a record and 0.11 µs a KB at either side; 20 µs a connection. Threads: pure, no I/O.
"""

import hmac
import struct
from collections.abc import Iterator
from enum import Enum
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from delayserver.errors import LinkError

SECRET_BYTES: Final = 32
NONCE_BYTES: Final = 32
RECORD_MAX_BYTES: Final = 1024 * 1024
"""The most bytes in one record: so many are buffered before they are known to be authentic."""
_MAGIC: Final = b"delayserver-link-1"
_PROOF_BYTES: Final = 32
_KEY_BYTES: Final = 32
_TAG_BYTES: Final = 16
_COUNTER_BYTES: Final = 12
_LENGTH_BYTES: Final = 4
_SAID = struct.Struct(f"<{NONCE_BYTES}sIQ")
"""Nonce, shard, epoch."""


TUNNEL: Final = (1 << 64) - 1
"""The epoch of a party that owns nothing: it passes calls on to the owner of its own shard."""


class Party(NamedTuple):
    """The process at one end of a link."""

    shard: int
    epoch: int
    """Which of the owners that its shard has had; 0 where it has the same for ever."""


class _Role(Enum):
    CONNECTOR = b"connector"
    ACCEPTOR = b"acceptor"


class SealedSession(NamedTuple):
    """The keys and names that both ends have once each has believed the other."""

    other: Party
    sealer: "Sealer"
    opener: "Opener"


class Handshake:
    """One side of the proof. `first` is sent at once; then each piece that comes is given to
    `take`, until there is a `session`."""

    def __init__(
        self, secret: bytes, cluster: str, own: Party, nonce: bytes, *, connects: bool
    ) -> None:
        """`nonce`: random bytes, other ones for each handshake."""
        assert len(secret) == SECRET_BYTES and len(nonce) == NONCE_BYTES
        self._secret = secret
        self._cluster = cluster.encode()
        self._said = _SAID.pack(nonce, *own)
        self._is_connector = connects
        self._other: Party | None = None
        """The party that the acceptor calls itself; it has proved nothing yet."""
        self._words = b""
        """All that was said by both, but for the proofs."""
        self._received = bytearray()
        self.first = _MAGIC + self._said if connects else b""
        self.session: SealedSession | None = None

    @property
    def has_proved(self) -> bool:
        """Whether the acceptor has said its proof."""
        return self._other is not None

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Returns the bytes to send, and the received bytes behind the handshake. Raises LinkError
        if the other side does not know the secret, or contradicts itself."""
        assert self.session is None
        received = self._received
        received += data
        expected_bytes = self._expected_bytes()
        begin = bytes(received[: len(_MAGIC)])
        is_hello = not self._is_connector and self._other is None
        # A stranger that sends on does not wait for an answer: it speaks something else.
        if is_hello and (len(received) > expected_bytes or not _MAGIC.startswith(begin)):
            raise LinkError("something else than a link")
        if len(received) < expected_bytes:
            return b"", b""
        message, rest = bytes(received[:expected_bytes]), bytes(received[expected_bytes:])
        received.clear()
        if self._is_connector:
            return self._take_answer(message), rest
        if self._other is None:
            return self._take_hello(message), b""
        self._believe(_Role.CONNECTOR, message, self._other)
        return b"", rest

    def _expected_bytes(self) -> int:
        if self._is_connector:
            return _SAID.size + _PROOF_BYTES
        return len(_MAGIC) + _SAID.size if self._other is None else _PROOF_BYTES

    def _take_hello(self, message: bytes) -> bytes:
        said = message[len(_MAGIC) :]
        self._other = _party(said)
        self._words = self._all_words(said, self._said)
        return self._said + self._proof(_Role.ACCEPTOR)

    def _take_answer(self, message: bytes) -> bytes:
        said, proof = message[: _SAID.size], message[_SAID.size :]
        self._words = self._all_words(self._said, said)
        self._believe(_Role.ACCEPTOR, proof, _party(said))
        return self._proof(_Role.CONNECTOR)

    def _all_words(self, connector: bytes, acceptor: bytes) -> bytes:
        # All parts have a fixed length, except the name, which stands last.
        return _MAGIC + connector + acceptor + self._cluster

    def _proof(self, role: _Role) -> bytes:
        return hmac.digest(self._secret, role.value + b"\0" + self._words, "sha256")

    def _believe(self, role: _Role, proof: bytes, other: Party) -> None:
        if not hmac.compare_digest(self._proof(role), proof):
            raise LinkError("a proof that does not fit: another secret, or another cluster")
        kdf = HKDF(SHA256(), 2 * _KEY_BYTES, salt=None, info=b"keys\0" + self._words)
        keys = kdf.derive(self._secret)
        to_acceptor, to_connector = keys[:_KEY_BYTES], keys[_KEY_BYTES:]
        if self._is_connector:
            self.session = SealedSession(other, Sealer(to_acceptor), Opener(to_connector))
        else:
            self.session = SealedSession(other, Sealer(to_connector), Opener(to_acceptor))


def _party(said: bytes) -> Party:
    _, shard, epoch = _SAID.unpack(said)
    return Party(shard, epoch)


class Sealer:
    """One direction of a connection, where it begins."""

    def __init__(self, key: bytes) -> None:
        self._encrypt = AESGCM(key).encrypt
        self._next = 0

    def seal(self, data: bytes | bytearray | memoryview) -> bytes:
        """The records of some bytes, in the order in which they have to be sent."""
        view, pieces = memoryview(data), list[bytes]()
        for start in range(0, len(data), RECORD_MAX_BYTES):
            nonce = self._next.to_bytes(_COUNTER_BYTES, "little")
            self._next += 1
            sealed = self._encrypt(nonce, view[start : start + RECORD_MAX_BYTES], None)
            pieces += (len(sealed).to_bytes(_LENGTH_BYTES, "little"), sealed)
        return b"".join(pieces)


class Opener:
    """The same, where it ends."""

    def __init__(self, key: bytes) -> None:
        self._decrypt = AESGCM(key).decrypt
        self._next = 0
        self._received = bytearray()
        """The bytes of a record that has come in part."""
        self._missing_until = _LENGTH_BYTES
        """How much of it has to be there before it is looked at again."""

    def open(self, data: bytes) -> Iterator[bytes]:
        """The contents of each record that has come whole. Raises LinkError at a record that is not
        the next one of the other end: nothing behind it may be used."""
        received = self._received
        if received:
            received += data
            if len(received) < self._missing_until:
                return
            data = bytes(received)
            received.clear()
        view, start, end = memoryview(data), 0, len(data)
        while end - start >= _LENGTH_BYTES:
            begin = start + _LENGTH_BYTES
            length = int.from_bytes(view[start:begin], "little")
            if length > RECORD_MAX_BYTES + _TAG_BYTES:
                raise LinkError(f"a record of {length} bytes, which is more than any has")
            stop = begin + length
            if stop > end:
                self._missing_until = stop - start
                break
            try:
                opened = self._decrypt(
                    self._next.to_bytes(_COUNTER_BYTES, "little"), view[begin:stop], None
                )
            except InvalidTag as error:
                raise LinkError("a record that is not the next one of the other end") from error
            self._next += 1
            start = stop
            yield opened
        else:
            self._missing_until = _LENGTH_BYTES
        received += view[start:]
