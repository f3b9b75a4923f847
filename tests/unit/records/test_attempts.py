"""Attempts: a history is bounded, and says what it has left out."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from delayserver.records.attempts import (
    ATTEMPTS_MAX,
    FIRST_KEPT,
    TEXT_CHARS_MAX,
    TEXTS_BYTES_MAX,
    DeliveryAttempt,
    History,
    with_attempt,
)
from delayserver.records.message import Payload, Watch, decode_payload, encode_payload
from storage.frame import unseal


def attempt(number: int, error: str = "HTTP 500", answer: str = "") -> DeliveryAttempt:
    return DeliveryAttempt(number, 3, 1000 * number, 5, 500, answer, error)


def test_the_first_and_the_newest_stay() -> None:
    history = None
    for number in range(1, ATTEMPTS_MAX + 8):
        history = with_attempt(history, attempt(number))
    assert history is not None
    numbers = [one.number for one in history.attempts]
    assert numbers[:FIRST_KEPT] == [1, 2, 3]
    assert numbers[FIRST_KEPT:] == list(range(11, ATTEMPTS_MAX + 8))
    assert (len(numbers), history.dropped) == (ATTEMPTS_MAX, 7)


@given(st.lists(st.text(max_size=TEXT_CHARS_MAX), max_size=40))
def test_a_history_is_never_long_and_counts_what_it_leaves_out(answers: list[str]) -> None:
    history = History()
    for number, text in enumerate(answers, 1):
        history = with_attempt(history, attempt(number, answer=text))
    assert len(history.attempts) + history.dropped == len(answers)
    numbers = [one.number for one in history.attempts]
    assert numbers == sorted(set(numbers))
    if numbers:
        assert numbers[-1] == len(answers), "the newest is there"
    size = sum(one.texts_bytes for one in history.attempts)
    # What is never left out may be longer: four texts of four bytes a character.
    assert size <= max(TEXTS_BYTES_MAX, (FIRST_KEPT + 1) * (4 * TEXT_CHARS_MAX + 8))
    assert len(history.attempts) <= ATTEMPTS_MAX


def test_a_payload_without_a_history_has_the_bytes_that_it_had_before() -> None:
    for payload, length in ((Payload(b"{}"), 5), (Payload(b"{}", watch=Watch(("k",))), 6)):
        data = unseal(encode_payload(payload))
        assert data is not None and len(msgspec.msgpack.decode(data)) == length


def test_a_history_goes_with_the_payload() -> None:
    payload = Payload(b"{}", history=with_attempt(None, attempt(1, answer="no")))
    data = unseal(encode_payload(payload))
    assert data is not None and len(msgspec.msgpack.decode(data)) == 7
    assert decode_payload(encode_payload(payload), "x", 0, 1) == payload
