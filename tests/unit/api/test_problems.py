"""Problem documents: each error of ours has a status, and each wrong field a pointer."""

import json

import pytest

from delayserver import errors
from delayserver.api.problems import problem_of
from storage.errors import DamageError, DiskFullError, SyncError


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
