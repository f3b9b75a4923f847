"""Arrays in pieces: the same items as in one go, however misleading the text is."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver.api.json_pieces import BYTES_PER_ITEM, PIECE_BYTES, decode_pieces
from delayserver.slices import at_once

decode = msgspec.json.Decoder(list[msgspec.Raw]).decode
TEXT = st.text(alphabet='a"\\,{}[]: é\n', max_size=12)
VALUES = st.recursive(
    st.none() | st.integers(0, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
MISLEADING = [
    {"a": [{"a": 1}, {"a": 2}]},
    {"a": '},{"a": 1},{"a": 1}'},
    {"a": '\\"},{"a":'},
    {"a": {"a": [[{"a": {}}]]}},
]
ITEMS = st.lists(st.one_of(st.sampled_from(MISLEADING), st.builds(lambda v: {"a": v}, VALUES)))


def in_pieces(data: bytes, piece_bytes: int) -> tuple[list[Any], int]:
    """The items, and the longest text that was decoded at once."""
    longest = 0

    def decoding(piece: bytes) -> list[msgspec.Raw]:
        nonlocal longest
        longest = max(longest, len(piece))
        return decode(piece)

    found = at_once(decode_pieces(data, decoding, piece_bytes=piece_bytes))
    return [json.loads(bytes(one)) for one in found], longest


@given(ITEMS, st.integers(1, 200), st.sampled_from([None, 1]), st.booleans())
def test_pieces_are_the_whole(
    items: list[Any], piece_bytes: int, indent: int | None, are_ascii: bool
) -> None:
    data = json.dumps(items, indent=indent, ensure_ascii=are_ascii).encode()
    found, longest = in_pieces(data, piece_bytes)
    assert found == items
    # Not more at once than a piece and some guesses, or than one item.
    one = max((len(json.dumps(item, indent=indent)) for item in items), default=0)
    assert longest <= 6 * piece_bytes + 3 * one + 100


@given(st.lists(VALUES, max_size=9), st.integers(1, 60))
def test_other_arrays_are_decoded_too(items: list[Any], piece_bytes: int) -> None:
    assert in_pieces(json.dumps(items).encode(), piece_bytes)[0] == items


@given(ITEMS, st.integers(1, 60), st.data())
def test_what_is_not_json_is_refused(
    items: list[Any], piece_bytes: int, data: st.DataObject
) -> None:
    text = json.dumps(items).encode()
    cut = data.draw(st.integers(0, len(text) - 1))
    broken = data.draw(
        st.sampled_from([text[:cut], text + b"]", text[:cut] + b"\x01" + text[cut:]])
    )
    try:
        expected = [json.loads(bytes(one)) for one in decode(broken)]
    except msgspec.DecodeError:
        with pytest.raises(msgspec.DecodeError):
            in_pieces(broken, piece_bytes)
    else:
        assert in_pieces(broken, piece_bytes)[0] == expected


@pytest.mark.parametrize(
    "item",
    [
        {"subject": "q", "body": 1},
        {"subject": "q", "body": [{"subject": "q"}] * 50},
        {"subject": "q", "body": '},{"subject": ' * 50},
    ],
)
def test_no_step_of_a_long_array_is_long(item: object) -> None:
    data = json.dumps([item] * (4 * PIECE_BYTES // len(json.dumps(item)))).encode()
    steps: list[int] = []
    longest = 0

    def decoding(piece: bytes) -> list[msgspec.Raw]:
        nonlocal longest
        longest = max(longest, len(piece))
        return decode(piece)

    steps = list(decode_pieces(data, decoding))
    assert longest < 2 * PIECE_BYTES
    assert len(steps) >= 3
    assert max(steps) <= 2 * PIECE_BYTES // BYTES_PER_ITEM
