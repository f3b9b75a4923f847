"""A body that is sent is the body that comes out; every other value is refused by its place."""

import dataclasses
import enum
import uuid
from collections import OrderedDict, namedtuple
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver.client.errors import ClientError, UnsendableError
from delayserver.client.transport import path_of
from delayserver.client.values import Draft, Message
from delayserver.client.writing import (
    body_to_send,
    draft_to_send,
    encode,
    encode_message,
    is_filed,
    new_message,
)

Pair = namedtuple("Pair", "a b")


class Color(enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class Order:
    at: datetime
    price: Decimal
    sizes: tuple[int, ...]
    blob: bytes = b""


def received(body: Any) -> Any:
    """Returns what a consumer gets when this body was sent."""
    sent = msgspec.json.decode(encode_message(new_message("s", body)), type=dict[str, msgspec.Raw])
    document: dict[str, Any] = {
        "id": "i",
        "subject": "s",
        "key": None,
        "deliver_at": datetime(2026, 1, 1, tzinfo=UTC),
        "attempt": 1,
        "lease": "l",
        **{name: sent[name] for name in ("body", "body_base64") if name in sent},
    }
    data = msgspec.json.encode(document)
    body_json: dict[str, Any] = {} if "body" not in sent else {"body_json": sent["body"]}
    return msgspec.structs.replace(msgspec.json.decode(data, type=Message), **body_json).body


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 80), 1 << 80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
unsendable = st.sampled_from(
    [
        b"\0",
        bytearray(b"\xff"),
        memoryview(b"a"),
        Decimal("1.50"),
        datetime(2026, 11, 27, 12),  # noqa: DTZ001
        datetime(2026, 11, 27, 12, tzinfo=UTC),
        date(2026, 11, 27),
        timedelta(minutes=30),
        uuid.UUID(int=1),
        {1, 2},
        frozenset(),
        (1, 2),
        Pair(1, 2),
        Color.RED,
        {1: "a"},
        {1.5: "a"},
        {None: 1},
        {True: 1},
        {(1, 2): 1},
        float("nan"),
        float("inf"),
        float("-inf"),
        np.int64(1),
        np.float64("nan"),
        np.float32(1.5),
        np.bool_(True),
        np.array([1, 2]),
        np.datetime64("2026-01-01"),
        complex(1, 2),
        range(3),
        Path("a"),
        object(),
        "\ud800",
    ]
)


@given(plain)
def test_a_body_comes_out_as_it_was_given(body: Any) -> None:
    found = received(body)
    assert found == body
    assert repr(found) == repr(body)


@given(unsendable, plain, st.sampled_from(["top", "list", "dict", "deep"]))
def test_a_value_that_would_come_out_changed_is_refused(wrong: Any, beside: Any, how: str) -> None:
    around = {
        "top": wrong,
        "list": [beside, wrong],
        "dict": {"a": beside, "b": wrong},
        "deep": {"a": [beside, {"b": [wrong]}]},
    }
    if how == "top" and isinstance(wrong, bytes | bytearray | memoryview):
        assert received(wrong) == bytes(wrong)
        return
    with pytest.raises((UnsendableError, UnicodeEncodeError)):
        body_to_send(around[how])


def test_the_refusal_names_the_place_and_what_to_send() -> None:
    with pytest.raises(UnsendableError, match=r"body\.items\[1\]\.price is a Decimal.*send str"):
        body_to_send({"items": [1, {"price": Decimal("1.5")}]})
    with pytest.raises(UnsendableError, match=r"body\.a has the key 1, an int"):
        body_to_send({"a": {1: 2}})
    assert issubclass(UnsendableError, ClientError) and issubclass(UnsendableError, TypeError)


@pytest.mark.parametrize(
    "body", [OrderedDict(a=1), Number.ONE, {"a": Number.ONE}, [True, 1], 2**64, -(2**63) - 1]
)
def test_subclasses_that_are_equal_to_what_comes_out(body: Any) -> None:
    assert received(body) == body


@pytest.mark.parametrize("data", [b"", b"\x00\xff", bytes(range(256))])
def test_whatever_holds_bytes_is_bytes(data: bytes) -> None:
    wide = memoryview(data + data)[::2]  # not in one piece
    for body in (data, bytearray(data), memoryview(data)):
        assert received(body) == data
    assert received(wide) == bytes(wide)


def test_objects_with_fields_are_read_back_by_their_type() -> None:
    order = Order(datetime(2026, 1, 1, tzinfo=UTC), Decimal("1.50"), (1, 2), b"\xff")
    assert msgspec.json.decode(body_to_send(order), type=Order) == order
    assert msgspec.json.decode(body_to_send([order, None]), type=list[Order | None])[0] == order
    with pytest.raises(UnsendableError, match=r"body\.price is nan"):
        body_to_send(dataclasses.replace(order, price=float("nan")))  # type: ignore[arg-type]


def test_a_body_that_contains_itself() -> None:
    body: list[Any] = []
    body.append(body)
    with pytest.raises(UnsendableError, match="contains itself"):
        body_to_send(body)


@pytest.mark.parametrize(
    "changes",
    [
        {"key": b"order-1"},
        {"key": uuid.UUID(int=1)},
        {"headers": {"x": b"7"}},
        {"headers": {b"x": "7"}},
        {"headers": {"x": 7}},
        {"watch": [b"a"]},
        {"group": b"g"},
        {"delay": Decimal(30)},
        {"ttl": 1.5},
        {"on_dead": b"dead"},
        {"subject": b"s"},
    ],
)
def test_fields_that_would_become_other_text(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsendableError, match=next(iter(changes)).rstrip("s")):
        draft_to_send(Draft(**{"subject": "s", "body": 1, **changes}))


def test_definitions_and_paths_are_held_to_the_same() -> None:
    with pytest.raises(UnsendableError, match=r"headers\.x is a bytes"):
        encode({"url": "http://a", "headers": {"x": b"7"}})
    with pytest.raises(UnsendableError, match="not bytes"):
        path_of("subjects", "a", "keys", b"k")  # type: ignore[arg-type]


def test_a_word_for_ack_that_is_none() -> None:
    assert (is_filed("filed"), is_filed("durable")) == (True, False)
    with pytest.raises(ValueError, match="'filled'"):
        is_filed("filled")
