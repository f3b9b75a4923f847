"""Notes: they go with their rows, and are found by them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from storage.notes import (
    Note,
    NoteBytes,
    encode_note,
    framed,
    in_frames,
    note_of,
    pack_notes,
    unpack_notes,
)
from storage.rows import DISPATCH_DTYPE

HOUR = 490_000


def rows(*seqs: int, subscription_id: int = 3) -> np.ndarray:
    found = np.zeros(len(seqs), DISPATCH_DTYPE)
    found["seq"] = seqs
    found["subscription_id"] = subscription_id
    return found


def note(seq: int, count: int = 1, **more: int) -> Note:
    return Note(more.get("hour", HOUR), seq, more.get("subscription_id", 3), count, 7, 9)


def test_a_list_without_notes_is_rows_alone() -> None:
    data, payload = framed([rows(1).tobytes(), rows(2, 3).tobytes()])
    assert bytes(data) == rows(1, 2, 3).tobytes()
    assert payload == b"" and unpack_notes(payload) == []


def test_notes_come_back_in_order() -> None:
    first, second = note(1), Note(HOUR, 2, 3, 1, 100, 20, 204, "größer")
    data, payload = framed(
        [rows(1).tobytes(), encode_note(first), rows(2).tobytes(), encode_note(second)]
    )
    assert bytes(data) == rows(1, 2).tobytes()
    assert unpack_notes(payload) == [first, second]


def test_a_note_is_of_its_row_alone() -> None:
    table = np.concatenate([rows(1, 2), rows(2, subscription_id=4)])
    notes = [note(2), note(2, subscription_id=4)]
    assert note_of(notes, HOUR, table, 0) is None
    assert note_of(notes, HOUR, table, 1) is notes[0]
    assert note_of(notes, HOUR, table, 2) is notes[1]
    assert note_of(notes, HOUR + 1, table, 1) is None


def test_one_note_is_of_as_many_rows_as_it_says() -> None:
    table = rows(9, 4, 8, 2, 6)
    notes = [note(4, count=3)]
    assert [note_of(notes, HOUR, table, at) is not None for at in range(5)] == [
        *(False, True, True, True, False)
    ]


@given(
    st.lists(st.one_of(st.integers(1, 30), st.integers(0, 400).map(lambda n: "x" * n))),
    st.integers(60, 500),
)
def test_frames_have_all_rows_in_order_and_are_never_too_long(
    items: list[int | str], max_bytes: int
) -> None:
    """A number is so many rows, a text a note about those before it."""
    given_items: list[bytes] = [
        rows(*range(one)).tobytes()
        if isinstance(one, int)
        else encode_note(Note(HOUR, 1, 3, 1, 7, 9, 200, one))
        for one in items
    ]
    told = []
    everything = bytearray()
    for part in in_frames(given_items, max_bytes):
        data, payload = framed(part)
        assert len(data) > 0 and len(data) + len(payload) <= max_bytes
        assert type(part[0]) is not NoteBytes
        everything += data
        told += unpack_notes(payload)
    assert everything == framed(given_items)[0]
    all_notes = [one for one in given_items if type(one) is NoteBytes]
    assert len(told) <= len(all_notes)
    if len(framed(given_items)[0]) + len(pack_notes(all_notes)) + 5 * len(all_notes) <= max_bytes:
        leading = bool(given_items) and type(given_items[0]) is NoteBytes
        assert leading or len(told) == len(all_notes)
