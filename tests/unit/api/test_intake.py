"""What a client publishes, as far as HTTP has no part in it."""

import json
import tracemalloc

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver.api.intake import Intake
from delayserver.api.json_pieces import PIECE_BYTES
from delayserver.config import Settings
from delayserver.errors import InputError, InputErrors, TooLargeError
from delayserver.records.message import Content, MessageOptions, check_key, check_keys
from tests.scaling import GROWTH_MAX, growth
from tests.unit.fakes import steps_of

NOW_MS = 1_795_192_200_000
SMALLEST_COSTS = 15
"""So many times as much memory as its text takes the shortest item."""
FORMS = ("application/json", "application/x-ndjson", "application/msgpack")

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@pytest.fixture(scope="module")
def intake():
    return Intake(Settings(body_max_bytes=1000, batch_max_messages=5), {"known"}, lambda: 0.5)


def encode(form, documents):
    if form == FORMS[0]:
        return json.dumps(documents).encode()
    if form == FORMS[1]:
        return b"\n".join(json.dumps(document).encode() for document in documents)
    return msgpack.packb(documents)


def read_batch(intake, data, form, now_ms):
    """As the server does it: MessagePack becomes JSON before, in slices."""
    if form == FORMS[2]:
        data, form = steps_of(intake.unpacked(data, now_ms))[1], FORMS[0]
    return intake.batch(data, form, now_ms)


def test_a_message_without_anything_is_due_now(intake):
    message = intake.one(b'{"subject":"a"}', NOW_MS)
    assert (message.subject, message.due_ms) == ("a", NOW_MS)
    assert (message.payload.body, message.payload.content) == (b"null", Content.JSON)
    assert message.payload.key is message.payload.headers is message.payload.origin is None


@pytest.mark.parametrize(
    ("when", "due_ms"),
    [
        ({"delay": "1h30m"}, NOW_MS + 5_400_000),
        ({"delay": 1}, NOW_MS + 1),
        ({"deliver_at": NOW_MS - 1}, NOW_MS),
        ({"deliver_at": NOW_MS + 1}, NOW_MS + 1),
        ({"deliver_at": "2026-11-20T16:30:00.0001Z"}, 1_795_192_200_001),
    ],
)
def test_due_times(intake, when, due_ms):
    document = json.dumps({"subject": "a", **when}).encode()
    assert intake.one(document, NOW_MS).due_ms == due_ms


def test_a_body_is_not_touched(intake):
    body = b'{"b": 1.10,\n "a":[ ] }'
    message = intake.one(b'{"subject":"a","body":%b}' % body, NOW_MS)
    assert message.payload.body == body
    message = read_batch(intake, b'[{"subject":"a","body":%b}]' % body, FORMS[0], NOW_MS).message(0)
    assert message.payload.body == body
    assert intake.under_key(b'{"body":%b}' % body, "a", "k", NOW_MS).payload.body == body


@given(body=VALUES, form=st.sampled_from(FORMS))
def test_every_value_comes_through_in_every_form(intake, body, form):
    if len(json.dumps(body)) > 900 or (form == FORMS[2] and _is_beyond_64_bits(body)):
        return
    data = encode(form, [{"subject": "known", "body": body}])
    message = read_batch(intake, data, form, NOW_MS).message(0)
    assert json.loads(message.payload.body) == body


