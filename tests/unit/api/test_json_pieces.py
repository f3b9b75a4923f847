"""Arrays in pieces: the same items as in one go, however misleading the text is."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver.api.json_pieces import BYTES_PER_ITEM, PIECE_BYTES, decode_pieces
from delayserver.slices import at_once
from tests.scaling import GROWTH_MAX, growth

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


@given(st.lists(st.sampled_from(['"', "\\", "{", "}", "[", "]", ",", "a", " "])), st.integers(1, 9))
def test_any_text_is_the_same_in_pieces(marks: list[str], piece_bytes: int) -> None:
    """Cut anywhere, also between a backslash and what it escapes."""
    for text in (f"[{''.join(marks)}]", f'[{{"a":"{"".join(marks)}"}},{{"a":1}},1,"b\\"]'):
        data = text.encode()
        try:
            expected = [json.loads(bytes(one)) for one in decode(data)]
        except msgspec.DecodeError:
            with pytest.raises(msgspec.DecodeError):
                in_pieces(data, piece_bytes)
        else:
            assert in_pieces(data, piece_bytes)[0] == expected


@pytest.mark.parametrize("space", ["\v", "\f", "\x1c"])
def test_only_space_of_json_may_stand_between_items(space: str) -> None:
    item = '{"a":1}'
    with pytest.raises(msgspec.DecodeError):
        in_pieces(f"[{item}{space},{item},{item}]".encode(), 4)


@pytest.mark.parametrize(
    "data", [b'[{"a":1},]', b'[{"a":1}, ]', b'[{"a":1},,{"a":1}]', b'[1,{"a":1},']
)
def test_no_comma_is_too_much(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        in_pieces(data, 2)


HOSTILE = {
    "a string without an end": (b'[{"a":"', b'\\"'),
    "one that ends in a backslash": (b'[{"a":"\\', b"\\\\"),
    "space in the first item": (b"[{", b" "),
    "space before its colon": (b'[{"a"', b" "),
    "space between items": (b'[{"a":1}', b" "),
    "beginnings of items": (b'[{"a":[', b'},{"a":'),
    "beginnings in a string": (b'[{"a":"', b'},{\\"a\\":'),
    "quotes": (b"[{", b'"'),
    "brackets": (b"[{", b"["),
    "scalars": (b"[", b"1,"),
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_no_text_costs_more_than_its_length(hostile: tuple[bytes, bytes]) -> None:
    begin, again = hostile

    def read(data: bytes) -> None:
        with contextlib.suppress(msgspec.DecodeError):
            in_pieces(data, 4096)

    assert growth(read, lambda n: begin + again * n, 16_000 // len(again)) < GROWTH_MAX


def test_no_step_reads_more_than_a_few_pieces_whatever_the_text_is() -> None:
    piece_bytes = 4096
    for begin, again in HOSTILE.values():
        data = begin + again * (64 * piece_bytes // len(again))
        steps = 0
        with contextlib.suppress(msgspec.DecodeError):
            for _ in decode_pieces(data, decode, piece_bytes=piece_bytes):
                steps += 1
        assert steps >= 8, (begin, again)


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
