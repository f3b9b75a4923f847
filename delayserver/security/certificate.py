"""When a certificate ends. The standard library tells this only for a peer that it has verified.

    PEM ──▶ its first block ──▶ DER: Certificate { tbs { [version], serial, algorithm, issuer,
                                                         validity { notBefore, notAfter }, … } }

Only the fields before the validity are stepped over (RFC 5280, 4.1); nothing is verified, since
OpenSSL has loaded the same file.

Cost: 50 µs. Threads: pure, but for the file that is read.
"""

import base64
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

_BLOCK: Final = re.compile(
    rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.*?)-----END", re.DOTALL
)
_VERSION, _UTC_TIME = 0xA0, 0x17
_CENTURY_TURNS_AT: Final = 50
"""Two digits of a year, from this value on, mean the last century."""


class _Part(NamedTuple):
    """A value of DER: its tag, and where its content stands."""

    tag: int
    start: int
    end: int


def end_s_of(path: Path) -> int:
    """The end of the validity of the first certificate in a PEM file, in s since 1970; 0 if it
    cannot be told. Raises OSError."""
    block = _BLOCK.search(path.read_bytes())
    try:
        return 0 if block is None else _end_s(base64.b64decode(block[1]))
    except (ValueError, IndexError):
        return 0


def _end_s(der: bytes) -> int:
    tbs = _part(der, _part(der, 0).start)
    part = _part(der, tbs.start)
    if part.tag == _VERSION:  # only the first version has none
        part = _part(der, part.end)
    for _ in ("algorithm", "issuer", "validity"):
        part = _part(der, part.end)
    not_before = _part(der, part.start)
    not_after = _part(der, not_before.end)
    text = der[not_after.start : not_after.end].decode("ascii")
    if not_after.tag == _UTC_TIME:
        text = ("19" if int(text[:2]) >= _CENTURY_TURNS_AT else "20") + text
    return int(datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp())


def _part(der: bytes, at: int) -> _Part:
    """The value that begins there."""
    tag, length, start = der[at], der[at + 1], at + 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[at + 2 : start], "big")
    return _Part(tag, start, start + length)
