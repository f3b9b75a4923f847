"""Which messages under one key have the same content."""

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver.decisions.new_messages import NewMessage
from delayserver.errors import ConflictError, InputErrors
from delayserver.records.content import (
    MARK,
    content_digest,
    digest_of,
    digests_of,
    has_content,
    have_same_content,
)
from delayserver.records.message import Payload, encode_payload
from delayserver.records.tables import KeyEntry
from delayserver.recovery.repair_catalog import published_digest
from tests.unit.fakes import MessageParts
from tests.world.publishes import publish_all

# Equal length, equal CRC-32C, as text of a body; found by trying.
ONE, OTHER = b'"pay 255990120062 EUR"', b'"pay 794891356550 EUR"'


def sealed_digest(payload):
    sealed = encode_payload(payload)
    return content_digest(payload, sealed), sealed


def publish(parts, body=b"1", headers=None, together=False, key="k"):
    message = NewMessage("orders", 10_000_000, Payload(body, key=key, headers=headers))
    if together:
        return publish_all(parts.publishing, [message, message], 0)[0]
    return parts.publishing.publish_one(message, 0)


@pytest.mark.parametrize("together", [False, True])
def test_headers_in_another_order_are_the_same_message(together) -> None:
    parts = MessageParts()
    first = publish(parts, headers={"b": "2", "a": "1"})
    again = publish(parts, headers={"a": "1", "b": "2"}, together=together)
    assert again.duplicate
    assert again.message_id == first.message_id
    with pytest.raises((ConflictError, InputErrors)):
        publish(parts, headers={"a": "2", "b": "1"}, together=together)
    # What came with others is known by the same.
    publish(parts, headers={"b": "2", "a": "1"}, together=True, key="l")
    assert publish(parts, headers={"a": "1", "b": "2"}, key="l").duplicate


@pytest.mark.parametrize("together", [False, True])
def test_other_content_of_the_same_length_and_checksum_is_a_conflict(together) -> None:
    assert google_crc32c.value(ONE) == google_crc32c.value(OTHER)
    assert len(ONE) == len(OTHER)
    parts = MessageParts()
    publish(parts, ONE)
    with pytest.raises((ConflictError, InputErrors)):
        publish(parts, OTHER, together=together)
    assert publish(parts, ONE, together=together).duplicate


@pytest.mark.parametrize("together", [False, True])
def test_what_an_older_server_wrote_is_compared_as_it_did(together) -> None:
    """So is an import: length and checksum, headers in the order that they had."""
    parts = MessageParts()
    headers = {"b": "2", "a": "1"}
    first = publish(parts, headers=headers)
    key_hash = parts.publishing._key_hasher(parts.sequencer.subjects["orders"], "k")
    sealed = encode_payload(Payload(b"1", key="k", headers=headers))
    weak = len(sealed) << 32 | int.from_bytes(sealed[:4], "little")
    parts.sequencer.put_key(9, key_hash, KeyEntry(first.seq, first.due_ms, weak))
    assert publish(parts, headers=headers, together=together).duplicate
    with pytest.raises((ConflictError, InputErrors)):
        publish(parts, b"2", headers, together=together)


@given(
    body=st.binary(max_size=20),
    headers=st.dictionaries(st.text("ab-", min_size=1), st.text(max_size=3), max_size=4),
    seed=st.randoms(use_true_random=False),
)
def test_a_digest_is_the_same_for_one_for_many_and_for_a_repair(body, headers, seed) -> None:
    payload = Payload(body, key="k", headers=headers or None)
    names = list(headers)
    seed.shuffle(names)
    shuffled = Payload(body, key="k", headers={name: headers[name] for name in names} or None)
    digest, sealed = sealed_digest(payload)
    assert digest & MARK and digest < 2 * MARK
    assert digest == sealed_digest(shuffled)[0] == published_digest(sealed)
    assert has_content(digest, digest, sealed)
    assert digest != sealed_digest(Payload(body + b"x", key="k", headers=payload.headers))[0]


def test_where_one_digest_is_weak_the_checksums_decide() -> None:
    strong, weak = digest_of(b"data", 7), 99 << 32 | 7
    ones = np.array([strong, strong, weak, weak, strong], np.uint64)
    others = np.array([strong, weak, strong, 98 << 32 | 7, weak + 1], np.uint64)
    assert have_same_content(ones, others).tolist() == [True, True, True, False, False]


@given(st.lists(st.tuples(st.binary(), st.integers(0, 2**32 - 1))))
def test_the_digests_of_many_are_those_of_each(pairs):
    datas, crcs = [data for data, _ in pairs], [crc for _, crc in pairs]
    assert digests_of(datas, crcs) == list(map(digest_of, datas, crcs))
