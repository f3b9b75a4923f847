"""What only the server makes, with its secret: message ids, and the hashes of keys.

The check digits of an id are the first bytes of the rest of it under AES-128, one block with two
zero bytes before, by a key that is derived from the directory's secret: an id that verifies was
given out by this data directory, so a cancel needs no look at the disk to know that the message
exists. A cipher and no hash, since it takes any number of ids at once.

Cost: 0.1 µs to make one of many, 0.4 µs one of a few, 1 µs to make one or to parse it.
Threads: pure, once made (each thread has a cipher of its own).
"""

import hashlib
import threading
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from delayserver.errors import NotFoundError
from delayserver.message_id import ID_BYTES, ID_DIGITS, MessageId, read_id
from storage.rows import NO_KEY

_CHECK_BYTES = 4
_TEXT_BYTES = ID_BYTES - _CHECK_BYTES
_BLOCK_BYTES = 16
_KEY_PURPOSE = b"ids"
"""Told apart from the hashes of keys, which have the same secret."""
_FEW = 64
"""So many ids cost as much made one by one as in arrays."""
_Column = Sequence[int] | NDArray[np.int64] | NDArray[np.uint64]


class _Cipher(threading.local):
    """AES-128, block by block: one encryptor for each thread, since it must not be shared."""

    def __init__(self, key: bytes) -> None:
        # Block by block is right here: no block is ever repeated, and a permutation is all we want.
        self.encrypt = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update


class IdCodec:
    """Makes and parses the ids of one shard."""

    def __init__(self, shard: int, secret: bytes) -> None:
        self._shard = shard
        self._cipher = _Cipher(
            hashlib.blake2b(key=secret, person=_KEY_PURPOSE, digest_size=_BLOCK_BYTES).digest()
        )

    def encode(self, due_ms: int, seq: int) -> str:
        """The id of the message published with `seq`."""
        block = (self._shard << 96 | due_ms << 48 | seq).to_bytes(_BLOCK_BYTES, "big")
        return (block[-_TEXT_BYTES:] + self._cipher.encrypt(block)[:_CHECK_BYTES]).hex()

    def encode_many(self, dues_ms: _Column, seqs: _Column) -> bytes:
        """The ids of many messages, one behind the other, ID_BYTES each: `encode` of each,
        but for the hexadecimal digits."""
        if len(dues_ms) < _FEW:
            return self._encode_few(dues_ms, seqs)
        due_ms = np.array(dues_ms, np.uint64)
        blocks = np.empty((len(due_ms), 2), ">u8")
        blocks[:, 0] = due_ms >> np.uint64(16) | np.uint64(self._shard << 32)
        blocks[:, 1] = due_ms << np.uint64(48) | np.array(seqs, np.uint64)
        checks = self._cipher.encrypt(blocks.tobytes())
        ids = np.empty((len(due_ms), ID_BYTES), np.uint8)
        ids[:, :_TEXT_BYTES] = blocks.view(np.uint8)[:, -_TEXT_BYTES:]
        ids[:, _TEXT_BYTES:] = np.frombuffer(checks, np.uint8).reshape(-1, _BLOCK_BYTES)[
            :, :_CHECK_BYTES
        ]
        return ids.tobytes()

    def _encode_few(self, dues_ms: _Column, seqs: _Column) -> bytes:
        shard, size = self._shard << 96, _BLOCK_BYTES
        blocks = b"".join(
            [
                (shard | int(due_ms) << 48 | int(seq)).to_bytes(size, "big")
                for due_ms, seq in zip(dues_ms, seqs, strict=True)
            ]
        )
        checks = self._cipher.encrypt(blocks)
        return b"".join(
            [
                blocks[at + size - _TEXT_BYTES : at + size] + checks[at : at + _CHECK_BYTES]
                for at in range(0, len(blocks), size)
            ]
        )

    @staticmethod
    def texts(ids: bytes) -> list[str]:
        """What `encode_many` returned, as `encode` would."""
        digits = ids.hex()
        return [digits[at : at + ID_DIGITS] for at in range(0, len(digits), ID_DIGITS)]

    def encode_each(self, found: Sequence[MessageId]) -> list[str]:
        """The ids of any messages of this shard."""
        return self.texts(
            self.encode_many([one.due_ms for one in found], [one.seq for one in found])
        )

    def decode_many(self, texts: Sequence[str]) -> list[MessageId | None]:
        """As `decode`, for many; None for what was not given out here."""
        read: list[MessageId | None] = []
        for text in texts:
            try:
                read.append(read_id(text))
            except NotFoundError:
                read.append(None)
        made = iter(self.encode_each([one for one in read if one is not None]))
        return [
            one if one is not None and next(made) == text.lower() else None
            for one, text in zip(read, texts, strict=True)
        ]

    def decode(self, text: str) -> MessageId:
        """Parse an id. Raises NotFoundError for anything that was not given out here."""
        found = read_id(text)
        if self.encode(found.due_ms, found.seq) != text.lower():
            raise NotFoundError(f"there is no message {text[:64]!r}")
        return found


class KeyHasher:
    """Hashes (subject, key) to the 16 bytes by which a key is indexed.

    BLAKE2b with the directory's secret: nobody outside can make two keys collide, so a match of
    the hash is taken for a match of the key."""

    def __init__(self, secret: bytes) -> None:
        self._hash = hashlib.blake2b(digest_size=16, key=secret)

    def __call__(self, subject_id: int, key: str) -> bytes:
        digest = self._hash.copy()
        digest.update(subject_id.to_bytes(4, "big") + key.encode())
        return digest.digest()

    def many(self, subject_ids: Sequence[int], keys: Sequence[str | None]) -> list[bytes]:
        """The hashes of many; NO_KEY where there is no key."""
        copy = self._hash.copy
        subjects = {number: number.to_bytes(4, "big") for number in set(subject_ids)}
        hashes = []
        for subject_id, key in zip(subject_ids, keys, strict=True):
            if key is None:
                hashes.append(NO_KEY)
                continue
            digest = copy()
            digest.update(subjects[subject_id] + key.encode())
            hashes.append(digest.digest())
        return hashes
