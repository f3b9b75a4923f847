"""How deep a JSON body may be nested: each consumer has to be able to read what a publisher sent.

Parsers stop somewhere between 100 levels and a few thousand, many with an error that ends their
program, and an answer is some levels deeper than the body in it. So there is one limit, at intake.

Cost: nothing for a body that is too short to be nested so deeply; a count of two bytes for another
one (0.1 µs per KiB); 5 µs per KiB for one with more brackets than that. Threads: pure.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from delayserver.errors import InputError

NESTING_MAX: Final = 256
"""Levels of arrays and objects in a body."""
NESTED_MIN_BYTES: Final = 2 * NESTING_MAX
"""A shorter body is fine: each level opens and closes."""
NESTED_TOO_DEEPLY: Final = f"nested too deeply: a body has at most {NESTING_MAX} levels"

_OPENING = (ord("["), ord("{"))
_CLOSING = (ord("]"), ord("}"))


def is_nested_too_deeply(body: bytes) -> bool:
    """Whether a body, which is JSON, has more than NESTING_MAX levels."""
    if len(body) <= NESTED_MIN_BYTES or body.count(b"[") + body.count(b"{") <= NESTING_MAX:
        return False
    # Brackets in text count for nothing. Text ends at the next quote, but for one that is escaped.
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(body, np.uint8)
    marks = marks[np.isin(marks, (ord('"'), *_OPENING, *_CLOSING))]
    is_text = np.logical_xor.accumulate(marks == ord('"'))
    marks = marks[~is_text]
    steps = np.isin(marks, _OPENING).astype(np.int32) - np.isin(marks, _CLOSING)
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0)) > NESTING_MAX


def check_nesting(bodies: Sequence[bytes]) -> None:
    """Raises InputError if one of these bodies, which are JSON, is nested too deeply."""
    if any(map(is_nested_too_deeply, bodies)):
        raise InputError(NESTED_TOO_DEEPLY, "/body")
