"""Values that only the server makes, with its secret: message ids, and the hashes of keys.

The check digits of an id are the first bytes of the rest of it under AES-128, one block with two
zero bytes before, by a key that is derived from the directory's secret: an id that verifies was
given out by this data directory, so a cancel needs no look at the disk to know that the message
exists. A cipher and no hash, since it takes any number of ids at once.

Cost: 0.1 µs to make one of many, 0.7 µs one of a few, 1 µs to parse one.
Threads: pure, once made (each thread has a cipher of its own).
"""

import hashlib
import threading
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from delayserver.errors import NotFoundError
from delayserver.records.message_id import ID_BYTES, ID_DIGITS, MessageId, read_id
from storage.rows import NO_KEY

_CHECK_BYTES = 4
_TEXT_BYTES = ID_BYTES - _CHECK_BYTES
_BLOCK_BYTES = 16
_KEY_PURPOSE = b"ids"
"""Told apart from the hashes of keys, which have the same secret."""
COLUMNS_MIN = 12
"""Fewer messages than this are made, decided and cancelled one by one in less time: arrays of a few
cost more than they save. Measured: docs/decisions/0024-lanes.md."""
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
        if len(dues_ms) < COLUMNS_MIN:
            return bytes.fromhex("".join(map(self.encode, map(int, dues_ms), map(int, seqs))))
        if isinstance(seqs, range):  # as an array, that is five times as fast
            seqs = np.arange(seqs.start, seqs.stop, seqs.step, dtype=np.uint64)
        due_ms = np.array(dues_ms, np.uint64)
        blocks = np.empty((len(due_ms), 2), ">u8")
        blocks[:, 0] = due_ms >> np.uint64(16) | np.uint64(self._shard << 32)
        blocks[:, 1] = due_ms << np.uint64(48) | np.asarray(seqs, np.uint64)
        checks = self._cipher.encrypt(blocks.tobytes())
        ids = np.empty((len(due_ms), ID_BYTES), np.uint8)
        ids[:, :_TEXT_BYTES] = blocks.view(np.uint8)[:, -_TEXT_BYTES:]
        ids[:, _TEXT_BYTES:] = np.frombuffer(checks, np.uint8).reshape(-1, _BLOCK_BYTES)[
            :, :_CHECK_BYTES
        ]
        return ids.tobytes()

    @staticmethod
    def texts(ids: bytes) -> list[str]:
        """The ids that `encode_many` returned, as text."""
        return ids.hex(",", ID_BYTES).split(",") if ids else []

    def decode_many(self, texts: Sequence[str]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Parse ids: seqs and due times, each of shape (len(texts),). Seq 0 stands for an id that
        was not given out here; nothing is raised, since the others are valid."""
        ids = _data_of(texts)
        if ids is None:  # one of them is no id at all
            ids = b"".join([_data_of([text]) or bytes(ID_BYTES) for text in texts])
        rows = np.frombuffer(ids, np.uint8).reshape(-1, ID_BYTES)
        numbers = np.zeros((2, len(texts), 8), np.uint8)
        numbers[0, :, 2:], numbers[1, :, 2:] = rows[:, 8:14], rows[:, 2:8]
        seqs, dues_ms = numbers.view(">u8")[..., 0].astype(np.uint64)
        made = np.frombuffer(self.encode_many(dues_ms, seqs), np.uint8).reshape(-1, ID_BYTES)
        seqs[(made != rows).any(1)] = 0
        return seqs, dues_ms.astype(np.int64)

    def decode(self, text: str) -> MessageId:
        """Parse an id. Raises NotFoundError for anything that was not given out here."""
        found = read_id(text)
        if self.encode(found.due_ms, found.seq) != text.lower():
            raise NotFoundError(f"there is no message {text[:64]!r}")
        return found


class KeyHasher:
    """Hashes (subject, key) to the 16 bytes by which a key is indexed.

    BLAKE2b with the directory's secret: no client can make two keys collide, so a match of the hash
    is taken for a match of the key."""

    def __init__(self, secret: bytes) -> None:
        self._hash = hashlib.blake2b(digest_size=16, key=secret)

    def __call__(self, subject_id: int, key: str) -> bytes:
        digest = self._hash.copy()
        digest.update(subject_id.to_bytes(4, "big") + key.encode())
        return digest.digest()

    def many(self, subject_ids: Sequence[int], keys: Sequence[str | None]) -> list[bytes]:
        """The hashes of many; NO_KEY where there is no key."""
        begun = {}
        for number in set(subject_ids):
            begun[number] = digest = self._hash.copy()
            digest.update(number.to_bytes(4, "big"))
        hashes = []
        for subject_id, key in zip(subject_ids, keys, strict=True):
            if key is None:
                hashes.append(NO_KEY)
                continue
            digest = begun[subject_id].copy()
            digest.update(key.encode())
            hashes.append(digest.digest())
        return hashes


def _data_of(texts: Sequence[str]) -> bytes | None:
    """The bytes of ids, one behind the other; None if any of them is none."""
    if any(len(text) != ID_DIGITS for text in texts):
        return None
    try:
        data = bytes.fromhex("".join(texts))
    except ValueError:
        return None
    # Blanks are passed over.
    return data if len(data) == len(texts) * ID_BYTES else None
