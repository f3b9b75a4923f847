"""Pieces: a long array of JSON, decoded some of its items at a time.

    [{"subject": … }, {"subject": … }, … 64 MB … ]
     └── piece ──┘     └── piece ──┘                 PIECE_BYTES each, or one item that is longer

A decoder takes all of an array or nothing, and keeps the event loop for as long. So the array is
cut between two items. The place is guessed: items of a batch begin alike (`{"subject":`), so behind
each PIECE_BYTES the next such beginning is taken that follows a `}` and a comma. The decoder says
whether that was right: with a `]` behind it, the text before a place is whole if, and only if, the
place lies between two items of the array. Where guesses fail (bodies that look like items), the
place is counted out: strings are passed over, brackets are counted. No byte is counted out twice,
and no step reads more than a few pieces, whatever the text is: a client chooses it.

Cost: 20 µs for each piece more than without; 2 ns for a byte of text that is counted out, 0.1 µs
for a bracket or a comma. Threads: pure; work for the slices of the event loop.
"""

import re
from collections.abc import Callable, Generator
from typing import Final, TypeVar

import msgspec

T = TypeVar("T")
PIECE_BYTES: Final = 256 * 1024
"""Shorter arrays are decoded in one go."""
BYTES_PER_ITEM: Final = 1024
"""A piece counts as so many items of `slices` as it has of these."""
_GUESSES: Final = 3
_TOKENS: Final = 2_000
"""So many are counted out between two yields."""
_SPACE: Final = rb"[ \t\r\n]"
_OPENING = re.compile(rb"%b*+\[%b*+" % (_SPACE, _SPACE))
_FIRST = re.compile(rb'\{%b{0,64}"[^"\\]{1,64}"%b{0,64}:' % (_SPACE, _SPACE))
"""How the first item begins. It becomes a pattern itself, so it is short."""
_IN_TEXT: Final = rb'[^"\\]*+(?:\\.[^"\\]*+)*+("?)'
"""The rest of a string. It also ends, without its quote, where a step ends: a search that failed
there would begin again at every quote that is escaped."""
_TOKEN = re.compile(rb'"%b|[\[\]{},]' % _IN_TEXT, re.DOTALL)
_REST_OF_TEXT = re.compile(_IN_TEXT, re.DOTALL)
_QUOTE, _COMMA = b'",'
_OPEN: Final = b"{["
_BEHIND_COMMA = re.compile(rb"%b*+[^\] \t\r\n]" % _SPACE)


def decode_pieces(
    data: bytes, decode: Callable[[bytes], list[T]], *, piece_bytes: int = PIECE_BYTES
) -> Generator[int, None, list[T]]:
    """The items of an array, as `decode` makes them of arrays; raises the errors of `decode`.

    An error of a piece may name another place in the text than one of the whole."""
    if len(data) <= piece_bytes or (opening := _OPENING.match(data)) is None:
        return decode(data)
    start = opening.end()
    first = _FIRST.match(data, start)
    boundary = None
    if first is not None:
        boundary = re.compile(rb"\}(%b*+,%b*+)%b" % (_SPACE, _SPACE, re.escape(first[0])))
    items: list[T] = []
    while len(data) - start > piece_bytes:
        found = None
        at = start + piece_bytes
        for _ in range(_GUESSES if boundary is not None else 0):
            assert boundary is not None
            guess = boundary.search(data, at, at + 4 * piece_bytes)
            if guess is None:
                break
            found = _decoded(data, start, guess.end(1), guess.start(1), decode)
            if found is not None:
                break
            at = guess.end(1)
            yield _items(at - start)
        if found is None:
            end = yield from _count_out(data, start, piece_bytes)
            if end is None:
                break  # It is the last item, or something is wrong.
            found = decode(b"[%b]" % data[start:end]), end + 1
        yield _items(found[1] - start)
        items += found[0]
        start = found[1]
    items += decode(b"[" + data[start:])
    return items


def _decoded(
    data: bytes, start: int, following: int, end: int, decode: Callable[[bytes], list[T]]
) -> tuple[list[T], int] | None:
    """The items from `start` to `end`, and where the following one begins, if the array can be cut
    there."""
    try:
        return decode(b"[%b]" % data[start:end]), following
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        return None


def _count_out(data: bytes, start: int, piece_bytes: int) -> Generator[int, None, int | None]:
    """Where the first comma stands behind an item that ends a piece or more behind `start`; None if
    no other item follows."""
    step_bytes = max(2, piece_bytes)  # A backslash and the character behind it are in one step.
    depth, at, is_text = 0, start, False
    while at < len(data):
        until = min(at + step_bytes, len(data))
        end = until
        if is_text:
            rest = _REST_OF_TEXT.match(data, at, until)
            assert rest is not None
            end = rest.end()
            is_text = not rest[1]
            if end == at and is_text:
                return None  # A backslash is the last byte.
            at = end
        if not is_text:
            for count, token in enumerate(_TOKEN.finditer(data, at, until), 1):
                if count % _TOKENS == 0:
                    yield _TOKENS // 20
                mark = data[token.start()]
                if mark == _QUOTE:
                    is_text = not token[1]
                    end = token.end()
                elif mark == _COMMA:
                    place = token.start()
                    if depth == 0 and place - start >= piece_bytes:
                        return place if _BEHIND_COMMA.match(data, place + 1) else None
                elif mark in _OPEN:
                    depth += 1
                else:
                    depth -= 1
                    if depth < 0:
                        return None
            at = end if is_text else until
        yield _items(step_bytes)
    return None


def _items(length: int) -> int:
    return max(1, length // BYTES_PER_ITEM)
