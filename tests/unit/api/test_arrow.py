"""Batches as streams of Arrow: which are taken, and that nothing else is believed."""

import base64
import json
import struct
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc

from delayserver.api.arrow import DICTIONARIES_MAX_BYTES, PARTS_MAX, SCHEMA_MAX_BYTES
from delayserver.api.intake import Intake
from delayserver.config import Settings
from delayserver.errors import InputError, InputErrors, TooLargeError
from delayserver.records.message import Content
from tests.arrow_streams import HEADERS, arrow_of, stream_of, table_of

NOW_MS = 1_795_192_200_000
JSON = "application/json"


@pytest.fixture(scope="module")
def intake():
    return Intake(Settings(body_max_bytes=1000, batch_max_messages=1000), {"known"}, lambda: 0.5)


def read(intake, **columns):
    return intake.arrow(stream_of(pa.table(columns)), NOW_MS)


def refusal(intake, data):
    with pytest.raises(InputError) as caught:
        intake.arrow(data, NOW_MS)
    return caught.value


MESSAGES: list[dict[str, Any]] = [
    {
        "subject": "a",
        "body": {"n": [1, "ü"]},
        "delay": 5,
        "key": "ä",
        "headers": {"x-a": "1", "y": "2"},
    },
    {"subject": "known", "deliver_at": NOW_MS + 7},
    {"subject": "a", "body": None, "deliver_at": 3, "headers": {}},
]


def test_a_table_is_the_messages_that_it_would_be_as_json(intake):
    expected = intake.batch(json.dumps(MESSAGES).encode(), JSON, NOW_MS)
    found = intake.arrow(arrow_of(MESSAGES), NOW_MS)
    assert [json.loads(body) for body in found.bodies] == [json.loads(b) for b in expected.bodies]
    found.bodies = expected.bodies  # json.dumps writes it otherwise
    assert found == expected
    assert found.dues_ms == [NOW_MS + 5, NOW_MS + 7, NOW_MS]


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.dictionary(pa.int8(), pa.string()),
        pa.dictionary(pa.uint64(), pa.large_string()),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows_max", [1, 2, 9])
def test_a_subject_is_text_or_a_dictionary(intake, kind, rows_max):
    names = ["a", "b", "a", "c"]
    table = pa.table({"subject": pa.array(names, kind)})
    assert intake.arrow(stream_of(table, rows_max=rows_max), NOW_MS).subjects == names
    pieces = [pa.table({"subject": pa.array([name], kind)}) for name in names]
    if pa.types.is_dictionary(kind):  # each piece has its own
        assert intake.arrow(stream_of(pa.concat_tables(pieces)), NOW_MS).subjects == names


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.json_()], ids=str)
def test_a_body_of_text_is_json_as_it_stands(intake, kind):
    first = '{"b": 1.10,\n "a":[ ] }'
    texts = [first, None, ' \t"é" \n', "0"]
    storage = pa.array(texts, pa.string() if kind == pa.json_() else kind)
    bodies = pa.ExtensionArray.from_storage(kind, storage) if kind == pa.json_() else storage
    found = read(intake, subject=["a"] * 4, body=bodies)
    assert found.bodies == [first.encode(), b"null", '"é"'.encode(), b"0"]
    assert set(found.contents) == {Content.JSON}


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()], ids=str)
def test_a_binary_body_is_binary(intake, kind):
    bodies = pa.array([b"\xff\x00", None, b"", b" {"], kind)
    found = read(intake, subject=["a"] * 4, body=bodies)
    assert found.bodies == [b"\xff\x00", b"null", b"", b" {"]
    assert found.contents == [Content.BINARY, Content.JSON, Content.BINARY, Content.BINARY]


@pytest.mark.parametrize(
    "text", ["", " ", "{", "1 2", "1,2", '1],"key":"x","a":[1', "NaN", "'a'", '"\x01"', "[" * 900]
)
def test_a_body_is_one_value_of_json(intake, text):
    data = stream_of(pa.table({"subject": ["a", "a b"], "body": ["1", text]}))
    errors = refusal(intake, data).errors
    assert sorted(error.pointer for error in errors) == ["/1/body", "/1/subject"]


