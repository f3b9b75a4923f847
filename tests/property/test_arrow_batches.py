"""A batch as a stream of Arrow against the same batch as JSON: the same messages, errors, ids."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from delayserver.decisions.new_messages import PublishBatch
from delayserver.errors import ConflictError, InputError, InputErrors
from delayserver.times import are_seconds
from tests.arrow_streams import TYPES, stream_of, table_of
from tests.property.test_publishing import KEYS, SUBJECTS, Parts
from tests.unit.fakes import START_MS

Document = dict[str, Any]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

subjects = st.sampled_from(SUBJECTS)
bodies: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 1.5, "é", [], {"n": [1, {"m": None}]}, "x" * 300]
)
headers = st.sampled_from([{}, {"x-shop": "7"}, {"b": "1", "a": "2"}, {"a": "2", "b": "1"}])
delays = st.sampled_from([0, 1, 5_000, 86_400_000])
moments = st.sampled_from([-1, 0, START_MS - 1, START_MS, START_MS + 1, START_MS + 7_200_000])
seconds = st.sampled_from([10**8, START_MS // 1000, 10**11])
documents: st.SearchStrategy[Document] = st.builds(
    lambda more, when: {**more, **when},
    st.fixed_dictionaries(
        {"subject": subjects},
        optional={
            "body": bodies,
            "key": st.sampled_from(KEYS),
            "headers": headers,
            "ttl": st.sampled_from([1, 86_400_000]),
            "jitter": delays,
            "priority": st.integers(0, 9),
        },
    ),
    st.one_of(
        st.just({}),
        st.fixed_dictionaries({"delay": delays}),
        st.fixed_dictionaries({"deliver_at": moments}),
    ),
)
any_documents: st.SearchStrategy[Document] = st.fixed_dictionaries(
    {},
    optional={
        "subject": st.one_of(subjects, st.sampled_from(["", "a b", "é", "x" * 129])),
        "body": bodies,
        "key": st.sampled_from([*KEYS, "", "k" * 257, "é" * 129]),
        "headers": st.one_of(
            headers,
            st.sampled_from(
                [{"a b": "c"}, {"host": "x"}, {"a": "\n", "A": "b"}, {"a": "b" * 17_000}]
            ),
            st.just({"a": None}),
        ),
        "delay": st.one_of(delays, st.integers(-(2**63), 2**63 - 1)),
        "deliver_at": st.one_of(moments, seconds, st.integers(-(2**63), 2**63 - 1)),
        "ttl": st.integers(-(2**63), 2**63 - 1),
        "jitter": st.one_of(delays, st.integers(-(2**63), 2**63 - 1)),
        "priority": st.integers(-1, 10),
    },
)
layouts = st.sampled_from(
    [
        {},
        {"subject": pa.large_string(), "body": pa.large_string(), "key": pa.large_string()},
        {"subject": pa.dictionary(pa.int16(), pa.string())},
        {"deliver_at": pa.timestamp("ms", "UTC"), "delay": pa.duration("ms")},
    ]
)
pieces = st.sampled_from([None, 1, 2])


def as_json(messages: list[Document]) -> bytes:
    return json.dumps(messages, ensure_ascii=False).encode()


def as_kind(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return column.dictionary_encode().cast(kind)
    return column.view(kind) if pa.types.is_temporal(kind) else column.cast(kind)


def as_arrow(messages: list[Document], layout: dict[str, pa.DataType], rows: int | None) -> bytes:
    plain = table_of(messages)
    columns = {
        name: as_kind(plain[name].combine_chunks(), layout.get(name, TYPES[name]))
        for name in plain.column_names
    }
    return stream_of(pa.table(columns), rows_max=rows)


def read(parts: Parts, data: bytes, *, is_arrow: bool) -> PublishBatch | list[tuple[str, str]]:
    """The batch, or what is wrong with it."""
    try:
        if is_arrow:
            return parts.intake.arrow(data, START_MS)
        return parts.intake.batch(data, "application/json", START_MS)
    except InputErrors as error:
        return [(one.pointer, one.detail) for one in error.errors]


@settings(deadline=None)
@given(
    messages=st.lists(st.one_of(documents, any_documents), max_size=6), layout=layouts, rows=pieces
)
def test_a_table_is_read_or_refused_as_json_is(
    messages: list[Document], layout: dict[str, pa.DataType], rows: int | None
) -> None:
    parts = Parts()
    found = read(parts, as_arrow(messages, layout, rows), is_arrow=True)
    if "deliver_at" in layout:  # A timestamp before 1973 is a time, and no number of seconds.
        messages = [
            {**one, "deliver_at": 0} if are_seconds(one.get("deliver_at", 0)) else one
            for one in messages
        ]
    assert found == read(parts, as_json(messages), is_arrow=False)


def publish(parts: Parts, batch: object) -> tuple[object, ...]:
    """What a batch is answered."""
    assert isinstance(batch, PublishBatch)
    try:
        done = parts.publishing.publish_batch(batch, START_MS)
    except InputErrors as error:
        return tuple((one.pointer, one.detail) for one in error.errors)
    except (ConflictError, InputError) as error:
        return (str(error),)
    return parts.ids.texts(done.ids), sorted(done.duplicates), done.last_seq


@settings(deadline=None)
@given(
    before=st.lists(documents, min_size=1, max_size=6),
    messages=st.lists(documents, min_size=1, max_size=12),
    layout=layouts,
    rows=pieces,
)
def test_a_table_is_published_as_json_is(
    before: list[Document],
    messages: list[Document],
    layout: dict[str, pa.DataType],
    rows: int | None,
) -> None:
    by_arrow, by_json = Parts(), Parts()
    for parts in (by_arrow, by_json):
        publish(parts, read(parts, as_json(before), is_arrow=False))
    found = publish(by_arrow, read(by_arrow, as_arrow(messages, layout, rows), is_arrow=True))
    assert found == publish(by_json, read(by_json, as_json(messages), is_arrow=False))
    assert by_arrow.outcome() == by_json.outcome()


@given(st.lists(st.datetimes(timezones=st.just(UTC)), min_size=1, max_size=5))
def test_a_timestamp_is_the_same_time_as_its_text(times: list[datetime]) -> None:
    parts = Parts()
    texts = [{"subject": SUBJECTS[0], "deliver_at": one.isoformat()} for one in times]
    micros = [(one - EPOCH) // timedelta(microseconds=1) for one in times]
    table = pa.table(
        {
            "subject": [SUBJECTS[0]] * len(times),
            "deliver_at": pa.array(micros, pa.timestamp("us", "Asia/Tokyo")),
        }
    )
    found = read(parts, stream_of(table), is_arrow=True)
    assert found == read(parts, as_json(texts), is_arrow=False)