def _is_beyond_64_bits(value):
    if isinstance(value, list | dict):
        return any(map(_is_beyond_64_bits, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and not -(2**63) <= value < 2**64


@given(data=st.binary(max_size=60), form=st.sampled_from(FORMS))
def test_no_input_does_more_than_be_refused(intake, data, form):
    for read in (
        lambda: read_batch(intake, data, form, NOW_MS),
        lambda: intake.one(data, NOW_MS),
        lambda: intake.under_key(data, "a", "k", NOW_MS),
    ):
        try:
            read()
        except InputError as error:
            assert error.detail


PLAIN = {
    "subject": st.sampled_from(["known", "other.subject"]),
    "delay": st.sampled_from(["1h", 5, None]),
    "deliver_at": st.sampled_from([NOW_MS - 5, NOW_MS + 5, "2026-11-20T16:30:00Z", None]),
    "body": st.sampled_from([1, "text", None, {"a": [1]}]),
    "key": st.sampled_from(["k", "é" * 128, None]),
}
RARE = {
    "body_base64": st.sampled_from(["YQ==", None]),
    "headers": st.sampled_from([{"a": "b"}, {}, None]),
    "watch": st.sampled_from([["w"], [], None]),
    "on_event": st.sampled_from(["fire", None]),
}
BAD = {
    "subject": st.sampled_from(["a", "a b", 5]),
    "delay": st.sampled_from(["x", 10**12]),
    "body": st.just("x" * 2000),
    "key": st.sampled_from(["", "k" * 257, 5]),
    "more": st.just(1),
}


def documents_of(**optional):
    subject = {"subject": optional.pop("subject")}
    document = st.fixed_dictionaries(subject, optional=optional)
    return st.lists(document, max_size=5)


@given(
    documents=documents_of(**PLAIN)
    | documents_of(**PLAIN, **RARE)
    | documents_of(**{**PLAIN, **RARE, **BAD})
    | documents_of(**{**PLAIN, **BAD}),
    form=st.sampled_from(FORMS),
)
def test_what_comes_together_is_taken_or_refused_as_each_alone(intake, documents, form):
    alone, wrong = [], set()
    bodies = [json.dumps(one, separators=(",", ":")).encode() for one in documents]
    for index, body in enumerate(bodies):
        try:
            alone.append(intake.one(body, NOW_MS))
        except InputError:
            wrong.add(str(index))
    data = encode(form, documents)
    if wrong:
        with pytest.raises(InputErrors) as caught:
            read_batch(intake, data, form, NOW_MS)
        assert {error.pointer.split("/")[1] for error in caught.value.errors} == wrong
        with pytest.raises(InputError):
            intake.many(bodies, NOW_MS)
        return
    batch, many = read_batch(intake, data, form, NOW_MS), intake.many(bodies, NOW_MS)
    assert [many.message(index) for index in range(len(many))] == alone
    found = [batch.message(index) for index in range(len(batch))]
    for one in [*found, *alone]:
        if one.payload.content == Content.JSON:  # whatever spaces there were in it
            one.payload = msgspec.structs.replace(one.payload, body=json.loads(one.payload.body))
    assert found == alone


def test_too_many_messages_are_too_large(intake):
    for form in FORMS:
        with pytest.raises(TooLargeError):
            read_batch(intake, encode(form, [{"subject": "a"}] * 6), form, NOW_MS)
        with pytest.raises(TooLargeError):
            read_batch(intake, encode(form, [{}] * 6), form, NOW_MS)


@pytest.mark.parametrize(
    ("form", "data"),
    [
        (FORMS[0], b"[" + b"1," * 1_000_000),
        (FORMS[0], b"[" + b'{"subject":"a"},' * 200_000),
        (FORMS[0], b"[" + b'{"\\u0073ubject":"a"},' * 150_000),
        (FORMS[0], b"[{" + b" " * 1_000_000 + b'"subject":"a"}' + b',{"subject":"a"}' * 200_000),
        (FORMS[1], b"1\n" * 1_000_000),
        (FORMS[1], b'{"subject":"a"}\n' * 200_000),
    ],
)
def test_a_batch_of_too_many_messages_takes_no_more_memory_than_its_text(form, data):
    intake = Intake(Settings(batch_max_messages=1000), {"a"}, lambda: 0.5)
    tracemalloc.start()
    try:
        with pytest.raises(InputError):
            intake.batch(data, form, NOW_MS)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10 * PIECE_BYTES * SMALLEST_COSTS


@pytest.mark.parametrize("form", FORMS[:2])
def test_lines_that_are_not_utf8_are_named_like_all_that_are_bad(form):
    intake = Intake(Settings(), {"a"}, lambda: 0.5)
    good, bad = b'{"subject":"a","body":"\xc3\xa9%b"}', b'{"subject":"a","body":"\xff"}'
    items = [good % b"", bad, b'{"subject":"a b"}', good % (b"x" * PIECE_BYTES), bad, good % b""]
    data = b"[%b]" % b",".join(items) if form == FORMS[0] else b"\n".join(items)
    with pytest.raises(InputErrors, match="3 of 6 messages") as caught:
        intake.batch(data, form, NOW_MS)
    assert [error.pointer for error in caught.value.errors] == ["/1", "/2/subject", "/4"]
    assert "not UTF-8" in caught.value.errors[2].detail


def test_no_text_makes_the_error_of_a_message_dear(intake):
    def read(data):
        with pytest.raises(InputError):
            intake.one(data, NOW_MS)

    def text(n):
        return b'{"subject":"a","on_event":"%b"}' % (b" - at `" * n)

    assert growth(read, text, 2_000) < GROWTH_MAX


def test_keys_are_measured_in_bytes():
    check_keys([])
    for key in ("k" * 256, "é" * 128, "😀" * 64):
        check_key(key)
        check_keys(["a", key])
    for key in ("", "k" * 257, "é" * 129, "😀" * 65):
        for check in (check_key, lambda key: check_keys(["a", key])):
            with pytest.raises(InputError) as caught:
                check(key)
            assert caught.value.pointer == "/key"


DEEP = b'["' + b"[" * 300 + b'\\"",' + b"[" * 255 + b"1" + b"]" * 255 + b',{"a":"{"}]'
"""As deep as a body may be; brackets in text do not count."""


@pytest.mark.parametrize(
    "read",
    [
        lambda intake, body: intake.one(b'{"subject":"a","body":%b}' % body, NOW_MS),
        lambda intake, body: intake.many([b'{"subject":"a","body":%b}' % body], NOW_MS),
        lambda intake, body: intake.under_key(b'{"body":%b}' % body, "a", "k", NOW_MS),
        lambda intake, body: intake.heartbeat(
            b'{"subject":"a","timeout":9,"body":%b}' % body, NOW_MS
        ),
        lambda intake, body: intake.batch(
            b'[{"subject":"a"},{"subject":"a","body":%b}]' % body, FORMS[0], NOW_MS
        ),
        lambda intake, body: intake.batch(
            b'[{"subject":"a","body":1},{"subject":"a","body":%b}]' % body, FORMS[0], NOW_MS
        ),
        lambda intake, body: intake.batch(b'{"subject":"a","body":%b}' % body, FORMS[1], NOW_MS),
        lambda intake, body: read_batch(
            intake, msgpack.packb([{"subject": "a", "body": json.loads(body)}]), FORMS[2], NOW_MS
        ),
    ],
)
def test_a_body_is_nested_256_levels_deep_and_no_deeper(read):
    intake = Intake(Settings(), {"a"}, lambda: 0.5)
    assert read(intake, DEEP)
    assert read(intake, b"[" * 255 + b"{}" + b"]" * 255)
    for body in (b"[" + DEEP + b"]", b'{"a":' * 256 + b"[]" + b"}" * 256, b"[" * 900 + b"]" * 900):
        with pytest.raises(InputError) as caught:
            read(intake, body)
        (error,) = getattr(caught.value, "errors", [caught.value])
        assert error.detail.startswith("nested too deeply")
        assert error.pointer.endswith("/body")


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        [float("inf")],
        {"a": -float("inf")},
        [b""],
        {"a": b"x"},
        {b"a": 1},
        {1: "a"},
        {None: 1},
        msgpack.ExtType(5, b"x"),
        msgpack.Timestamp(1),
        [msgpack.Timestamp(1)],
    ],
    ids=repr,
)
def test_what_json_does_not_have_is_refused_and_not_changed(intake, value):
    batch = [{"subject": "a"}, {"subject": "a", "body": value}, {"subject": "a b"}]
    with pytest.raises(InputErrors) as caught:
        read_batch(intake, msgpack.packb(batch), FORMS[2], NOW_MS)
    assert [error.pointer for error in caught.value.errors] == ["/1", "/2/subject"]


