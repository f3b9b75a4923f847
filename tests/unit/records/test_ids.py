"""Ids: what was given out is understood, and nothing else is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from delayserver.errors import NotFoundError
from delayserver.records.ids import IdCodec, KeyHasher
from delayserver.records.message_id import ID_DIGITS, MessageId, read_id
from storage.rows import NO_KEY
from tests.unit.fakes import SECRET, START_MS

OTHER_SECRET = bytes(16)


@pytest.fixture
def codec() -> IdCodec:
    return IdCodec(7, SECRET)


@pytest.mark.parametrize(
    ("due_ms", "seq"), [(0, 1), (START_MS, 12_345), ((1 << 48) - 1, (1 << 48) - 1)]
)
def test_an_id_says_where_the_message_is(codec: IdCodec, due_ms: int, seq: int) -> None:
    text = codec.encode(due_ms, seq)
    assert len(text) == ID_DIGITS
    assert codec.decode(text) == MessageId(7, due_ms, seq)


def test_ids_differ_and_do_not_change(codec: IdCodec) -> None:
    assert codec.encode(START_MS, 1) == codec.encode(START_MS, 1)
    assert len({codec.encode(START_MS + n, 1 + m) for n in (0, 1) for m in (0, 1)}) == 4


def test_an_id_with_any_digit_changed_is_unknown(codec: IdCodec) -> None:
    text = codec.encode(START_MS, 12_345)
    for position in range(ID_DIGITS):
        digit = "0" if text[position] != "0" else "1"
        with pytest.raises(NotFoundError):
            codec.decode(text[:position] + digit + text[position + 1 :])


@pytest.mark.parametrize("text", ["", "0" * 35, "0" * 37, "x" * 36, "0" * 36, "é" * 36, "٠" * 36])
def test_what_is_not_an_id_is_unknown(codec: IdCodec, text: str) -> None:
    with pytest.raises(NotFoundError):
        codec.decode(text)


def test_an_id_of_another_directory_is_unknown(codec: IdCodec) -> None:
    with pytest.raises(NotFoundError):
        codec.decode(IdCodec(7, OTHER_SECRET).encode(START_MS, 1))


def test_a_long_text_is_not_repeated_in_full(codec: IdCodec) -> None:
    with pytest.raises(NotFoundError) as caught:
        codec.decode("a" * 10_000)
    assert len(str(caught.value)) < 120


def test_key_hashes_tell_subjects_keys_and_directories_apart() -> None:
    hasher = KeyHasher(SECRET)
    assert len(hasher(1, "a")) == 16
    assert hasher(1, "a") == hasher(1, "a")
    others = {
        hasher(1, "a"),
        hasher(2, "a"),
        hasher(1, "b"),
        hasher(1, ""),
        hasher(0x0161, ""),
        KeyHasher(OTHER_SECRET)(1, "a"),
    }
    assert len(others) == 6


def test_what_an_id_says_is_read_without_the_secret():
    codec = IdCodec(7, bytes(16))
    text = codec.encode(1_795_192_200_000, 12)
    assert read_id(text) == codec.decode(text) == (7, 1_795_192_200_000, 12)
    changed = text[:-1] + ("0" if text[-1] != "0" else "1")
    assert read_id(changed) == read_id(text)
    for wrong in ("", "x" * 36, text[:-1], text + "0"):
        with pytest.raises(NotFoundError):
            read_id(wrong)


@pytest.mark.parametrize("times", [1, 100])
def test_many_ids_are_made_as_one_is(codec: IdCodec, times: int) -> None:
    dues_ms = [0, START_MS, (1 << 48) - 1, START_MS] * times
    seqs = [1, (1 << 48) - 1, 12_345, 2] * times
    expected = [codec.encode(due_ms, seq) for due_ms, seq in zip(dues_ms, seqs, strict=True)]
    assert codec.texts(codec.encode_many(dues_ms, seqs)) == expected
    assert codec.encode_many([], []) == b""


def test_ids_are_made_in_any_thread(codec: IdCodec) -> None:
    expected = codec.encode(START_MS, 7)
    many = codec.encode_many([START_MS] * 100_000, range(100_000))

    def work(number: int) -> bool:
        if number % 2:
            return codec.encode(START_MS, 7) == expected
        return codec.encode_many([START_MS] * 100_000, range(100_000)) == many

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(64)))


def test_many_key_hashes_are_those_of_one() -> None:
    hasher = KeyHasher(SECRET)
    assert hasher.many([1, 2, 1], ["a", None, "é"]) == [hasher(1, "a"), NO_KEY, hasher(1, "é")]
