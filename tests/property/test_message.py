"""Payloads: many are encoded as one by one, byte for byte."""

from hypothesis import given, settings
from hypothesis import strategies as st

from delayserver.records.ids import KeyHasher
from delayserver.records.message import Content, Payload, encode_payload, encode_payloads
from storage.frame import seal
from storage.rows import NO_KEY

text = st.text(st.characters(codec="utf-8"))
long = st.sampled_from([0, 1, 31, 32, 255, 256, 65_535, 65_536])
bodies = st.binary() | long.map(lambda length: b"x" * length)
keys = st.none() | text | long.map(lambda length: "k" * length)
headers = st.none() | st.dictionaries(text, text, max_size=20)


@settings(deadline=None)
@given(st.lists(st.tuples(bodies, keys, headers)), st.sampled_from(Content))
def test_many_payloads(
    rows: list[tuple[bytes, str | None, dict[str, str] | None]], content: Content
) -> None:
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], []]
    count = len(rows)
    payloads = encode_payloads(
        columns[0], [content] * count, columns[1], columns[2], [None] * count
    )
    plain = [encode_payload(Payload(body, content, key, own)) for body, key, own in rows]
    assert [seal(payload) for payload in payloads] == plain


@given(st.lists(st.tuples(st.integers(0, (1 << 32) - 1), st.none() | text)))
def test_many_keys(rows: list[tuple[int, str | None]]) -> None:
    hasher = KeyHasher(b"secret")
    hashes = hasher.many([number for number, _ in rows], [key for _, key in rows])
    assert hashes == [NO_KEY if key is None else hasher(n, key) for n, key in rows]