def test_a_float_of_32_bits_and_text_that_looks_like_binary_are_fine(intake):
    body = {"Łódź": ["\u0107", 12.5, 2**63, float(2**1000)], "hebrew": "שלום"}
    packed = msgpack.packb([{"subject": "a", "body": body}], use_single_float=False)
    message = read_batch(intake, packed, FORMS[2], NOW_MS).message(0)
    assert json.loads(message.payload.body) == body
    packed = b"\x91\x82\xa7subject\xa1a\xa4body\xca\x7f\x80\x00\x00"
    with pytest.raises(InputErrors):
        read_batch(intake, packed, FORMS[2], NOW_MS)


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdc\xff\xff",
        b"\x91\x82\xa7subject\xa1s\xa4body" + b"\xdd\x00\x10\x00\x00" * 250,
        b"\x91\x82\xa7subject\xa1s\xa4body\xdd\x00\x40\x00\x00" + b"\x90" * (4 << 20),
        b"\x91\x82\xa7subject\xa1s\xa4body\xdf\x7f\xff\xff\xff",
        b"\x91\x82\xa7subject\xa1s\xa5watch\xdd\x7f\xff\xff\xff",
        b"\x91\xc6\x7f\xff\xff\xff",
    ],
)
def test_memory_for_a_batch_is_no_more_than_a_few_times_its_length(data):
    intake = Intake(Settings(), {"a"}, lambda: 0.5)
    tracemalloc.start()
    try:
        with pytest.raises(InputError):
            read_batch(intake, data, FORMS[2], NOW_MS)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * len(data) + 200_000