def test_two_halves_of_a_body_are_not_one(intake):
    halves = ['["a', 'b"]', "[1", "2]", '{"a":1', "2}"]
    found = refusal(intake, stream_of(pa.table({"subject": ["a"] * 6, "body": halves})))
    assert [error.pointer for error in found.errors] == [f"/{index}/body" for index in range(6)]


@pytest.mark.parametrize("kind", [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint32()])
def test_delays_are_whole_milliseconds(intake, kind):
    found = read(intake, subject=["a"] * 3, delay=pa.array([0, None, 100], kind))
    assert found.dues_ms == [NOW_MS, NOW_MS, NOW_MS + 100]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_durations_and_timestamps_of_any_unit(intake, unit):
    per_s = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}[unit]
    delays = pa.array([0, 2 * per_s, None], pa.int64()).view(pa.duration(unit))
    found = read(intake, subject=["a"] * 3, delay=delays)
    assert found.dues_ms == [NOW_MS, NOW_MS + 2_000, NOW_MS]
    moments = [(NOW_MS // 1000 + 5) * per_s, None, 0, -per_s]
    times = pa.array(moments, pa.int64()).view(pa.timestamp(unit, "Europe/Berlin"))
    found = read(intake, subject=["a"] * 4, deliver_at=times)
    assert found.dues_ms == [NOW_MS + 5_000, NOW_MS, NOW_MS, NOW_MS]


@pytest.mark.parametrize(("unit", "per_ms"), [("us", 1_000), ("ns", 1_000_000)])
def test_a_part_of_a_millisecond_is_rounded_up(intake, unit, per_ms):
    times = [NOW_MS * per_ms + part for part in (0, 1, per_ms - 1, per_ms, per_ms + 1)]
    array = pa.array(times, pa.timestamp(unit, "UTC"))
    dues_ms = read(intake, subject=["a"] * 5, deliver_at=array).dues_ms
    assert dues_ms == [NOW_MS, NOW_MS + 1, NOW_MS + 1, NOW_MS + 1, NOW_MS + 2]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("moment", [2**63 - 1, -(2**63)])
def test_no_number_is_too_large_to_be_refused(intake, unit, moment):
    for name, kind in (("deliver_at", pa.timestamp(unit, "UTC")), ("delay", pa.duration(unit))):
        moments = pa.array([None, 2**62, moment], pa.int64()).view(kind)
        found = refusal(intake, stream_of(pa.table({"subject": ["a"] * 3, name: moments})))
        wrong = {error.pointer for error in found.errors}
        is_past = name == "deliver_at" and unit == "ns" and moment < 0  # of 1677
        assert wrong == ({f"/1/{name}"} if is_past else {f"/1/{name}", f"/2/{name}"})


def test_columns_may_stand_in_any_order_and_be_left_out(intake):
    found = read(intake, key=["k", None], subject=["a", "b"])
    assert (found.keys, found.bodies) == (["k", None], [b"null"] * 2)
    assert read(intake, subject=pa.array([], pa.string())).subjects == []
    assert read(intake, subject=pa.array([], pa.string()).dictionary_encode()).subjects == []


@pytest.mark.parametrize(
    ("columns", "pointer", "text"),
    [
        ({"key": ["a"]}, "/subject", "no column subject"),
        ({"subject": [1]}, "/subject", "it has to be text"),
        ({"subject": ["a"], "colour": ["red"]}, "", "column 'colour'"),
        ({"subject": ["a"], "watch": [["k"]]}, "", "and the rest in JSON"),
        ({"subject": ["a"], "body": [1]}, "/body", "int64; it has to be"),
        ({"subject": ["a"], "body": [{"a": 1}]}, "/body", "struct"),
        ({"subject": ["a"], "delay": ["1s"]}, "/delay", "duration"),
        ({"subject": ["a"], "delay": [1.5]}, "/delay", "double"),
        ({"subject": ["a"], "delay": pa.array([1], pa.uint64())}, "/delay", "uint64"),
        ({"subject": ["a"], "key": [1]}, "/key", "text"),
        ({"subject": ["a"], "key": pa.array(["a"]).dictionary_encode()}, "/key", "dictionary"),
        ({"subject": ["a"], "key": pa.array(["a"], pa.string_view())}, "/key", "string_view"),
        ({"subject": ["a"], "headers": [{"x": "y"}]}, "/headers", "map"),
        (
            {"subject": ["a"], "deliver_at": pa.array([1], pa.timestamp("ms"))},
            "/deliver_at",
            "zone",
        ),
    ],
)
def test_a_column_of_another_kind_is_refused_by_name(intake, columns, pointer, text):
    found = refusal(intake, stream_of(pa.table(columns)))
    assert found.pointer == pointer
    assert text in found.detail


def test_two_columns_of_one_name_are_refused(intake):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["subject", "subject"])
    assert "one name" in refusal(intake, stream_of(table)).detail


def test_every_bad_message_is_named_as_in_json(intake):
    messages: list[dict[str, Any]] = [
        {"subject": "a", "key": "k"},
        {"subject": "no subject"},
        {"subject": "a", "delay": 1, "deliver_at": 1},
        {"key": "x"},
        {"subject": "a", "body": "x" * 1001, "key": "k" * 300},
        {"subject": "a", "delay": -1},
        {"subject": "a", "headers": {"host": "x", "y": None}},
        {"subject": "a", "headers": {"host": "x", "y": "\n"}},
        {"subject": "a", "deliver_at": 10**15},
    ]
    with pytest.raises(InputErrors) as caught:
        intake.batch(json.dumps(messages).encode(), JSON, NOW_MS)
    found = refusal(intake, arrow_of(messages))
    assert str(found) == str(caught.value) == "8 of 9 messages are invalid"
    assert [(one.pointer, one.detail) for one in found.errors] == [
        (one.pointer, one.detail) for one in caught.value.errors
    ]


def test_as_many_as_json_and_no_more(intake):
    table = pa.table({"subject": ["a"] * 1001})
    assert isinstance(refusal(intake, stream_of(table)), TooLargeError)
    assert isinstance(refusal(intake, stream_of(table, rows_max=100)), TooLargeError)
    assert len(intake.arrow(stream_of(table.slice(1)), NOW_MS)) == 1000


def test_a_header_that_is_long_or_deep_is_refused_as_in_json(intake):
    table = table_of([{"subject": "a", "headers": {"x": "y" * 17_000}}])
    (error,) = refusal(intake, stream_of(table)).errors
    assert (error.pointer, error.detail[:20]) == ("/0/headers", "headers are at most ")


# ---- what a stream claims ----------------------------------------------------------------------

SMALL = table_of([{"subject": "a", "body": {"n": 1}, "key": "k", "delay": 1}] * 3)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_compressed_stream_is_refused_before_it_is_decompressed(intake, compression, monkeypatch):
    bodies = pa.array([b"\0" * 50_000_000], pa.binary())
    bomb = stream_of(pa.table({"subject": ["a"], "body": bodies}), compression=compression)
    assert len(bomb) < 1_000_000
    names = pa.array(["a" * 50_000_000]).dictionary_encode()
    dictionary = stream_of(pa.table({"subject": names}), compression=compression)
    opened = list[int]()

    def open_stream(data, real=ipc.open_stream):
        opened.append(len(data))
        return real(data)

    monkeypatch.setattr(ipc, "open_stream", open_stream)
    for data in (bomb, dictionary):
        assert "compress" in refusal(intake, data).detail
    assert all(length < 1000 for length in opened)  # a schema, which is not compressed


def test_a_version_that_could_be_compressed_in_another_way_is_refused(intake):
    data = stream_of(SMALL, metadata_version=ipc.MetadataVersion.V4)
    assert "before Arrow 1.0" in refusal(intake, data).detail


def test_a_stream_is_whole_and_nothing_follows(intake):
    data = stream_of(SMALL, rows_max=1)
    for length in range(len(data)):
        refusal(intake, data[:length])
    assert "bytes follow" in refusal(intake, data + b"\0").detail
    assert "bytes follow" in refusal(intake, data + data).detail
    for other in (b"", b"[]", b"\xff" * 99, struct.pack("<II", 0xFFFFFFFF, 0x7FFFFFFF) + bytes(9)):
        refusal(intake, other)


def test_a_stream_of_very_many_parts_is_refused(intake):
    table = pa.table({"subject": ["a"] * PARTS_MAX})
    assert f"{PARTS_MAX} parts" in refusal(intake, stream_of(table, rows_max=1)).detail
    assert intake.arrow(stream_of(table.slice(1), rows_max=1), NOW_MS)


def test_a_schema_may_say_more_of_a_table_but_not_very_much(intake):
    for length, is_fine in ((SCHEMA_MAX_BYTES // 2, True), (SCHEMA_MAX_BYTES, False)):
        data = stream_of(SMALL.replace_schema_metadata({"pandas": "x" * length}))
        if is_fine:
            assert len(intake.arrow(data, NOW_MS)) == 3
        else:
            assert "a schema has at most" in refusal(intake, data).detail


def test_a_dictionary_that_is_longer_than_its_batches_is_refused(intake):
    names = pa.array(["a" * DICTIONARIES_MAX_BYTES, "a"]).dictionary_encode()
    assert "dictionaries have" in refusal(intake, stream_of(pa.table({"subject": names}))).detail


def test_a_null_in_a_dictionary_is_no_subject(intake):
    names = pa.DictionaryArray.from_arrays([0, 1, None], pa.array(["a", None]))
    found = refusal(intake, stream_of(pa.table({"subject": names})))
    assert [error.pointer for error in found.errors] == ["/1/subject", "/2/subject"]
    found = refusal(intake, stream_of(pa.table({"subject": pa.array([None]).cast(names.type)})))
    assert [error.pointer for error in found.errors] == ["/0/subject"]


@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        ((0, 1 << 30), b"a"),
        ((-9, 97), b"a"),
        ((97, 0), b"a"),
        ((0, 97), b"\xff"),
    ],
    ids=["too long", "before the begin", "backwards", "not UTF-8"],
)
@pytest.mark.parametrize("kind", [pa.string(), pa.json_()], ids=str)
def test_values_are_validated(intake, offsets, text, kind):
    array = pa.array(["a" * 97])
    if kind == pa.json_():
        array = pa.ExtensionArray.from_storage(kind, array)
    data = stream_of(pa.table({"subject": array}))
    before, true, after = data.rpartition(struct.pack("<ii", 0, 97))
    assert true and after.count(b"a" * 97) == 1
    data = before + struct.pack("<ii", *offsets) + after.replace(b"a" * 97, text * 97)
    assert "not a stream of Arrow" in refusal(intake, data).detail


@pytest.mark.parametrize("index", [9, -1])
def test_indexes_are_validated(intake, index):
    indexes = pa.array([index], pa.int32())
    array = pa.DictionaryArray.from_arrays(indexes, pa.array(["a"]), safe=False)
    data = stream_of(pa.table({"subject": array}))
    assert "not a stream of Arrow" in refusal(intake, data).detail


SHAPES = [
    stream_of(table_of(MESSAGES)),
    stream_of(table_of(MESSAGES), rows_max=1),
    stream_of(
        pa.table(
            {
                "subject": pa.array(["a", "b", None, "a"]).dictionary_encode(),
                "body": pa.array([b"a", None, b"", b"bcd"], pa.large_binary()),
                "deliver_at": pa.array([NOW_MS * 1000 + 1, None, 5, 9], pa.timestamp("us", "UTC")),
                "headers": pa.array([[("a", "b"), ("c", "d")], [], None, [("e", "é")]], HEADERS),
            }
        ),
        rows_max=2,
    ),
]


@st.composite
def damaged(draw):
    """A stream of which a few bytes are others."""
    data = bytearray(draw(st.sampled_from(SHAPES)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        width = draw(st.sampled_from([1, 1, 1, 4, 8]))
        value = draw(st.one_of(st.sampled_from([0, 1, 255, 1 << 31, -1]), st.integers()))
        data[at : at + width] = (value % (1 << (8 * width))).to_bytes(width, "little")
    return bytes(data)


def documents_of(data):
    """The messages of a stream, as pyarrow makes objects of them."""
    table = ipc.open_stream(data).read_all()
    for name in ("deliver_at", "delay"):
        if name in table.column_names and not pa.types.is_integer(table.schema.field(name).type):
            return None  # rounding is another test
    documents = []
    for row in table.to_pylist():
        one = {name: value for name, value in row.items() if value is not None}
        if isinstance(one.get("body"), bytes):
            one["body_base64"] = base64.b64encode(one.pop("body")).decode()
        elif "body" in one:
            one["body"] = json.loads(one["body"])
        if "headers" in one:
            one["headers"] = dict(one["headers"])
        documents.append(one)
    return documents


@settings(deadline=None, max_examples=300)
@given(damaged())
def test_whatever_a_stream_holds_it_is_refused_or_read_as_it_stands(data):
    intake = Intake(Settings(body_max_bytes=1000, batch_max_messages=5), set(), lambda: 0.5)
    try:
        found = intake.arrow(data, NOW_MS)
    except InputError:
        return
    documents = documents_of(data)
    if documents is not None:
        expected = intake.batch(json.dumps(documents).encode(), JSON, NOW_MS)
        bodies = list(zip(found.bodies, expected.bodies, found.contents, strict=True))
        for body, other, content in bodies:
            if content == Content.JSON:
                assert json.loads(body) == json.loads(other)
            else:
                assert body == other
        found.bodies = expected.bodies
        assert found == expected


def test_reading_imports_no_pandas():
    script = f"""
import sys
from delayserver.api.intake import Intake
from delayserver.config import Settings
assert "pyarrow" not in sys.modules
intake = Intake(Settings(), set(), lambda: 0.5)
assert not intake.reads_arrow
intake.import_arrow()
assert intake.reads_arrow
for data in {SHAPES[:1]!r}:
    assert len(intake.arrow(data, {NOW_MS}))
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_without_pyarrow_it_says_what_to_install():
    script = """
import sys
sys.modules["pyarrow"] = None
from delayserver.api.intake import Intake
from delayserver.config import Settings
from delayserver.errors import MediaTypeError
intake = Intake(Settings(), set(), lambda: 0.5)
for read in (intake.import_arrow, lambda: intake.arrow(b"", 0)):
    try:
        read()
    except MediaTypeError as error:
        assert "pip install 'delayserver[arrow]'" in str(error)
    else:
        raise AssertionError
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_options_are_columns(intake):
    messages = [
        {"subject": "a", "ttl": 5000, "jitter": 10, "priority": 9},
        {"subject": "a", "jitter": 0},
        {"subject": "a", "priority": 0},
    ]
    expected = intake.batch(json.dumps(messages).encode(), JSON, NOW_MS)
    columns = {
        "subject": ["a"] * 3,
        "ttl": pa.array([5000, None, None], pa.duration("ms")),
        "jitter": pa.array([10, 0, None], pa.int32()),
        "priority": pa.array([9, None, 0], pa.int8()),
    }
    found = read(intake, **columns)
    assert found == expected
    assert (found.dues_ms, len(found.options)) == ([NOW_MS + 5, NOW_MS, NOW_MS], 3)
    assert read(intake, subject=["a"], ttl=pa.array([None], pa.int64())).options == []


def test_wrong_options_in_columns_are_named_as_in_json(intake):
    columns = {
        "ttl": pa.array([0, 1, 1, 1], pa.int64()),
        "jitter": pa.array([0, 1 << 50, 0, 0], pa.int64()),
        "priority": pa.array([0, 0, 10, 1 << 40], pa.int64()),
    }
    data = stream_of(pa.table({"subject": ["a"] * 4, **columns}))
    errors = refusal(intake, data).errors
    assert [error.pointer for error in errors] == [
        "/0/ttl",
        "/1/jitter",
        "/2/priority",
        "/3/priority",
    ]
    wrong = stream_of(pa.table({"subject": ["a"], "priority": ["high"]}))
    assert refusal(intake, wrong).pointer == "/priority"
