"""Whether two messages under one key have the same content.

A digest of 62 bits tells: 30 of BLAKE2b, and the checksum of the payload, behind a mark. A trace
context is no part of the content, nor is the order of the headers, which some languages change each
time. Against chance that is enough. A publisher that makes two contents of its own with one digest
has the second taken for the first.

Rows that were written before there was a mark, and those of imports, have a weaker digest: length
and checksum of the payload, headers in their order. A row that has only this one is compared by it.

Cost: 0.8 µs, 0.4 µs for one of many. Threads: pure.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from delayserver.records.message import Payload, encode_payload
from storage.frame import CRC_BYTES, sealed_crc

MARK: Final = 1 << 62
"""The mark of a digest with a hash; no payload is so long that its length would look like that."""
_HASH_MASK: Final = MARK - (1 << 32)
_BEGUN: Final = blake2b(digest_size=8)
_CHECKSUM: Final = np.uint64((1 << 32) - 1)


def content_digest(payload: Payload, sealed: bytes) -> int:
    """The digest of a message whose payload is `sealed`, without trace context and origin."""
    sealed = in_order(payload, sealed)
    return digest_of(sealed[CRC_BYTES:], sealed_crc(sealed))


def digest_of(data: bytes, crc: int) -> int:
    """The same from the bytes of a payload, its headers in order, and their checksum."""
    hashed = int.from_bytes(blake2b(data, digest_size=8).digest(), "big")
    return MARK | (hashed & _HASH_MASK) | crc


def digests_of(datas: Sequence[bytes], crcs: Sequence[int]) -> list[int]:
    """`digest_of` each, in half the time."""
    hashes = []
    for data in datas:
        hashed = _BEGUN.copy()
        hashed.update(data)
        hashes.append(hashed.digest())
    numbers = np.frombuffer(b"".join(hashes), ">u8").astype(np.uint64)
    numbers &= np.uint64(_HASH_MASK)
    numbers |= np.array(crcs, np.uint64) | np.uint64(MARK)
    digests: list[int] = numbers.tolist()
    return digests


def in_order(payload: Payload, sealed: bytes) -> bytes:
    """The sealed payload with its headers in order; mostly the same bytes."""
    headers = payload.headers
    if headers is None or is_ordered(headers):
        return sealed
    return encode_payload(msgspec.structs.replace(payload, headers=dict(sorted(headers.items()))))


def is_ordered(headers: Mapping[str, str]) -> bool:
    """Whether they stand in the order in which they are compared."""
    return len(headers) < 2 or sorted(headers) == list(headers)


def has_content(known: int, digest: int, sealed: bytes) -> bool:
    """Whether the message that a `known` digest stands for has the content of another, whose own
    digest and sealed payload are given."""
    return known == (digest if known & MARK else len(sealed) << 32 | sealed_crc(sealed))


def have_same_content(ones: NDArray[np.uint64], others: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """The same for pairs of digests (shape n): by their checksums where only one has a mark."""
    mark = np.uint64(MARK)
    differing = ones ^ others
    same: NDArray[np.bool_] = differing == 0
    same |= ((differing & mark) != 0) & ((differing & _CHECKSUM) == 0)
    return same
