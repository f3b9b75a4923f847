"""Problem documents: each error of ours has a status, and each wrong field a pointer."""

import json
from typing import Literal

import msgspec
import pytest

from delayserver import errors
from delayserver.api.problems import UNREADABLE, input_error, pointer_to, problem_of
from storage.errors import DamageError, DiskFullError, SyncError
from tests.scaling import GROWTH_MAX, growth


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InputError("wrong", "/a"), 422),
        (errors.InputErrors("wrong", [errors.InputError("a", "/0/a")]), 422),
        (errors.TooLargeError("long", "/body"), 413),
        (errors.NotFoundError("nothing"), 404),
        (errors.ConflictError("no", "delivered"), 409),
        (errors.OverloadedError("full"), 503),
        (errors.MediaTypeError("no Arrow"), 415),
        (errors.StoppingError("stopping"), 503),
        (errors.StandbyError("on standby"), 503),
        (errors.DiskReserveError("full"), 507),
        (DiskFullError("pwrite", "a", "no space"), 507),
        (errors.AccessError("no"), 401),
        (errors.AccessError("no", authenticated=True), 403),
        (DamageError("a", 1, "bad"), 500),
        (SyncError("fdatasync", "a", "EIO"), 500),
        (ZeroDivisionError("a secret"), 500),
    ],
)
def test_every_error_has_a_problem(error, status):
    problem = problem_of(error)
    document = json.loads(problem.encode())
    assert problem.status == document["status"] == status
    assert document["type"].startswith("urn:delayserver:problem:")
    assert document["title"] and document["detail"]
    assert "secret" not in document["detail"]
    assert ("retry-after" in problem.headers) == (status == 503)
    assert ("www-authenticate" in problem.headers) == (status == 401)
    assert ("errors" in document) == (status in (413, 422))


@pytest.mark.parametrize(
    ("after_ms", "seconds"), [(0, "1"), (1, "1"), (1000, "1"), (1001, "2"), (60_000, "60")]
)
def test_retry_after_is_whole_seconds_and_never_too_early(after_ms, seconds):
    problem = problem_of(errors.OverloadedError("full", after_ms))
    assert problem.headers["retry-after"] == seconds


def test_a_conflict_tells_the_state():
    assert json.loads(problem_of(errors.ConflictError("no", "dead")).encode())["state"] == "dead"


def test_a_long_list_of_errors_is_cut():
    wrong = errors.InputErrors("wrong", [errors.InputError("a", f"/{n}") for n in range(5000)])
    assert len(json.loads(problem_of(wrong).encode())["errors"]) == 1000


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