def test_a_long_batch_is_done_in_slices():
    intake = Intake(Settings(), {"a"}, lambda: 0.5)
    batch = [{"subject": "a", "body": [[]] * 10_000}] * 100
    slices = sum(1 for _ in intake.unpacked(msgpack.packb(batch), NOW_MS))
    assert slices >= 3
    longest = [{"subject": "a", "body": [None] * 1_000_000}] * 20
    with pytest.raises(TooLargeError, match="as JSON"):
        for _ in intake.unpacked(msgpack.packb(longest), NOW_MS):
            pass


ALL_WRONG = {
    "subject": "a b",
    "delay": "soon",
    "key": "",
    "headers": {"host": "x"},
    "watch": ["a", "a"],
    "body": 1,
    "body_base64": "YQ==",
    "on_event": "explode",
    "colour": "red",
}
POINTERS = {"/subject", "/delay", "/key", "/headers/host", "/watch", "/body_base64", "/on_event"}


def pointers_of(read):
    with pytest.raises(InputErrors) as caught:
        read()
    for error in caught.value.errors[:5]:
        assert error.detail in str(caught.value) or "messages are invalid" in str(caught.value)
    return sorted(error.pointer for error in caught.value.errors)


def test_all_that_is_wrong_is_said_at_once(intake):
    data = json.dumps(ALL_WRONG).encode()
    wrong = sorted(POINTERS | {"/colour"})
    assert pointers_of(lambda: intake.one(data, NOW_MS)) == wrong
    for form in FORMS:
        batch = encode(form, [{"subject": "a"}, ALL_WRONG])
        found = pointers_of(lambda batch=batch, form=form: read_batch(intake, batch, form, NOW_MS))
        assert found == ["/1" + pointer for pointer in wrong]
    under_key = json.dumps({"delay": -1, "watch": 5, "body_base64": "x"}).encode()
    found = pointers_of(lambda: intake.under_key(under_key, "a", "k", NOW_MS))
    assert found == ["/body_base64", "/delay", "/watch"]
    heartbeat = b'{"timeout":0,"body_base64":"x"}'
    found = pointers_of(lambda: intake.heartbeat(heartbeat, NOW_MS))
    assert found == ["/body_base64", "/subject", "/timeout"]


def test_one_error_is_told_as_it_is(intake):
    with pytest.raises(TooLargeError) as caught:
        intake.one(b'{"subject":"a","body":"%b"}' % (b"x" * 2000), NOW_MS)
    assert caught.value.pointer == "/body"
    for data, text in (
        (b"", "no body"),
        (b" ", "no body"),
        (b'{"subject":', "ends too early"),
        (b"[]", "Expected `object`"),
        (b'{"subject":"\xff"}', "not UTF-8"),
    ):
        with pytest.raises(InputError, match=text) as wrong:
            intake.one(data, NOW_MS)
        assert not isinstance(wrong.value, InputErrors)


