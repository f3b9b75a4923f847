"""A document is decoded once; of one that is refused every error is named, with a pointer."""

import json
from typing import Annotated, Literal

import msgspec
import pytest

from delayserver.errors import InputError, InputErrors
from delayserver.wire.fields import TimeoutMs
from delayserver.wire.reading import (
    POINTED_ERRORS_MAX,
    UNREADABLE,
    input_error,
    pointer_to,
    read,
    readable_fields,
)
from tests.scaling import GROWTH_MAX, growth


def test_pointers_are_escaped():
    assert pointer_to() == ""
    assert pointer_to("a/b", 3, "~") == "/a~1b/3/~0"


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    n: int


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    inner: list[Inner] = []
    names: dict[str, str] = {}


@pytest.mark.parametrize(
    ("data", "pointer"),
    [
        (b'{"inner":[{"n":1},{"n":"x"}]}', "/inner/1/n"),
        (b'{"inner":[{}]}', "/inner/0/n"),
        (b'{"inner":[{"n":1,"a/b":2}]}', "/inner/0/a~1b"),
        (b'{"names":{"a":1}}', "/names"),
        (b'{"x":1}', "/x"),
        (b"[]", ""),
        (b"{", ""),
        (b'{"\xff":1}', ""),
    ],
)
def test_the_decoders_errors_become_pointers(data, pointer):
    with pytest.raises(UNREADABLE) as caught:
        msgspec.json.decode(data, type=Outer)
    error = input_error(caught.value)
    assert error.pointer == pointer
    assert "$" not in error.detail
    assert input_error(caught.value, "/7").pointer == "/7" + pointer


def test_what_is_nested_too_deeply_is_wrong_too():
    with pytest.raises(UNREADABLE) as caught:
        msgspec.json.decode(b"[" * 5000)
    assert "deep" in input_error(caught.value).detail


@pytest.mark.parametrize("text", [" - at `", "unknown field `", "missing required field `", ".["])
@pytest.mark.parametrize("data", ['"%s"', '{"names":{"a":"%s"},"inner":["%s"]}', '{"%s":1}'])
def test_no_text_of_a_client_makes_an_error_dear(text, data):
    class Form(msgspec.Struct, forbid_unknown_fields=True):
        inner: list[Literal["x"]] = []
        names: dict[str, str] = {}

    def look(data):
        for form in (Form, Literal["x"]):
            try:
                msgspec.json.decode(data, type=form)
            except UNREADABLE as error:
                input_error(error)

    assert growth(look, lambda n: data.replace("%s", text * n).encode(), 2_000) < GROWTH_MAX


class Part(msgspec.Struct, forbid_unknown_fields=True):
    n: Annotated[int, msgspec.Meta(ge=1)]
    wait: TimeoutMs | None = None


class Whole(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    part: Annotated[Part | None, msgspec.Meta(description="one of them")] = None
    parts: list[Part] = []
    choice: Literal["all"] | Part = "all"
    names: dict[str, str] = {}


@pytest.mark.parametrize(
    ("document", "pointers"),
    [
        ({}, ["/name"]),
        ({"name": 1, "x": 2}, ["/name", "/x"]),
        (
            {"name": "a", "part": {"n": 0, "wait": "2h", "x": 1}},
            ["/part/n", "/part/wait", "/part/x"],
        ),
        ({"name": "a", "part": {}, "parts": {}}, ["/part/n", "/parts"]),
        ({"name": "a", "parts": [{"n": 1}, {"n": 0}, 3]}, ["/parts/1/n", "/parts/2"]),
        ({"name": "a", "choice": {"wait": "x"}}, ["/choice/n", "/choice/wait"]),
        ({"name": "a", "choice": "none"}, ["/choice"]),
        ({"name": "a", "names": {"b": 1, "c/d": None, "e": "f"}}, ["/names/b", "/names/c~1d"]),
        ([], [""]),
        (None, [""]),
    ],
)
def test_every_error_is_named_however_deep_it_stands(document, pointers):
    with pytest.raises(InputError) as caught:
        read(json.dumps(document).encode(), Whole)
    found = getattr(caught.value, "errors", [caught.value])
    assert [error.pointer for error in found] == pointers


def test_a_good_document_is_read_with_its_durations():
    found = read(b'{"name":"a","part":{"n":2,"wait":"1m"},"choice":{"n":1}}', Whole)
    assert found == Whole("a", Part(2, TimeoutMs(60_000)), choice=Part(1))


@pytest.mark.parametrize("data", [b"", b" ", b"{", b'{"name":"\xff"}', b"[" * 5000])
def test_bytes_that_are_no_document_have_one_error(data):
    with pytest.raises(InputError) as caught:
        read(data, Whole)
    assert not isinstance(caught.value, InputErrors)
    assert caught.value.pointer == ""


def test_the_good_fields_of_a_bad_document_can_be_looked_at():
    values, errors = readable_fields(b'{"name":"a","parts":1}', Whole)
    assert (values, [one.pointer for one in errors]) == ({"name": "a"}, ["/parts"])


def test_a_long_list_of_bad_items_ends_the_search():
    data = json.dumps({"name": "a", "parts": [0] * 10 * POINTED_ERRORS_MAX}).encode()
    with pytest.raises(InputErrors) as caught:
        read(data, Whole)
    assert len(caught.value.errors) == POINTED_ERRORS_MAX