# ---- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_options_are_read_in_every_form_and_only_where_there_are_some(intake, form):
    plain, chosen = {"subject": "a"}, {"subject": "a", "ttl": "1m", "priority": 9}
    batch = read_batch(intake, encode(form, [plain, chosen]), form, NOW_MS)
    assert batch.options == [None, MessageOptions(60_000, priority=9)]
    by_default = {"subject": "a", "ttl": None, "priority": 0, "jitter": 0}
    assert read_batch(intake, encode(form, [plain, by_default]), form, NOW_MS).options == []
    one = intake.one(json.dumps(chosen).encode(), NOW_MS)
    assert one == batch.message(1)
    del chosen["subject"]
    under_key = intake.under_key(json.dumps(chosen).encode(), "a", "k", NOW_MS)
    assert under_key.payload.options == one.payload.options


def test_a_group_is_an_option(intake):
    data = json.dumps({"subject": "a", "group": "customer:7"}).encode()
    assert intake.one(data, NOW_MS).payload.options == MessageOptions(group="customer:7")
    batch = intake.batch(b"[%b]" % data, FORMS[0], NOW_MS)
    assert batch.options == [MessageOptions(group="customer:7")]


@pytest.mark.parametrize(
    ("drawn", "due_ms"), [(0.0, NOW_MS + 1000), (0.5, NOW_MS + 6000), (0.99999, NOW_MS + 11_000)]
)
def test_a_jitter_is_drawn_when_a_message_comes(drawn, due_ms):
    intake = Intake(Settings(), {"a"}, lambda: drawn)
    message = {"subject": "a", "delay": 1000, "jitter": "10s"}
    assert intake.one(json.dumps(message).encode(), NOW_MS).due_ms == due_ms
    batch = intake.batch(json.dumps([message, {"subject": "a"}]).encode(), FORMS[0], NOW_MS)
    assert (batch.dues_ms, batch.options) == ([due_ms, NOW_MS], [])


@pytest.mark.parametrize(
    ("wrong", "pointer"),
    [
        ({"ttl": 0}, "/ttl"),
        ({"ttl": "soon"}, "/ttl"),
        ({"ttl": "900d"}, "/ttl"),
        ({"ttl": True}, "/ttl"),
        ({"jitter": -1}, "/jitter"),
        ({"jitter": "900d"}, "/jitter"),
        ({"jitter": "1d", "delay": "730d"}, "/jitter"),
        ({"priority": 10}, "/priority"),
        ({"priority": -1}, "/priority"),
        ({"priority": 1.5}, "/priority"),
        ({"priority": "high"}, "/priority"),
        ({"group": ""}, "/group"),
        ({"group": "ä" * 129}, "/group"),
        ({"group": 7}, "/group"),
        ({"priority": 1, "urgency": 9}, "/urgency"),
    ],
)
def test_wrong_options_are_named(intake, wrong, pointer):
    with pytest.raises(InputError) as caught:
        intake.one(json.dumps({"subject": "a", **wrong}).encode(), NOW_MS)
    assert caught.value.pointer == pointer
    data = json.dumps([{"subject": "a", "ttl": 1}, {"subject": "a", **wrong}]).encode()
    with pytest.raises(InputErrors) as several:
        intake.batch(data, FORMS[0], NOW_MS)
    assert [error.pointer for error in several.value.errors] == [f"/1{pointer}"]


def test_all_that_is_wrong_with_options_is_named_at_once(intake):
    document = {"subject": "a", "ttl": 0, "jitter": "900d", "priority": 10, "delay": "900d"}
    with pytest.raises(InputErrors) as caught:
        intake.one(json.dumps(document).encode(), NOW_MS)
    pointers = {error.pointer for error in caught.value.errors}
    assert pointers == {"/ttl", "/jitter", "/priority", "/delay"}


def test_a_heartbeat_has_no_options(intake):
    with pytest.raises(InputError, match="unknown field"):
        intake.heartbeat(b'{"subject": "a", "timeout": "1s", "ttl": 1}', NOW_MS)
